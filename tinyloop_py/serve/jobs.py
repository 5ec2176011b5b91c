"""What passes between the event loop and the worker: requests at work, prefixes to build, and what a turn did to them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import OutOfMemoryError, PoolFullError
from .errors import ServeError, engine_down
from .requests import GenerationRequest, Piece, Stream

if TYPE_CHECKING:
    from ..kv_prefix import KvPrefix
    from ..pool import PrefixPool
    from .output import RunningOutput
    from .steps import PrefixBuild

logger = logging.getLogger("tinyloop.serve")


@dataclass(eq=False)
class Job:
    """A request at work. During a turn it belongs to the worker; the event loop may only set `cancelled`."""

    request: GenerationRequest
    stream: Stream
    cancelled: bool = False
    n_matched: int = 0
    builds: deque[PrefixBuild] = field(default_factory=deque)  # to run before its outputs open
    prompt_pool: PrefixPool | None = None  # holds the prompt that several outputs share
    outputs: list[RunningOutput] = field(default_factory=list)

    def close(self) -> None:
        """Frees what it holds."""
        for output in self.outputs:
            output.close()
        self.outputs.clear()  # its stream may be held for long
        self.builds.clear()
        self.prompt_pool = None


@dataclass(eq=False)
class PrefixTask:
    """A prefix to put into the pool: registered by somebody, or kept by itself."""

    tenant: str
    namespace: str | None
    loops: int | None
    tokens: Sequence[int]
    pin: bool = False
    automatic: bool = False
    base: KvPrefix | None = None
    build: PrefixBuild | None = None
    error: ServeError | None = None
    cancelled: bool = False
    done: asyncio.Future[None] | None = None  # is told of its end
    on_begin: Callable[[], None] = lambda: None


@dataclass(slots=True)
class TurnResult:
    """What a turn did, or several that followed each other; the event loop hands it on."""

    drawn: list[tuple[Job, RunningOutput]] = field(default_factory=list)  # outputs with pieces to hand on
    pieces: list[tuple[Job, Piece]] = field(default_factory=list)  # those, once they are handed on
    failed: list[tuple[Job, ServeError]] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)  # of any kind: their slots are free
    deferred: list[Job] = field(default_factory=list)  # no memory while others run: back into the queue
    prefixes: list[PrefixTask] = field(default_factory=list)  # in the pool, or failed
    keeps: list[PrefixTask] = field(default_factory=list)  # automatic ones to begin
    turns: list[tuple[float, int]] = field(default_factory=list)  # of each: seconds, and outputs that took a step
    seconds: float = 0.0  # of all of them
    draws_on: bool = True  # all that they did was to draw for outputs that had drawn before

    @property
    def is_plain(self) -> bool:
        """Whether it has nothing that the event loop decides on: pieces at most."""
        return not (self.failed or self.ended or self.deferred or self.prefixes or self.keeps)


def as_serve_error(error: BaseException) -> ServeError:
    """The answer to a failure inside."""
    if isinstance(error, ServeError):
        return error
    if isinstance(error, OutOfMemoryError):
        return ServeError(503, str(error), code="out_of_memory")
    if isinstance(error, PoolFullError):
        return ServeError(409, str(error), code="pool_full")
    if isinstance(error, (ValueError, TypeError)):
        return ServeError(400, str(error))
    if isinstance(error, RuntimeError) and "is closed" in str(error):
        return engine_down("the model is closed")
    logger.error("a step failed", exc_info=error)
    return ServeError(500, "The model failed while it ran this request; the server's log has the reason.", code="engine_error")
