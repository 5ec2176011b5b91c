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
    """Takes the tokens of one generation and makes pieces of them. Used in the worker thread only."""

    def __init__(self, generation: Generation, index: int, request: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        self.generation = generation
        self.index = index
        self.request = request
        self.begun = False  # a token was drawn
        self.finish_reason: str | None = None
        self.text = ""
        self._decoder = None if tokenizer is None else TextDecoder(tokenizer, context=request.tokens[-N_CONTEXT:])
        self._stop = StopText(request.stop)

    def take(self, token: int | None) -> Piece | None:
        """The piece that a step's token makes; None where the step drew nothing and the output goes on."""
        ended = self.generation.finish_reason
        if token is None and ended is None:
            return None
        self.begun = True
        logprobs = self._logprobs(token)
        text = "" if token is None or ended == "stop" else self._show(token)  # a stop token is not shown
        if self._stop.found is not None:
            ended = "stop"
        elif ended is not None:
            text += self._flush()
        self.finish_reason = ended
        self.text += text
        return Piece(self.index, text, () if token is None else (token,), logprobs, ended)

    def close(self) -> None:
        """Ends it early and frees its pages."""
        self.generation.close()

    def _show(self, token: int) -> str:
        return "" if self._decoder is None else self._stop.push(self._decoder.push(token))

    def _flush(self) -> str:
        if self._decoder is None:
            return ""
        text = self._stop.push(self._decoder.flush())
        return text if self._stop.found is not None else text + self._stop.flush()

    def _logprobs(self, token: int | None) -> tuple[TokenLogprobs, ...]:
        n_top, logits = self.request.logprobs, self.generation.logits
        return () if token is None or n_top is None or logits is None else (token_logprobs(logits, token, n_top),)
