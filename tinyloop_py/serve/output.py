"""One output of a request while it is drawn: its generation, its text, and where it stops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..stop_text import StopText
from ..text_decoder import TextDecoder
from ..text_stream import N_CONTEXT
from ..token_logprobs import TokenLogprobs, token_logprobs
from .requests import GenerationRequest, Piece

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ..generation import Generation


class RunningOutput:
    """Takes the tokens of one generation and makes pieces of them. Used in the worker thread only.

    Where nothing but tokens can end it, they are made pieces when they are handed on, several at a time: between two steps all code is
    cold, and the text of one token then costs as much as that of five does at once.
    """

    def __init__(self, generation: Generation, index: int, request: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        self.generation = generation
        self.index = index
        self.request = request
        self.begun = False  # a token was drawn
        self.finish_reason: str | None = None
        self._text = ""
        self._n_decoded = 0  # characters, those of a stop string and those held back included
        self._decoder = None if tokenizer is None else TextDecoder(tokenizer, context=request.tokens[-N_CONTEXT:])
        self._stop = StopText(request.stop)
        self._at_once = bool(request.stop) or request.logprobs is not None
        self._drawn: list[int | None] = []  # not yet made pieces; None for an end without a token
        self._pieces: list[Piece] = []
        self._error: Exception | None = None

    def take(self, token: int | None) -> bool:
        """Take what a step drew, None where that is nothing; whether there are pieces to hand on, for the first time since they were."""
        ended = self.generation.finish_reason
        if token is None and ended is None:
            return False
        is_first = not (self._drawn or self._pieces)
        self.begun = True
        self.finish_reason = ended
        self._drawn.append(token)
        if self._at_once:
            self._make()
        return is_first

    def pieces(self) -> list[Piece]:
        """What was drawn since the last call."""
        self._make()
        pieces, self._pieces = self._pieces, []
        return pieces

    @property
    def text(self) -> str:
        """All of it that may be shown so far."""
        self._make()
        return self._text

    def close(self) -> None:
        """Ends it early and frees its pages."""
        self.generation.close()

    def _make(self) -> None:
        if self._error is not None:
            raise self._error
        drawn, self._drawn = self._drawn, []
        try:
            for n_left, token in zip(range(len(drawn) - 1, -1, -1), drawn, strict=True):
                self._make_piece(token, None if n_left else self.finish_reason)
        except Exception as error:  # what could not be made is never left out
            self._error = error
            raise

    def _make_piece(self, token: int | None, ended: str | None) -> None:
        offset = self._n_decoded
        text = "" if token is None or ended == "stop" else self._show(token)  # a stop token is not shown
        if self._stop.found is not None:
            ended = self.finish_reason = "stop"
        elif ended is not None:
            text += self._flush()
        self._text += text
        self._pieces.append(Piece(self.index, text, () if token is None else (token,), self._logprobs(token), ended, offset))

    def _show(self, token: int) -> str:
        if self._decoder is None:
            return ""
        text = self._decoder.push(token)
        self._n_decoded += len(text)
        return self._stop.push(text)

    def _flush(self) -> str:
        if self._decoder is None:
            return ""
        text = self._stop.push(self._decoder.flush())
        return text if self._stop.found is not None else text + self._stop.flush()

    def _logprobs(self, token: int | None) -> tuple[TokenLogprobs, ...]:
        n_top = self.request.logprobs
        if n_top is None or token is None:
            return ()
        logits = self.generation.logits
        return () if logits is None else (token_logprobs(logits, token, n_top),)
