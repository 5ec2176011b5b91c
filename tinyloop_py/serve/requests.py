"""What is asked of an engine, and what it gives back piece by piece."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import index
from typing import TYPE_CHECKING, Any

from ..token_logprobs import TokenLogprobs
from ..tokens import as_tokens, check_vocab
from .errors import ServeError, bad_request, context_exceeded

if TYPE_CHECKING:
    from ..model import Model


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: the arguments of `Model.generate` by the same names."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, and `n` outputs for it.

    Parameters
    ----------
    tokens
        The prompt's token ids.
    max_tokens
        Most tokens of an output.
    loops
        Depth; None is the model's default.
    stop
        Texts that end an output and are not shown.
    stop_tokens
        Ids that end an output, shown nowhere; None takes the model's.
    logprobs
        How many of the likeliest alternatives to report for every token; None reports nothing.
    tenant, namespace
        Whose request it is, and whose prefixes it may hit. Two tenants never share a namespace: the caller sees to that.
    keep_first
        With automatic prefixes: how many tokens of the prompt to keep on their own (a system message); 0 for none.
    keep_turn
        With automatic prefixes: what the next prompt will begin with, given the output's text; None keeps prompt and output as they were drawn.
    """

    tokens: Sequence[int]
    max_tokens: int = 128
    loops: int | None = None
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] | None = None
    logprobs: int | None = None
    tenant: str = ""
    namespace: str | None = None
    keep_first: int = 0
    keep_turn: Callable[[str], Sequence[int]] | None = None
    deadline: float | None = None  # seconds from its arrival; None takes the engine's


@dataclass(slots=True)
class Piece:
    """A part of an output: what one token completed. The last one of an output has a finish reason."""

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    offset: int = 0  # with log-probabilities: characters of the output before its token


class Stream:
    """The pieces of a request as they come, for one reader. Made by `Engine.submit`.

    Leaving `async with`, or `cancel()`, ends the work within two steps, or at once where it still waits.
    """

    def __init__(self, request: GenerationRequest, cancel: Callable[[], None]) -> None:
        self.request = request
        self.n_prompt = len(request.tokens)
        self.n_cached = 0  # prompt tokens taken from a prefix; final with the first piece
        self.n_generated = 0  # tokens that were drawn, read or not
        self.began = False  # its prompt is run, or was
        self._open = request.n  # outputs that have not ended
        self._cancel = cancel
        self._events: deque[Piece | ServeError] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._cancelled = False

    @property
    def ended(self) -> bool:
        """Whether the last piece, or an error, was given."""
        return self._ended

    def cancel(self) -> None:
        """End the work, and the iteration. Idempotent; after the end it does nothing."""
        if not self._ended:
            self._cancelled = True
            self._changed.set()  # for a reader that waits
            self._cancel()

    def feed(self, event: Piece | ServeError) -> None:
        """The engine's end of it."""
        if isinstance(event, Piece):
            self.n_generated += len(event.tokens)
        self._events.append(event)
        self._changed.set()

    async def take(self, most: int) -> list[Piece]:
        """The next piece, and of those after it what is there already, up to `most` in all; none after the end."""
        while not (self._events or self._cancelled or self._ended):
            self._changed.clear()
            await self._changed.wait()
        pieces: list[Piece] = []
        if self._cancelled:  # what was drawn and not read is nobody's
            self._ended = True
        while self._events and len(pieces) < most and not self._ended:
            event = self._events[0]
            if isinstance(event, ServeError):
                if pieces:
                    break
                self._ended = True
                raise event
            self._events.popleft()
            pieces.append(self._see(event))
        return pieces

    def _see(self, piece: Piece) -> Piece:
        if piece.finish_reason is not None:
            self._open -= 1
            self._ended = self._open == 0
        return piece

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        pieces = await self.take(1)
        if not pieces:
            raise StopAsyncIteration
        return pieces[0]

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.cancel()

    async def collect(self) -> list[Output]:
        """All outputs, whole; a request that fails raises ServeError."""
        outputs = [Output() for _ in range(self.request.n)]
        async for piece in self:
            outputs[piece.index].add(piece)
        return outputs


@dataclass
class Output:
    """One whole output."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    offsets: list[int] = field(default_factory=list)  # of the tokens with log-probabilities, in characters

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.offsets += [piece.offset] * len(piece.logprobs)
        self.finish_reason = piece.finish_reason or self.finish_reason


def check_request(request: GenerationRequest, model: Model, max_outputs: int) -> None:
    """Raise ServeError(400) for what the model cannot run."""
    limit, vocab_size = model.max_seq_len, model.config.vocab_size
    try:
        tokens = as_tokens(request.tokens, "prompt")
    except (TypeError, ValueError, OverflowError) as error:
        raise bad_request(str(error), "prompt") from None
    n = len(tokens)
    if n == 0:
        raise bad_request("The prompt is empty; give at least one token.", "prompt")
    _check_whole("max_tokens", request.max_tokens, 0)
    if n + request.max_tokens > limit:
        raise context_exceeded(n, request.max_tokens, limit)
    if check_vocab(tokens, vocab_size) >= 0:
        raise bad_request(f"The prompt has a token id outside 0 to {vocab_size - 1}.", "prompt")
    _check_whole("n", request.n, 1, max_outputs)
    if request.loops is not None:
        _check_whole("loops", request.loops, 1, model.config.max_loops or 1)
    if request.logprobs is not None:
        _check_whole("logprobs", request.logprobs, 0)
    _check_whole("keep_first", request.keep_first, 0)
    if isinstance(request.stop, str) or not all(isinstance(text, str) and text for text in request.stop):
        raise bad_request(f"stop is {request.stop!r}, expected a sequence of texts that are not empty.", "stop")
    if request.deadline is not None and not 0 <= request.deadline <= inf:
        raise bad_request(f"deadline is {request.deadline}, expected 0 or more seconds.", "deadline")


def _check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    try:
        number = index(value)
    except TypeError:
        raise bad_request(f"{name} is {value!r}, expected a whole number.", name) from None
    if number < least or (most is not None and number > most):
        raise bad_request(f"{name} is {number}, expected {least} {'or more' if most is None else f'to {most}'}.", name)
