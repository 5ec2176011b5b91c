"""Which requests wait and which are at work: places, deadlines, and ends that come early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from .errors import ServeError, deadline_exceeded
from .fair_queue import FairQueue
from .jobs import Job

MOST_SECONDS = 1e9  # that every event loop can count


class Admission:
    """The requests of an engine, as the event loop counts them.

    Parameters
    ----------
    max_running
        Most outputs at work.
    wake
        Told when there may be something to do.
    """

    def __init__(self, max_running: int, wake: Callable[[], None]) -> None:
        self.waiting: FairQueue[Job] = FairQueue()
        self.running: set[Job] = set()
        self._max_running = max_running
        self._wake = wake
        self._timers: dict[Job, asyncio.TimerHandle] = {}
        self._memory_short = False  # wait for an end before admitting more

    def put(self, job: Job, deadline: float | None) -> None:
        """Have it wait for its turn, and end it after so many seconds."""
        if deadline is not None:
            self._timers[job] = asyncio.get_running_loop().call_later(min(deadline, MOST_SECONDS), self._expire, job, deadline)
        self.waiting.put(job.request.tenant, job)
        self._wake()

    def admit(self, skip: Collection[str]) -> list[Job]:
        """Takes from the queue what fits beside those at work, leaving out some tenants."""
        admitted: list[Job] = []
        n_free = self._max_running - sum(job.request.n for job in self.running)
        while not self._memory_short and (found := self.waiting.next_up(skip)) is not None and found[1].request.n <= n_free:
            job = self.waiting.pop(skip)
            assert job is not None
            n_free -= job.request.n
            self.running.add(job)
            job.stream.began = True
            admitted.append(job)
        return admitted

    def defer(self, jobs: Collection[Job]) -> None:
        """There was no memory for them beside the others: back to their places until something ends."""
        for job in jobs:
            self.running.discard(job)
            job.stream.began = False
            self.waiting.put(job.request.tenant, job, first=True)
        if jobs:
            self._memory_short = True

    def memory_freed(self) -> None:
        """What was deferred may have room now."""
        self._memory_short = False

    def cancel(self, job: Job) -> None:
        """The next turn drops it; one that waits is gone at once."""
        job.cancelled = True
        if self.waiting.remove(job.request.tenant, job):
            self.forget(job)
        self._wake()

    def give_up(self, job: Job, error: ServeError) -> None:
        """It gets an error instead."""
        job.stream.feed(error)
        self.cancel(job)

    def forget(self, job: Job) -> None:
        """It is over."""
        self.running.discard(job)
        timer = self._timers.pop(job, None)
        if timer is not None:
            timer.cancel()

    def fail_all(self, error: ServeError) -> None:
        """Gives everybody an error; what runs is dropped by the next turn."""
        for job in [*self.running, *self.waiting]:
            if not job.cancelled:
                job.stream.feed(error)
            self.cancel(job)

    def _expire(self, job: Job, deadline: float) -> None:
        self.give_up(job, deadline_exceeded(deadline))
