"""One output of a request while it is drawn: its generation, its text, and where it stops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..text_stream import TextStream
from .requests import GenerationRequest, Piece, TokenLogprob
from .stop_text import StopText

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ..generation import Generation


class RunningOutput:
    """Takes the tokens of one generation and makes pieces of them. Used in the worker thread only."""

    def __init__(self, generation: Generation, index: int, request: GenerationRequest, tokenizer: Tokenizer | None) -> None:
        self.generation = generation
        self.index = index
        self.request = request
        self.finish_reason: str | None = None
        self.text = ""
        self._decoder = None if tokenizer is None else TextStream(tokenizer)
        self._stop = StopText(request.stop)

    def take(self, token: int | None) -> Piece | None:
        """The piece that a step's token makes; None where the step drew nothing and the output goes on."""
        ended = self.generation.finish_reason
        if token is None and ended is None:
            return None
        logprobs = () if token is None or self.request.logprobs is None else (self._logprob(token, self.request.logprobs),)
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

    def _logprob(self, token: int, n_top: int) -> TokenLogprob:
        logits = np.asarray(self.generation.logits, np.float64)
        values = logits - (logits.max() + np.log(np.exp(logits - logits.max()).sum()))
        top: list[int] = []
        if n_top:
            n_top = min(n_top, len(values))
            best = np.argpartition(-values, n_top - 1)[:n_top]
            top = sorted((int(t) for t in best), key=lambda t: (-values[t], t))
        return TokenLogprob(token, float(values[token]), tuple((t, float(values[t])) for t in top))
