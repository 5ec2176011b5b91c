"""Prefixes on their way into the pool, as the event loop counts them."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import ServeError
from .jobs import PrefixTask


class PrefixTasks:
    """Those that wait to be handed to the worker, and how many are not done.

    Attributes
    ----------
    keeping : dict
        Tenant -> its automatic prefixes that are under way. Its next request waits for them, so that a conversation's next turn hits.
    """

    def __init__(self) -> None:
        self._new: list[PrefixTask] = []
        self._open: set[PrefixTask] = set()
        self.keeping: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, task: PrefixTask) -> None:
        """Have the next turn begin it."""
        self._new.append(task)
        self._open.add(task)
        if task.automatic:
            self.keeping[task.tenant] = self.keeping.get(task.tenant, 0) + 1

    def take(self) -> list[PrefixTask]:
        """Those that no turn has seen yet."""
        new, self._new = self._new, []
        return new

    def end(self, task: PrefixTask) -> None:
        """It is in the pool, or has failed: whoever waits is told."""
        self._open.discard(task)
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

    def fail(self, tasks: Iterable[PrefixTask], error: ServeError) -> None:
        """End some with an error."""
        for task in {id(task): task for task in tasks}.values():
            task.error = error
            self.end(task)

    def abandon(self, error: ServeError) -> None:
        """Tell those who wait that it will not be; the worker drops the tasks when it comes back."""
        for task in self._open:
            if task.done is not None and not task.done.done():
                task.done.set_exception(error)
                task.cancelled = True
