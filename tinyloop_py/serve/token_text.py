"""The text and the bytes of single tokens, as log-probabilities report them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The letter that byte-level tokenizers write for each byte: printable ones stand for themselves, the others follow from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenText:
    """Text and bytes by token id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = '"ByteLevel"' in tokenizer.to_str()
        self._special = set(tokenizer.get_added_tokens_decoder())
        self._texts: dict[int, str] = {}  # of the vocabulary's tokens, as they come up
        self._bytes: dict[int, list[int]] = {}

    def text(self, token: int) -> str:
        """What the token decodes to on its own; U+FFFD stands for what is no whole character."""
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return self._texts[token]

    def bytes(self, token: int) -> list[int]:
        """Its bytes, which need not be whole characters."""
        if token not in self._bytes:
            self._bytes[token] = self._bytes_of(token)
        return self._bytes[token]

    def _bytes_of(self, token: int) -> list[int]:
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return []
        if token not in self._special:
            if (byte := BYTE.fullmatch(piece)) is not None:
                return [int(byte[1], 16)]
            alphabet = _byte_alphabet()
            if self._byte_level and all(c in alphabet for c in piece):
                return [alphabet[c] for c in piece]
        return list(self.text(token).encode())
