"""Answers that notice when their reader leaves: server-sent events, and whole ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ServeError

T = TypeVar("T")
PING = b": ping\n\n"  # a comment, which keeps proxies from closing a silent connection
DONE = b"data: [DONE]\n\n"
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class ClientGone(Exception):
    """The reader has closed the connection; nobody is left to answer."""


def encode(body: dict[str, Any]) -> bytes:
    """JSON as short as it can be."""
    return _json.encode(body).encode()


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


async def until_gone(receive: Callable[[], Awaitable[Any]]) -> None:
    """Returns when the client has left; the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves; then ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end(gone)
        await _end(task)


class EventStream(Response):
    """Sends events as they come, and closes their source when it ends, for whatever reason. The source ends by itself when the reader leaves.

    Parameters
    ----------
    events
        Encoded events; what ends in DONE is the last. A ServeError that it raises becomes the last event, since the status has been sent already.
    ping_seconds
        A comment is sent after so long a silence.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, ping_seconds: float = 15.0) -> None:
        self._events = events
        self._ping_seconds = ping_seconds
        self._sending = False
        self._sent_at = time.monotonic()
        self._ping: asyncio.Future[None] | None = None
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        self._watch(send)
        try:
            await self._pump(send)
        finally:
            self._timer.cancel()
            if self._ping is not None:
                await _end(self._ping)
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        await self._send(send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self._events:
                is_last = chunk.endswith(DONE)
                await self._send(send, {"type": "http.response.body", "body": chunk, "more_body": not is_last})
                if is_last:
                    return
            last = b""
        except ServeError as error:
            last = event(error.body())
        await self._send(send, {"type": "http.response.body", "body": last, "more_body": False})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        self._sending = True
        await send(message)
        self._sending, self._sent_at = False, time.monotonic()

    def _watch(self, send: Send) -> None:
        """Sends a comment after a silence."""
        self._timer = asyncio.get_running_loop().call_later(1, self._watch, send)
        if not self._sending and time.monotonic() - self._sent_at > self._ping_seconds:
            self._ping = asyncio.ensure_future(self._send(send, {"type": "http.response.body", "body": PING, "more_body": True}))


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it is over; what it raises has been seen, or concerns nobody any more."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
