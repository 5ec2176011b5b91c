"""Out of memory at a chosen moment."""

from __future__ import annotations

from types import TracebackType

import tinyloop_py as tl


class PageFault:
    """Fails the n-th piece of KV memory that a model takes from now on; counts them.

    Attributes
    ----------
    taken
        Pages, and runs of hidden rows.
    pages
        Pages alone.
    """

    def __init__(self, model: tl.Model, nth: int = 0) -> None:
        self.store, self.nth, self.taken, self.pages = model._engine.plan.store, nth, 0, 0

    def __enter__(self) -> PageFault:
        self.store.fault = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.store.fault = None

    def __call__(self, part: int) -> None:
        self.taken += 1
        self.pages += part >= 0
        if self.taken == self.nth:
            raise tl.OutOfMemoryError("out of memory: injected")
