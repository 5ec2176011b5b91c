"""Connections that end before they are requests, or because their reader does not keep up: all counted, a few a minute written down."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger("tinyloop.serve.access")
MOST_LINES = 10  # in a period; anybody could fill a disk with more of them
PERIOD_SECONDS = 60.0


class Dropped:
    """Counts what is dropped, and writes it into the log: a line each for the first of a period, one with their numbers for the rest.

    Parameters
    ----------
    count
        Given the reason of each.
    """

    def __init__(self, count: Callable[[str], None] = lambda reason: None) -> None:
        self._count = count
        self._n_lines = 0  # in this period
        self._left_out: Counter[str] = Counter()
        self._is_timed = False

    def add(self, loop: asyncio.AbstractEventLoop, reason: str, client: str | None, status: int | None = None, detail: str = "") -> None:
        """One more, with the status that it was answered with, if it was."""
        self._count(reason)
        if not self._is_timed:
            self._is_timed = True
            loop.call_later(PERIOD_SECONDS, self._end_period)
        if self._n_lines >= MOST_LINES:
            self._left_out[reason] += 1
            return
        self._n_lines += 1
        logger.info("dropped", extra={"fields": {"reason": reason, "client": client, "status": status, "detail": detail}})

    def _end_period(self) -> None:
        self._is_timed, self._n_lines = False, 0
        self.flush()

    def flush(self) -> None:
        """Write down those that have no line of their own."""
        if self._left_out:
            logger.info("dropped", extra={"fields": {"further": dict(self._left_out)}})
            self._left_out.clear()
