"""TextStream: the text of new tokens as they are drawn, up to a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from .stop_text import StopText
from .text_decoder import TextDecoder
from .token_logprobs import TokenLogprobs
from .token_stream import TokenStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from typing_extensions import Self

N_CONTEXT = 8  # tokens of the prompt that the first new one is decoded with


class TextStream:
    """Pieces of text, an iterator and a context manager; made by `Model.stream_text`.

    A piece is never empty, ends between characters and holds nothing of a stop string. Joined they are what the new tokens
    decode to, up to the stop string; bytes that end in mid-character come last, as U+FFFD. A stop token has no text.

    Attributes
    ----------
    tokens : list of int
        The new tokens so far, the one that completed a stop string included.
    """

    def __init__(
        self, stream: TokenStream, tokenizer: Tokenizer, prompt: Sequence[int], stops: Iterable[str], stop_tokens: frozenset[int], skip_special: bool
    ) -> None:
        self._stream = stream
        self._decoder = TextDecoder(tokenizer, skip_special_tokens=skip_special, context=prompt[-N_CONTEXT:])
        self._stop = StopText(stops)
        self._stop_tokens = stop_tokens
        self._flushed = False
        self.tokens: list[int] = []

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        n_tokens = self._stream._generation.n_tokens
        try:
            piece = self._next_piece()
        except BaseException:
            if self._stream._generation.n_tokens > n_tokens:  # a signal's handler raised, and text goes with it
                self._stream.close()
            raise
        if not piece:
            raise StopIteration
        return piece

    def _next_piece(self) -> str:
        """The next piece, "" at the end."""
        while self._stop.found is None:
            token = next(self._stream, None)
            if token is None:
                return self._rest()
            self.tokens.append(token)
            piece = "" if token in self._stop_tokens else self._stop.push(self._decoder.push(token))
            if self._stop.found is not None:
                self._stream.close()
            if piece:
                return piece
        return ""

    def _rest(self) -> str:
        """What the end of the tokens leaves to show."""
        if self._flushed or self.finish_reason == "cancelled":
            return ""
        self._flushed = True
        return self._stop.push(self._decoder.flush()) + self._stop.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<tinyloop.TextStream {len(self.tokens)} new tokens, {self.finish_reason or 'running'}>"

    def close(self) -> None:
        """End the output and free its pages. Idempotent."""
        self._stream.close()

    @property
    def finish_reason(self) -> str | None:
        """As `TokenStream.finish_reason`; "stop" for a stop string too."""
        return "stop" if self._stop.found is not None else self._stream.finish_reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stop.found

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from a pool and were not run."""
        return self._stream.cached_tokens

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """One record for each of `tokens`, where the call asked for them."""
        return self._stream.logprobs

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self._stream.seed
