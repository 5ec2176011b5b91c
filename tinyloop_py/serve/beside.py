"""Work of a size that would hold up the event loop, done in a thread.

A thread alone is not enough: the tokenizers library keeps the interpreter's lock while it encodes or decodes one text, and
lets go of it for a batch, so texts go to it as batches of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INLINE_SIZE = 2000  # characters, tokens or bytes; less is done at once
T = TypeVar("T")


async def beside(size: int, work: Callable[[], T]) -> T:
    """The result of `work()`, which runs in a thread where it is large."""
    return work() if size <= INLINE_SIZE else await asyncio.to_thread(work)


def encode(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    """Token ids of a text."""
    ids: list[int] = tokenizer.encode_batch([text], add_special_tokens=special)[0].ids
    return ids


def decode(tokenizer: Tokenizer, tokens: Sequence[int], *, skip_special: bool = False) -> str:
    """The text of token ids."""
    return tokenizer.decode_batch([list(tokens)], skip_special_tokens=skip_special)[0]
