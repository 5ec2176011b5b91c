"""How much may be used per minute."""

from __future__ import annotations

import time
from collections.abc import Callable


class Allowance:
    """An allowance that fills up evenly, to one minute's worth at most. What is used beyond it is a debt to wait for."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute)
        self._at = clock()

    def take(self, n: int) -> None:
        """Use `n`, whether they are there or not."""
        self._refill()
        self._left -= n

    def wait_seconds(self) -> float:
        """Seconds until one is left; 0 where one is."""
        self._refill()
        return 0.0 if self._left >= 1 else (1 - self._left) * 60 / self.per_minute

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(float(self.per_minute), self._left + (now - self._at) * self.per_minute / 60)
        self._at = now
