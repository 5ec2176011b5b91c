"""uvicorn's HTTP/1.1 protocol with the limits that it lacks: connections, and the time that a request head and a reader may take."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ServeError
from .write_watch import WatchedTransport

LINGER_SECONDS = 0.5
MAX_AHEAD = 64 << 10  # bytes of further requests that are read while one is answered


def limited_protocol(max_connections: int, header_seconds: float, write_seconds: float) -> type[H11Protocol]:
    """A protocol class with these limits; uvicorn makes one object of it for each connection."""

    class LimitedProtocol(H11Protocol):
        """One connection."""

        head_timer: asyncio.TimerHandle | None = None
        refused = False

        def connection_made(self, transport: Any) -> None:
            """Refuses what is too much."""
            super().connection_made(WatchedTransport(transport, write_seconds, self.loop))  # type: ignore[arg-type]
            if len(self.connections) > max_connections:
                text = f"{max_connections} connections are open already; try again later."
                self._refuse(ServeError(503, text, code="too_many_connections", retry_after=1))
                return
            self._await_head()

        def connection_lost(self, exc: Exception | None) -> None:
            """Nothing is waited for any more."""
            self._stop_timer()
            self.transport.stop()  # type: ignore[attr-defined]
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            """A first byte of a further request starts its time; a whole head ends it."""
            if self.refused:
                return
            if self.head_timer is None and self.conn.their_state is h11.IDLE:
                self._await_head()
            super().data_received(data)
            if self.flow.read_paused and self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < MAX_AHEAD:
                self.flow.resume_reading()  # while nothing is read, nobody notices that the client leaves
            if self.conn.their_state is not h11.IDLE:
                self._stop_timer()

        def send_400_response(self, msg: str) -> None:
            """What is no HTTP, in the API's shape."""
            self._refuse(ServeError(400, msg, code="bad_http"))

        def _await_head(self) -> None:
            self.head_timer = self.loop.call_later(header_seconds, self._head_is_late)

        def _stop_timer(self) -> None:
            if self.head_timer is not None:
                self.head_timer.cancel()
                self.head_timer = None

        def _head_is_late(self) -> None:
            self._refuse(ServeError(408, f"No request arrived within {header_seconds:g} s.", code="header_timeout"))

        def _refuse(self, error: ServeError) -> None:
            self._stop_timer()
            if self.refused or self.transport.is_closing():
                return
            self.refused = True
            body = json.dumps(error.body()).encode()
            fields = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **error.headers()}
            head = f"HTTP/1.1 {error.status} Refused\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            self.transport.write(head.encode() + b"\r\n" + body)
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)  # closed with data unread, the answer might be lost on its way

    return LimitedProtocol
