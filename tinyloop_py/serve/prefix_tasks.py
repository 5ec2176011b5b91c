"""Prefixes on their way into the pool, as the event loop counts them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from .errors import ServeError, deadline_exceeded
from .fair_queue import FairQueue
from .jobs import PrefixTask


class PrefixTasks:
    """Those that wait to be handed to the worker, and how many are not done.

    Parameters
    ----------
    max_building
        Most registrations under way: each holds the KV that it has so far. Automatic ones are as many as answers have ended.

    Attributes
    ----------
    keeping : dict
        Tenant -> its automatic prefixes that are under way. Its next request waits for them, so that a conversation's next turn hits.
    """

    def __init__(self, max_building: int) -> None:
        self._max_building = max_building
        self._automatic: list[PrefixTask] = []
        self._waiting: FairQueue[PrefixTask] = FairQueue()
        self._building: set[PrefixTask] = set()  # of the registrations
        self._open: set[PrefixTask] = set()
        self.keeping: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def n_waiting(self) -> int:
        """How many registrations have not begun."""
        return len(self._waiting)

    @property
    def waiting(self) -> FairQueue[PrefixTask]:
        """Registrations that have not begun."""
        return self._waiting

    def add(self, task: PrefixTask) -> None:
        """Have a turn begin it."""
        self._open.add(task)
        if task.automatic:
            self._automatic.append(task)
            self.keeping[task.tenant] = self.keeping.get(task.tenant, 0) + 1
        else:
            self._waiting.put(task.tenant, task)

    def take(self) -> list[PrefixTask]:
        """Those that the next turn is to begin."""
        begun, self._automatic = self._automatic, []
        while len(self._building) < self._max_building and (task := self._waiting.pop()) is not None:
            self._building.add(task)
            task.on_begin()
            begun.append(task)
        return begun

    async def end_of(self, task: PrefixTask, deadline: float | None) -> None:
        """Until it is in the pool; ServeError where it cannot be, or is not within so many seconds."""
        assert task.done is not None
        try:
            await asyncio.wait_for(task.done, deadline)
        except asyncio.TimeoutError:
            self.cancel(task)
            raise deadline_exceeded(deadline or 0) from None
        except asyncio.CancelledError:
            self.cancel(task)
            raise

    def cancel(self, task: PrefixTask) -> None:
        """Nobody waits for it any more: the next turn drops it, and one that has not begun never does."""
        task.cancelled = True
        if self._waiting.remove(task.tenant, task):
            self.end(task)

    def end(self, task: PrefixTask) -> None:
        """It is in the pool, or has failed: whoever waits is told."""
        if task not in self._open:
            return
        self._open.discard(task)
        self._building.discard(task)
        self._waiting.remove(task.tenant, task)
        if task.error is not None or task.cancelled:  # the error's traceback holds the task, which must not hold KV
            task.build = task.base = None
        if task.automatic:
            self.keeping[task.tenant] -= 1
            if not self.keeping[task.tenant]:
                del self.keeping[task.tenant]
        if task.done is not None and not task.done.done():
            if task.error is None:
                task.done.set_result(None)
            else:
                task.done.set_exception(task.error)

    def fail_begun(self, error: ServeError) -> None:
        """End with an error those that a worker was given, whatever became of them there."""
        waiting = {*self._automatic, *self._waiting}
        self._fail((task for task in self._open if task not in waiting), error)

    def fail_all(self, error: ServeError) -> None:
        """End all of them with an error; no worker has them any more."""
        self._automatic = []
        self._fail(self._open, error)

    def _fail(self, tasks: Iterable[PrefixTask], error: ServeError) -> None:
        for task in list(tasks):
            task.error = error
            self.end(task)

    def abandon(self, error: ServeError) -> None:
        """Tell those who wait that it will not be; the worker drops what it has begun at its next turn."""
        for task in list(self._open):
            if task.done is not None:
                self.give_up(task, error)

    def give_up(self, task: PrefixTask, error: ServeError) -> None:
        """Tell whoever waits for a registration that it will not be."""
        if task.done is not None and not task.done.done():
            task.done.set_exception(error)
        self.cancel(task)
