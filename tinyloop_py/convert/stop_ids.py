"""Token ids that end a generation: those that the configs name and the end-of-turn token of the chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..errors import FormatError
from ..strict_json import is_int, shown

# Ends of an assistant's turn by family; a template that writes one ends its turns with it. Some configs name another
# token only (Ouro ships eos = <|endoftext|>, its template ends turns with <|im_end|>).
END_OF_TURN = (
    "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<|end_turn|>", "<|eot|>", "<|eom_id|>", "<end_of_utterance>",
)  # fmt: skip


def collect_stop_ids(named: Iterable[Any], chat_template: str | None, token_id: Callable[[str], int | None], vocab_size: int) -> tuple[int, ...]:
    """`named` are ids, lists of ids, or None, as configs give them; the result keeps their order, each id once."""
    ids: list[int] = []
    for value in named:
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                if not is_int(item) or not 0 <= item < vocab_size:
                    raise FormatError(f"eos_token_id is {shown(value)}, expected token ids below {vocab_size}")
                ids.append(item)
    for token in END_OF_TURN:
        if chat_template and token in chat_template and (found := token_id(token)) is not None and found < vocab_size:
            ids.append(found)
    return tuple(dict.fromkeys(ids))
