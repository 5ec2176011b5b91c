"""TokenStream: new tokens as they are drawn."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from .token_logprobs import TokenLogprobs, token_logprobs

if TYPE_CHECKING:
    from typing_extensions import Self

    from .generation import Generation
    from .loaded_model import LoadedModel


class TokenStream:
    """The new tokens of one call, an iterator and a context manager; made by `Model.generate_stream`.

    The prompt has run when the stream is there; each `next` runs one step. Streams of one model interleave, over threads
    too; one stream serves one thread at a time. Closing the stream, dropping it or leaving its `with` block ends the work and
    frees its pages. An error or an interrupt in `next` ends it as well.

    Attributes
    ----------
    logprobs : list of TokenLogprobs
        One record for each token that was yielded, where the call asked for them.
    """

    def __init__(self, model: LoadedModel, generation: Generation, n_logprobs: int = 0) -> None:
        self._model = model
        self._generation = generation
        self._n_logprobs = n_logprobs
        self.logprobs: list[TokenLogprobs] = []

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        generation = self._generation
        n_tokens = generation.n_tokens
        try:
            if generation.finish_reason is None:
                self._model._check_open("TokenStream.__next__")
            token = next(generation)
            if self._n_logprobs:
                assert generation.logits is not None
                self.logprobs.append(token_logprobs(generation.logits, token, self._n_logprobs))
            return token
        except BaseException:
            if generation.n_tokens > n_tokens:  # a signal's handler raised, and a token that was drawn goes with it
                generation.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        g = self._generation
        return f"<tinyloop.TokenStream {g.n_prompt} prompt + {g.n_tokens - g.n_prompt} new tokens, {g.finish_reason or 'running'}>"

    def close(self) -> None:
        """End the output and free its pages; another thread's step in it ends first. Idempotent."""
        self._generation.close()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from a pool or a prefix cache and were not run."""
        return self._generation.n_cached

    @property
    def finish_reason(self) -> str | None:
        """None while there is more to come; then "stop" (a stop token came), "length" (max_tokens are drawn) or "cancelled"."""
        return self._generation.finish_reason

    @property
    def seed(self) -> int:
        """The seed in use: another call that passes it draws the same tokens."""
        return self._generation.sampling.seed
