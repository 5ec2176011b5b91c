"""From the pieces of outputs to the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from json.encoder import encode_basestring
from typing import Any

from .event_stream import encode
from .requests import Piece
from .responses import ChatShape, Shape


class EventParts:
    """Writes pieces as events, and before an output's first what stands before it.

    Parameters
    ----------
    echo
        The text that stands before an output, by its index.
    """

    def __init__(self, shape: Shape, with_usage: bool, echo: Callable[[int], str]) -> None:
        self._shape = shape
        self._with_usage = with_usage
        self._echo = echo
        self._begun: set[int] = set()  # outputs that have had an event
        self._around: dict[int, tuple[bytes, bytes]] = {}  # of each output: what stands around the text of a plain piece

    def of(self, pieces: Iterable[tuple[int, Piece]]) -> bytes:
        """The events of (index of the output, piece)."""
        return b"".join([self._event(index, piece) for index, piece in pieces])

    def _event(self, index: int, piece: Piece) -> bytes:
        text = piece.text
        if piece.finish_reason is None and not piece.logprobs and index in self._begun:  # nearly all of them
            if not text:
                return b""
            before, after = self._around.get(index) or self._frame(index)
            return before + encode_basestring(text).encode() + after
        return self._shape.events(self._parts(index, piece), self._with_usage)

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """An event is encoded once, with a text that stands nowhere else in it."""
        mark = f"text of {self._shape.id}"
        before, _, after = self._shape.events([self._shape.delta(index, mark, (), None, 0)], self._with_usage).partition(encode(mark))
        self._around[index] = before, after
        return before, after

    def _parts(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        parts, shape = [], self._shape
        if index not in self._begun:
            self._begun.add(index)
            echo = self._echo(index)
            if isinstance(shape, ChatShape):
                parts.append(shape.opening(index))
            elif echo:
                parts.append(shape.delta(index, echo, (), None, 0))
        if piece.text or piece.logprobs or piece.finish_reason is not None or parts:
            parts.append(shape.delta(index, piece.text, piece.logprobs, piece.finish_reason, piece.offset))
        return parts
