"""Text from tokens as they come: never half a character, and in the end exactly what decoding them all gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # what a tokenizer shows for bytes that are no character yet


class TextDecoder:
    """Decodes a growing sequence of tokens piece by piece.

    A piece is decoded together with the tokens before it, since a token's text may depend on its neighbours (a leading
    space, a character of several tokens); only the tokens since the last complete piece are decoded again.

    Parameters
    ----------
    context
        Tokens before the first, whose text is not given out: the end of a prompt that is continued.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = [*context]
        self._context = 0  # first token that is decoded again
        self._shown = len(self._ids)  # first token whose text has not been given out

    def push(self, token: int) -> str:
        """The text that a token completes, often empty or more than the token's own."""
        self._ids.append(token)
        before, after = self._decode(self._shown), self._decode(len(self._ids))
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        """What is left at the end, incomplete characters as U+FFFD."""
        before, after = self._decode(self._shown), self._decode(len(self._ids))
        self._context = self._shown = len(self._ids)
        return after[len(before) :]

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._context : end], skip_special_tokens=self._skip)
