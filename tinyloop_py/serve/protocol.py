"""HTTP/1.1 on one connection: requests one at a time, each read whole before it runs, with the limits and times of every part."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .dropped import Dropped
from .errors import ServeError, internal_error
from .exchange import Exchange
from .request_head import MAX_HEAD_BYTES, NO_BODY, ChunkedBody, RequestHead, bad_http
from .write_watch import WatchedTransport

logger = logging.getLogger("tinyloop.serve")
LINGER_SECONDS = 0.5
MAX_AHEAD = 64 << 10  # bytes of further requests that are read while one is answered
END_OF_HEAD = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True)
class Limits:
    """Of connections, and of what a request may be. Times are in seconds."""

    max_connections: int
    max_body_bytes: int
    header_seconds: float
    body_seconds: float
    write_seconds: float
    write_rate: int  # bytes a second that a reader takes who is behind
    idle_seconds: float
    admit: Callable[[RequestHead], ServeError | None] = lambda head: None  # what is refused by its head alone
    dropped: Dropped = field(default_factory=Dropped)


def protocol_factory(limits: Limits) -> Any:
    """What uvicorn takes for a protocol class; it makes one object of it for each connection."""
    return partial(Connection, limits)


class Connection(asyncio.Protocol):
    """One connection.

    What a client has sent lies in `_unread` until it makes a head, then a body; while an answer is under way further requests
    stay there. A request that is refused for its size, time or body still passes through the application, as "refused" in its scope,
    so that it is written down; what is no request is refused, and written down, here.
    """

    def __init__(self, limits: Limits, config: Any, server_state: Any, app_state: Any, _loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.limits = limits
        self.app = config.loaded_app
        self.server_state = server_state
        self.loop = _loop or asyncio.get_event_loop()
        self.transport: Any = None
        self.is_writing_paused = False
        self._writable = asyncio.Event()
        self._unread = bytearray()
        self._n_searched = 0  # of those, without an end of the head
        self._head: RequestHead | None = None
        self._chunks: ChunkedBody | None = None
        self._exchange: Exchange | None = None
        self._addresses: dict[str, Any] = {}
        self._timer: asyncio.TimerHandle | None = None  # of what is waited for: a head, a body, or a further request
        self._is_idle = False
        self._idle_at = 0.0  # since when
        self.is_last = False  # no further request is taken: what comes is dropped
        self._is_refused = False
        self._read_paused = False

    # ---- asyncio

    def connection_made(self, transport: Any) -> None:
        """Refuses what is too much."""
        limits = self.limits
        self.transport = WatchedTransport(transport, limits.write_seconds, limits.write_rate, self.loop, lambda: self._drop("slow_reader"))
        ends = {"server": transport.get_extra_info("sockname"), "client": transport.get_extra_info("peername")}
        self._addresses = {name: address[:2] if address else None for name, address in ends.items()}
        connections = self.server_state.connections
        if len(connections) >= limits.max_connections and not self._displaces():
            # What is refused is not counted: it would keep others out while it lingers
            text = f"{limits.max_connections} connections are open already; try again later."
            self.refuse(ServeError(503, text, code="too_many_connections", retry_after=1))
            return
        connections.add(self)
        self._await_head()

    def _displaces(self) -> bool:
        """Whether a connection that is open for further requests alone, the one longest so, has made room."""
        idle = [one for one in self.server_state.connections if one._is_idle and not (one._unread or one.transport.get_write_buffer_size())]
        if not idle:
            return False
        longest = min(idle, key=lambda one: one._idle_at)
        longest.shutdown()
        self.server_state.connections.discard(longest)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_timer()
        self.transport.stop()
        self.server_state.connections.discard(self)
        self.is_last = True
        if self._head is not None:  # in the middle of its body: written down as one that left
            self._run(b"", ServeError(499, "The client has left."), unread=True)
        if self._exchange is not None:
            self._exchange.leave()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        """A part of a request, or of several."""
        if self.is_last and self._head is None:
            return
        self._unread += data
        if self._exchange is None:
            self._advance()
        elif len(self._unread) > MAX_AHEAD and not self._read_paused:  # until then it is read: else nobody would notice that the client leaves
            self._read_paused = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        """The client takes less than is sent."""
        self.is_writing_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        """It has taken enough."""
        self.is_writing_paused = False
        self._writable.set()

    async def writable(self) -> None:
        """Until what is written would go out."""
        await self._writable.wait()

    def shutdown(self) -> None:
        """From the server: no further request after the one under way."""
        self.is_last = True
        if self._exchange is None and self._head is None:
            self.transport.close()

    # ---- reading

    def _advance(self) -> None:
        """Goes on with what has come, as far as it goes."""
        try:
            if self._head is None and not self._read_head():
                return
            self._read_body()
        except ServeError as error:
            if self._head is None:
                self.refuse(error)
            else:
                self._run(b"", error, unread=True)
        except Exception:
            logger.exception("a request cannot be read")
            self.refuse(internal_error())

    def _read_head(self) -> bool:
        """Whether there is one, and its body is to be read."""
        unread = self._unread
        if not self._n_searched and unread.startswith((b"\r", b"\n")):  # lines that may stand between two requests
            del unread[: len(unread) - len(unread.lstrip(b"\r\n"))]
        if not unread:
            return False
        if self._is_idle:
            self._await_head()
        if not 0x41 <= unread[0] <= 0x5A:
            raise bad_http()
        found = END_OF_HEAD.search(unread, max(0, self._n_searched - 3))
        if found is None:
            self._n_searched = len(unread)
            if len(unread) > MAX_HEAD_BYTES:
                raise self._head_too_large()
            return False
        self._n_searched = 0
        self._stop_timer()
        head = RequestHead(bytes(unread[: found.end()]))
        del unread[: found.end()]
        refusal = self._head_too_large() if head.nbytes > MAX_HEAD_BYTES else self.limits.admit(head)
        if refusal is None and head.n_body is not None and head.n_body > self.limits.max_body_bytes:
            refusal = self._body_too_large()
        self._head = head
        if refusal is not None or (head.n_body != 0 and head.method in NO_BODY):
            self._run(b"", refusal, unread=head.n_body != 0)
            return False
        if head.n_body is None:
            self._chunks = ChunkedBody()
        if head.n_body is None or len(unread) < head.n_body:
            self._timer = self.loop.call_later(self.limits.body_seconds, self._body_is_late)
            if head.expects_continue and not unread:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _read_body(self) -> None:
        head, unread, chunks = self._head, self._unread, self._chunks
        assert head is not None
        if chunks is None:
            assert head.n_body is not None
            if len(unread) >= head.n_body:
                body = bytes(unread[: head.n_body])
                del unread[: head.n_body]
                self._run(body)
            return
        del unread[: chunks.feed(bytes(unread))]  # what stands behind its end is the next request's
        if len(chunks.data) > self.limits.max_body_bytes:
            self._run(b"", self._body_too_large(), unread=True)
        elif chunks.whole:
            self._run(bytes(chunks.data))

    def _run(self, body: bytes, refused: ServeError | None = None, *, unread: bool = False) -> None:
        """Starts the application; with `unread` something of what was sent is dropped, and the connection ends with the answer."""
        self._stop_timer()
        head = self._head
        assert head is not None
        self._head = self._chunks = None
        self.is_last = self.is_last or unread
        if unread:
            self._unread.clear()
        scope = head.scope(refused=refused, **self._addresses)
        self._exchange = Exchange(self, scope, body, keep_alive=head.keep_alive and not unread)
        task = self.loop.create_task(self._exchange.run(self.app))
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)

    # ---- the end of an answer, and of a connection

    def answered(self, *, keep_alive: bool) -> None:
        """An answer has been written: the next request, or the end."""
        self.server_state.total_requests += 1
        self._exchange = None
        if not keep_alive or self.is_last:
            self.is_last = True
            self._unread.clear()
            self._linger()
        else:
            self._resume_reading()
            self._is_idle, self._idle_at = True, time.monotonic()
            self._timer = self.loop.call_later(self.limits.idle_seconds, self.transport.close)
            if self._unread:
                self._advance()

    def refuse(self, error: ServeError, *, is_request: bool = False) -> None:
        """An answer to what is no request, or to one that has none of its own, in the API's shape, and the end."""
        self._stop_timer()
        self._head = self._chunks = None
        self.is_last = True
        self._unread.clear()
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        if not is_request:
            self._drop(error.code or "", error)
        body = json.dumps(error.body()).encode()
        fields = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **error.headers()}
        head = f"HTTP/1.1 {error.status} Refused\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.transport.write(head.encode() + b"\r\n" + body)
        self._linger()

    def _drop(self, reason: str, error: ServeError | None = None) -> None:
        client = self._addresses.get("client")
        answered = (None, "") if error is None else (error.status, error.message)
        self.limits.dropped.add(self.loop, reason, client[0] if client else None, *answered)

    def _linger(self) -> None:
        """Left to the client to close, for a while: closed with data unread, or on its way here, the answer might be lost on its own."""
        self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        self._resume_reading()
        with contextlib.suppress(OSError):  # asyncio's raises where the client has left and nobody has noticed yet
            self.transport.write_eof()

    def _resume_reading(self) -> None:
        if self._read_paused:
            self._read_paused = False
            self.transport.resume_reading()

    # ---- times

    def _await_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.limits.header_seconds, self._head_is_late)

    def _stop_timer(self) -> None:
        self._is_idle = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self.refuse(ServeError(408, f"No request arrived within {self.limits.header_seconds:g} s.", code="header_timeout"))

    def _body_is_late(self) -> None:
        error = ServeError(408, f"The body did not arrive within {self.limits.body_seconds:g} s.", code="body_timeout")
        self._run(b"", error, unread=True)

    def _body_too_large(self) -> ServeError:
        return ServeError(413, f"The body is larger than {self.limits.max_body_bytes} bytes.", code="body_too_large")

    @staticmethod
    def _head_too_large() -> ServeError:
        return ServeError(431, f"The request's head is larger than {MAX_HEAD_BYTES} bytes.", code="head_too_large")
