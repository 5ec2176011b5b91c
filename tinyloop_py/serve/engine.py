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
from typing import TYPE_CHECKING, Any

from .auto_prefix import AutoPrefixes
from .errors import ServeError, bad_request, engine_down
from .fair_queue import FairQueue
from .jobs import Job, PrefixTask, TurnResult
from .prefix_tasks import PrefixTasks
from .requests import GenerationRequest, Stream, check_request
from .runner import Runner
from .worker import Worker, WorkerDied

if TYPE_CHECKING:
    from ..model import Model
    from ..pool import PrefixPool

logger = logging.getLogger("tinyloop.serve")
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
        Most requests that wait; one more is refused with status 429.
    prefill_rows
        Most rows of a prompt between two turns of the others.
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
        self, model: Model, pool: PrefixPool | None = None, *, max_running: int = 8, max_queued: int = 64, prefill_rows: int = 128,
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
        self._runner = Runner(model, pool, self.auto, window=window, prefill_rows=prefill_rows)
        self._queue: FairQueue[Job] = FairQueue()
        self._running: set[Job] = set()
        self._timers: dict[Job, asyncio.TimerHandle] = {}
        self._prefixes = PrefixTasks()
        self._memory_short = False  # wait for an end before admitting more
        self._wake = asyncio.Event()
        self._draining = self._closing = False
        self._failure: str | None = None
        self._worker: Worker | None = None
        self._loop_task: asyncio.Task[None] | None = None

    # ---- life

    async def start(self) -> Engine:
        """Begin to work."""
        if self._worker is None:
            self._worker = Worker()
            self._loop_task = asyncio.create_task(self._run(), name="tinyloop-engine")
        return self

    async def close(self) -> None:
        """End everything: requests that are not done get an error, the worker's thread ends. Idempotent."""
        self._draining = self._closing = True
        self._fail_all(ServeError(503, "the server is shutting down", code="shutting_down", retry_after=5))
        self._call()
        if self._loop_task is not None:
            await asyncio.wait((self._loop_task,), timeout=self.stall_seconds)
            if not self._loop_task.done():  # a turn that never ends: its thread is left behind
                self._failure = STUCK
                self._loop_task.cancel()
                return
        if self._worker is not None:
            with contextlib.suppress(WorkerDied):
                await self._worker.call(self._runner.abort)
            self._worker.stop()

    async def drain(self, grace: float) -> None:
        """Refuse new requests, and let the others go on for `grace` seconds at most; then they get an error."""
        self._draining = True
        end = time.monotonic() + grace
        while (self._running or len(self._queue) or len(self._prefixes)) and self.alive and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self._fail_all(ServeError(503, "the server is shutting down", code="shutting_down", retry_after=5))

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
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

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
        if len(self._queue) >= self.max_queued:
            text = f"{self.max_queued} requests are waiting already; try again later."
            raise ServeError(429, text, code="queue_full", retry_after=self._wait_estimate())
        holder: list[Job] = []
        stream = Stream(request, lambda: self._cancel(holder[0]))
        job = Job(request, stream)
        holder.append(job)
        self._queue.put(request.tenant, job)
        deadline = self.deadline if request.deadline is None else request.deadline
        if deadline is not None:
            self._timers[job] = asyncio.get_running_loop().call_later(deadline, self._expire, job, deadline)
        self._call()
        return stream

    # ---- prefixes

    async def register(self, tenant: str, namespace: str | None, tokens: Sequence[int], loops: int | None = None, *, pin: bool = False) -> int:
        """Put a prefix into the pool, some rows at a time; the number of its tokens that were there already.

        Raises ServeError: 400 for what cannot be run, 409 where the pool has no room.
        """
        self._check_accepting()
        if self.pool is None:
            raise bad_request("This server has no prefix pool.")
        check_request(GenerationRequest(tokens, 0, loops), self.model, 1)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = PrefixTask(tenant, namespace, loops, tokens, pin, done=done)
        self._prefixes.add(task)
        self._call()
        try:
            await done
        except asyncio.CancelledError:
            task.cancelled = True
            raise
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
            admitted = self._admit()
            if not (admitted or self._running or len(self._prefixes)):
                self._wake.clear()
                await self._wake.wait()
                continue
            tasks = self._prefixes.take()
            try:
                async with self.lock:
                    result = await self._watched(partial(self._runner.stretch, admitted, tasks, self._report))
            except WorkerDied as error:
                self._die(str(error), tasks)
                return
            except Exception as error:  # a fault of ours: those at work are told, and the next request is served
                logger.exception("a turn failed")
                await self._reset(error, tasks)
                continue
            self._settle(result)
            del result, admitted, tasks  # while nothing is to do, nothing is held

    def _report(self, result: TurnResult) -> None:
        """From the worker: a turn's result, where the next one runs already."""
        assert self._worker is not None
        self._worker.tell(self._settle, result)

    def _call(self) -> None:
        """Have the loop look at the queue again, after the turn that runs."""
        self._runner.called = True
        self._wake.set()

    async def _watched(self, turn: Callable[[], TurnResult]) -> TurnResult:
        """A turn's result; if it takes too long, all that wait are told, and what it gives in the end is theirs no more."""
        assert self._worker is not None
        call = asyncio.ensure_future(self._worker.call(turn))
        try:
            await asyncio.wait((call,), timeout=self.stall_seconds)
            if not call.done():
                logger.critical("a turn takes more than %g s", self.stall_seconds)
                error = engine_down(STUCK)
                self._fail_all(error)
                self._prefixes.abandon(error)
            result: TurnResult = await call
            return result
        finally:
            call.cancel()

    def _admit(self) -> list[Job]:
        """Takes from the queue what fits beside those at work."""
        admitted: list[Job] = []
        n_free = self.max_running - sum(job.request.n for job in self._running)
        while not self._memory_short and (found := self._queue.next_up(self._prefixes.keeping)) is not None and found[1].request.n <= n_free:
            job = self._queue.pop(self._prefixes.keeping)
            assert job is not None
            n_free -= job.request.n
            self._running.add(job)
            admitted.append(job)
        return admitted

    def _settle(self, result: TurnResult) -> None:
        for job, piece in result.pieces:
            job.stream.feed(piece)
        for job, error in result.failed:
            job.stream.feed(error)
        for job in result.ended:
            self._forget(job)
        for job in result.deferred:
            self._running.discard(job)
            self._queue.put(job.request.tenant, job, first=True)
        if result.deferred:
            self._memory_short = True
        if result.ended or result.prefixes or not self._running:  # what they held may do
            self._memory_short = False
        for task in result.keeps:
            self._prefixes.add(task)
        for task in result.prefixes:
            self._prefixes.end(task)
        self.on_turn(result.seconds, result.n_rows)

    # ---- ends

    def _cancel(self, job: Job) -> None:
        job.cancelled = True  # the next turn drops it
        if self._queue.remove(job.request.tenant, job):
            self._forget(job)
        self._call()

    def _expire(self, job: Job, deadline: float) -> None:
        job.stream.feed(ServeError(504, f"The request was not done within its deadline of {deadline:g} s.", code="deadline_exceeded"))
        self._cancel(job)

    def _forget(self, job: Job) -> None:
        self._running.discard(job)
        timer = self._timers.pop(job, None)
        if timer is not None:
            timer.cancel()

    def _fail_all(self, error: ServeError) -> None:
        """Gives everybody an error; what runs is dropped by the next turn."""
        for job in [*self._running, *self._queue]:
            if not job.cancelled:
                job.stream.feed(error)
            self._cancel(job)

    async def _reset(self, error: Exception, tasks: list[PrefixTask]) -> None:
        assert self._worker is not None
        failure = ServeError(500, "The engine failed; the server's log has the reason.", code="engine_error")
        for job in list(self._running):
            job.stream.feed(failure)
            self._forget(job)
        self._prefixes.fail([*tasks, *self._runner.tasks()], failure)
        with contextlib.suppress(WorkerDied):
            await self._worker.call(self._runner.abort)

    def _die(self, reason: str, tasks: list[PrefixTask]) -> None:
        """The worker is gone: nobody may wait for it."""
        logger.critical("the worker has died: %s", reason)
        self._failure = f"the worker that runs the model has died; restart the server ({reason})"
        error = engine_down()
        self._fail_all(error)
        for job in list(self._running):
            self._forget(job)
        self._prefixes.fail([*tasks, *self._runner.tasks(), *self._prefixes.take()], error)

    def _check_accepting(self) -> None:
        problem = self.problem
        if problem is not None:
            raise engine_down(problem)
        if self._draining:
            raise ServeError(503, "the server is shutting down", code="shutting_down", retry_after=5)

    def _wait_estimate(self) -> float:
        """Seconds until a place in the queue may be free: a guess, from how many wait for each that runs."""
        return min(60.0, 1.0 + len(self._queue) / self.max_running)
