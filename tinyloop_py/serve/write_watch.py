"""A connection's writing end that gives up on a reader who takes nothing."""

from __future__ import annotations

import asyncio
from typing import Any


class WatchedTransport:
    """A transport that breaks the connection when what was written lies there and none of it is taken for `seconds`.

    However slow a reader is, as long as it reads it is served. One that does not would hold its connection, and what waits to
    be sent, for ever: even a transport that was closed stays until its buffer is empty.
    """

    def __init__(self, transport: Any, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._seconds = seconds
        self._loop = loop
        self._n_written = 0
        self._n_taken = 0  # of those, by the system, when it was last looked at
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write, and begin to watch where not all of it goes at once."""
        self._n_written += len(data)
        self._transport.write(data)
        if self._timer is None and self._transport.get_write_buffer_size():
            self._watch()

    def stop(self) -> None:
        """The connection is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        self._n_taken = self._n_written - self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        n_left = self._transport.get_write_buffer_size()
        if n_left and self._n_written - n_left == self._n_taken:
            self._transport.abort()
        elif n_left:
            self._watch()
