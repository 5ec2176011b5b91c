"""One request and its answer, as ASGI has them: what the application is given, and what goes out on the connection."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message

from .errors import internal_error

if TYPE_CHECKING:
    from .protocol import Connection

logger = logging.getLogger("tinyloop.serve")
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class Exchange:
    """Runs the application on a request that has come whole, and writes what it answers.

    A head waits for the first part of its body where that follows at once, and goes with it in one write.

    Attributes
    ----------
    gone : asyncio.Future
        Done once the client has left; in the scope as "client_gone".
    """

    def __init__(self, connection: Connection, scope: dict[str, Any], body: bytes, *, keep_alive: bool) -> None:
        self._connection = connection
        self._body: bytes | None = body
        self._keep_alive = keep_alive
        self._head: bytes | None = None  # not yet written
        self._started = self._ended = self._chunked = False
        self.gone: asyncio.Future[None] = connection.loop.create_future()
        self._over: asyncio.Event | None = None
        self.scope = {**scope, "client_gone": self.gone}

    async def run(self, app: ASGIApp) -> None:
        """From the request to the end of its answer."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            logger.exception("a request failed")
        finally:
            if self._ended or self.gone.done():
                pass
            elif self._started and self._head is None:  # what has been sent is not the whole of it: the client has to notice
                self._connection.transport.abort()
            else:
                self._head = None
                self._connection.refuse(internal_error(), is_request=True)

    def leave(self) -> None:
        """The client is no longer there."""
        if not self.gone.done():
            self.gone.set_result(None)
        if self._over is not None:
            self._over.set()

    # ---- ASGI

    async def receive(self) -> Message:
        """The body, and then nothing until the client leaves or the answer has ended."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if not (self._ended or self.gone.done()):
            self._over = self._over or asyncio.Event()
            await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """A part of the answer."""
        if self._connection.is_writing_paused:
            await self._connection.writable()
        if self.gone.done():
            return
        kind = message["type"]
        if self._ended or kind != ("http.response.body" if self._started else "http.response.start"):
            raise RuntimeError(f"{kind} is not what an answer goes on with")
        if not self._started:
            self._started = True
            self._head = self._encode_head(message["status"], message.get("headers", ()))
            self._connection.loop.call_soon(self._write_head)
            return
        more = message.get("more_body", False)
        self._write(message.get("body", b""), more)
        if not more:
            self._ended = True
            if self._over is not None:
                self._over.set()
            self._connection.answered(keep_alive=self._keep_alive)

    # ---- writing

    def _encode_head(self, status: int, headers: Any) -> bytes:
        fields = [*self._connection.server_state.default_headers, *headers]
        names = {name for name, _ in fields}
        if (b"connection", b"close") in fields or self._connection.is_last:
            self._keep_alive = False
        has_body = self.scope["method"] != "HEAD" and status not in (204, 304)
        if b"content-length" not in names and has_body:
            if self.scope["http_version"] == "1.1":
                self._chunked = True
                fields.append((b"transfer-encoding", b"chunked"))
            else:
                self._keep_alive = False  # its end is the connection's
        if not self._keep_alive and b"connection" not in names:
            fields.append((b"connection", b"close"))
        lines = b"".join([name + b": " + value + b"\r\n" for name, value in fields])
        if lines.count(b"\n") != len(fields) or lines.count(b"\r") != len(fields):
            raise RuntimeError("a header of the answer holds a line's end")
        return (STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status) + lines + b"\r\n"

    def _write_head(self) -> None:
        """Nothing has followed: the head goes alone."""
        if self._head is not None and not self.gone.done():
            head, self._head = self._head, None
            self._connection.transport.write(head)

    def _write(self, body: bytes, more: bool) -> None:
        data, self._head = self._head or b"", None
        if self.scope["method"] == "HEAD":
            body = b""
        if not self._chunked:
            data += body
        else:
            if body:
                data += b"%x\r\n%b\r\n" % (len(body), body)
            if not more:
                data += b"0\r\n\r\n"
        if data:
            self._connection.transport.write(data)
