"""Engine: one model and one pool for many requests.

The event loop decides who is next; a worker thread runs the model, one short turn at a time, behind an asyncio.Lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .admission import Admission
from .auto_prefix import AutoPrefixes
from .errors import ServeError, bad_request, engine_down, shutting_down
from .fair_queue import FairQueue
from .jobs import Job, PrefixTask, TurnResult
from .prefix_tasks import PrefixTasks
from .requests import GenerationRequest, Stream, check_request
from .runner import Runner
from .worker import Worker, WorkerDied

if TYPE_CHECKING:
    from ..model import Model
    from ..pool import PrefixPool

T = TypeVar("T")
logger = logging.getLogger("tinyloop.serve")
WATCH_SECONDS = 1.0  # so often is looked at least
STUCK = "the worker that runs the model is stuck"


class Engine:
    """Runs requests of many tenants on one model.

    Parameters
    ----------
    model, pool
        Open for as long as the engine is; they stay the caller's.
    max_running
        Most outputs that share a step.
    max_queued
        Most requests that wait; one more is refused with status 429, or takes the place of the last one of a tenant of whom more wait.
    prefill_rows
        Most rows of a prompt between two turns of the others; None takes 128 on the CPU and 512 on a GPU, which takes hardly longer for them.
    auto_prefix
        Budget in tokens of the prefixes kept by themselves; 0 keeps none.
    window
        Sliding window of attention for all requests, 0 for none.
    deadline
        Seconds that a request may take, waiting included; None for no limit.
    stall_seconds
        A turn that takes longer counts as a dead worker.

    Notes
    -----
    `async with Engine(...) as engine` starts and closes it. All methods belong to the event loop that it was started on.
    """

    def __init__(
        self, model: Model, pool: PrefixPool | None = None, *, max_running: int = 8, max_queued: int = 64, prefill_rows: int | None = None,
        auto_prefix: int = 0, window: int = 0, deadline: float | None = None, stall_seconds: float = 60.0,
    ) -> None:  # fmt: skip
        self.model = model
        self.pool = pool
        self.max_running = max_running
        self.max_queued = max_queued
        self.window = window
        self.deadline = deadline
        self.stall_seconds = stall_seconds
        self.lock = asyncio.Lock()
        self.auto = AutoPrefixes(model, pool, auto_prefix, window=window) if auto_prefix and pool is not None else None
        self.on_turn: Callable[[float, int], None] = lambda seconds, n_rows: None
        if prefill_rows is None:
            prefill_rows = 128 if model.device == "cpu" else 512
        self._runner = Runner(model, pool, self.auto, window=window, prefill_rows=prefill_rows)
        self._wake = asyncio.Event()
        self._requests = Admission(max_running, self._call)
        self._prefixes = PrefixTasks(max_running)
        self._draining = self._closing = False
        self._failure: str | None = None
        self._worker: Worker | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._told_stuck = False

    # ---- life

    async def start(self) -> Engine:
        """Begin to work."""
        if self._worker is None:
            self._worker = Worker()
            self._loop_task = asyncio.create_task(self._run(), name="tinyloop-engine")
            self._watch()
        return self

    async def close(self) -> None:
        """End everything: requests that are not done get an error, the worker's thread ends. Idempotent."""
        self._draining = self._closing = True
        if self._watching is not None:
            self._watching.cancel()
        self._fail_all(shutting_down())
        self._call()
        if self._failure == STUCK:  # closed before: nobody waits for its thread
            return
        if self._loop_task is not None:
            await asyncio.wait((self._loop_task,), timeout=self.stall_seconds)
            if not self._loop_task.done():  # a turn that never ends: its thread is left behind
                self._failure = STUCK
                self._loop_task.cancel()
                if self._worker is not None:
                    self._worker.stop()  # should the turn end after all
                return
        if self._worker is not None:
            with contextlib.suppress(WorkerDied):
                await self._worker.call(self._runner.abort)
            self._worker.stop()
        self._prefixes.fail_all(shutting_down())  # no worker has them, and they hold KV no more

    async def drain(self, grace: float) -> None:
        """Refuse new requests, and let the others go on for `grace` seconds at most; then they get an error."""
        self._draining = True
        end = time.monotonic() + grace
        while (self.n_running or self.n_waiting or len(self._prefixes)) and self.alive and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self._fail_all(shutting_down())

    async def __aenter__(self) -> Engine:
        return await self.start()

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    @property
    def alive(self) -> bool:
        """Whether requests will be answered: the worker lives and is not stuck."""
        return self.problem is None

    @property
    def problem(self) -> str | None:
        """Why requests cannot be answered, or None."""
        if self._failure is not None:
            return self._failure
        if self._worker is None or self._closing:
            return "the engine is not running"
        if not self._worker.alive or self._loop_task is None or self._loop_task.done():
            return "the worker that runs the model has died"
        if self._worker.busy_seconds() > self.stall_seconds:
            return STUCK
        return None

    @property
    def failed(self) -> bool:
        """Whether the worker died or never came back."""
        return self._failure is not None

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the end is near."""
        return self._draining

    @property
    def n_running(self) -> int:
        """Requests at work."""
        return len(self._requests.running)

    @property
    def n_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._requests.waiting)

    # ---- requests

    def submit(self, request: GenerationRequest) -> Stream:
        """Take a request in.

        Raises
        ------
        ServeError
            It is not valid (400), the queue is full (429), or nothing can run (503).
        """
        self._check_accepting()
        check_request(request, self.model, self.max_running)
        self._make_room(self._requests.waiting, request.tenant, self._requests.give_up)
        holder: list[Job] = []
        stream = Stream(request, lambda: self._requests.cancel(holder[0]))
        job = Job(request, stream)
        holder.append(job)
        self._requests.put(job, self.deadline if request.deadline is None else request.deadline)
        return stream

    # ---- prefixes

    async def register(
        self, tenant: str, namespace: str | None, tokens: Sequence[int], loops: int | None = None, *, pin: bool = False,
        on_begin: Callable[[], None] = lambda: None,
    ) -> int:  # fmt: skip
        """Put a prefix into the pool, some rows at a time; the number of its tokens that were there already.

        Raises ServeError: 400 for what cannot be run, 409 where the pool has no room; 429, 503 and 504 as for requests. `on_begin` is called when
        its turn comes.
        """
        self._check_accepting()
        if self.pool is None:
            raise bad_request("This server has no prefix pool.")
        check_request(GenerationRequest(tokens, 0, loops), self.model, 1)
        self._make_room(self._prefixes.waiting, tenant, self._prefixes.give_up)
        task = PrefixTask(tenant, namespace, loops, tokens, pin, done=asyncio.get_running_loop().create_future(), on_begin=on_begin)
        self._prefixes.add(task)
        self._call()
        await self._prefixes.end_of(task, self.deadline)
        assert task.build is not None
        return task.build.n_matched

    async def discard(self, namespace: str | None, tokens: Sequence[int], loops: int, window: int = 0) -> bool:
        """Take a prefix out of the pool; whether it was there."""
        if self.pool is None:
            return False
        if (problem := self.problem) is not None:  # a turn that never ends holds the lock
            raise engine_down(problem)
        self._runner.called = True
        async with self.lock:
            found = self.pool.discard(self.model, tokens, loops, window, namespace=namespace)
            if self.auto is not None:
                self.auto.sweep()
            return found

    # ---- the loop

    async def _run(self) -> None:
        assert self._worker is not None
        while not self._closing:
            self._runner.called = False
            admitted = self._requests.admit(self._prefixes.keeping)
            if not (admitted or self.n_running or len(self._prefixes)):
                self._wake.clear()
                await self._wake.wait()
                continue
            tasks = self._prefixes.take()
            try:
                async with self.lock:
                    await self._worker.call(partial(self._runner.stretch, admitted, tasks, self._worker.got_further, self._report))
            except WorkerDied as error:
                self._die(str(error))
                return
            except Exception as error:  # a fault of ours: those at work are told, and the next request is served
                logger.exception("a turn failed")
                await self._reset(error)
                continue
            del admitted, tasks  # while nothing is to do, nothing is held

    def _report(self, result: TurnResult) -> None:
        """From the worker: what turns did, where the next one may run already."""
        assert self._worker is not None
        self._worker.tell(self._settle, result)

    def _call(self) -> None:
        """Have the loop look at the queue again, after the turn that runs."""
        self._runner.called = True
        self._wake.set()

    def _watch(self) -> None:
        """Looks whether a turn takes too long: then all that wait are told, and what it gives in the end is theirs no more."""
        assert self._worker is not None
        left = self.stall_seconds - self._worker.busy_seconds()
        if left <= 0 and not self._told_stuck:
            logger.critical("a turn takes more than %g s", self.stall_seconds)
            self._fail_all(engine_down(STUCK))
        self._told_stuck = left <= 0
        self._watching = asyncio.get_running_loop().call_later(min(WATCH_SECONDS, left if left > 0 else self.stall_seconds), self._watch)

    def _settle(self, result: TurnResult) -> None:
        for job, piece in result.pieces:
            job.stream.feed(piece)
        for job, error in result.failed:
            job.stream.feed(error)
        for job in result.ended:
            self._requests.forget(job)
        self._requests.defer(result.deferred)
        if result.ended or result.prefixes or not self._requests.running:  # what they held may do
            self._requests.memory_freed()
        for task in result.keeps:
            self._prefixes.add(task)
        for task in result.prefixes:
            self._prefixes.end(task)
        for seconds, n_rows in result.turns:
            self.on_turn(seconds, n_rows)

    # ---- ends

    def _fail_all(self, error: ServeError) -> None:
        """Tell everybody that waits; the next turn drops what runs."""
        self._requests.fail_all(error)
        self._prefixes.abandon(error)

    async def _reset(self, error: Exception) -> None:
        assert self._worker is not None
        failure = ServeError(500, "The engine failed; the server's log has the reason.", code="engine_error")
        for job in list(self._requests.running):
            job.stream.feed(failure)
            self._requests.forget(job)
        self._prefixes.fail_begun(failure)
        with contextlib.suppress(WorkerDied):
            await self._worker.call(self._runner.abort)

    def _die(self, reason: str) -> None:
        """The worker is gone: nobody may wait for it."""
        logger.critical("the worker has died: %s", reason)
        self._failure = f"the worker that runs the model has died; restart the server ({reason})"
        error = engine_down()
        self._requests.fail_all(error)
        for job in list(self._requests.running):
            self._requests.forget(job)
        self._prefixes.fail_all(error)

    def _check_accepting(self) -> None:
        problem = self.problem
        if problem is not None:
            raise engine_down(problem)
        if self._draining:
            raise shutting_down()

    def _make_room(self, waiting: FairQueue[T], tenant: str, give_up: Callable[[T, ServeError], None]) -> None:
        """Room for one more; where there is none, a tenant of whom more wait gives up its last one, so that nobody fills the queue alone."""
        if len(waiting) < self.max_queued:
            return
        seconds = min(60.0, 1.0 + len(waiting) / self.max_running)  # a guess, from how many wait for each that runs
        error = ServeError(429, f"{self.max_queued} requests are waiting already; try again later.", code="queue_full", retry_after=seconds)
        most, item = waiting.last_of_most()
        if waiting.count(most) <= waiting.count(tenant) + 1:
            raise error
        give_up(item, error)
