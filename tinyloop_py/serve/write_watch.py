"""A connection's writing end that gives up on a reader who takes nothing, or next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any

try:
    import fcntl
    import termios
except ModuleNotFoundError:  # not a POSIX system: what the system holds is not known
    fcntl = None  # type: ignore[assignment]

MOST_LOOKS = 10  # that find a reader behind, one after the other
MOST_UNSENT = 64 << 10  # bytes that the system takes beyond what is on its way; else megabytes of each connection lie there


class WatchedTransport:
    """A transport that breaks the connection where its reader does not keep up.

    A reader that takes all that there is, however little, is served. One that is behind has to take `rate` bytes a second, and
    in any case something: every `seconds` is looked whether it has caught up, or taken so much; and it has to have caught up once in ten
    times. Else it would hold its connection, and what waits to be sent, for as long as it likes: even a transport that was closed
    stays until its buffer is empty.

    Parameters
    ----------
    on_give_up
        Told when the connection is broken off.
    """

    def __init__(self, transport: Any, seconds: float, rate: int, loop: asyncio.AbstractEventLoop, on_give_up: Callable[[], None]) -> None:
        self._transport = transport
        self._seconds = seconds
        self._least = max(1, round(rate * seconds))  # bytes, from one look to the next
        self._loop = loop
        self._on_give_up = on_give_up
        self._n_written = 0
        self._n_taken = 0  # of those, by the reader, when it was last looked at
        self._caught_up = False  # it has taken all, some time since
        self._n_looks = 0  # since it had
        self._timer: asyncio.TimerHandle | None = None
        self._socket: Any = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with contextlib.suppress(OSError, AttributeError):  # none of TCP's
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MOST_UNSENT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write, and begin to watch where not all of it goes at once."""
        if self._timer is not None and not self._caught_up:
            self._caught_up = not self._transport.get_write_buffer_size()
        self._n_written += len(data)
        self._transport.write(data)
        if self._timer is None and self._transport.get_write_buffer_size():
            self._n_looks = 0
            self._watch()

    def stop(self) -> None:
        """The connection is over."""
        self._on_give_up = lambda: None  # what was to be told holds the connection, which holds this
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        self._n_taken, self._caught_up = self._count_taken(), False
        self._timer = self._loop.call_later(self._seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._transport.get_write_buffer_size():
            return
        self._n_looks = 0 if self._caught_up else self._n_looks + 1
        if self._caught_up or (self._count_taken() - self._n_taken >= self._least and self._n_looks < MOST_LOOKS):
            self._watch()
        else:
            self._on_give_up()
            self._transport.abort()

    def _count_taken(self) -> int:
        """Bytes that have arrived at the other end: the system may hold much more than it says room for, and ask for none for minutes."""
        n_waiting: int = self._transport.get_write_buffer_size()
        return self._n_written - n_waiting - self._n_under_way()

    def _n_under_way(self) -> int:
        if fcntl is None:
            return 0
        try:
            n: int = struct.unpack("i", fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
            return n
        except (OSError, ValueError, AttributeError):  # closed, or none of a system that tells
            return 0
