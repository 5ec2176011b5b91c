"""Answers that notice when their reader leaves: server-sent events, and whole ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ServeError

T = TypeVar("T")
PING = b": ping\n\n"  # a comment, which keeps proxies from closing a silent connection
DONE = b"data: [DONE]\n\n"
HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class ClientGone(Exception):
    """The reader has closed the connection; nobody is left to answer."""


def encode(body: Any) -> bytes:
    """JSON as short as it can be."""
    return _json.encode(body).encode()


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


def gone_of(request: Request) -> asyncio.Future[None]:
    """Done when the client has left."""
    gone: asyncio.Future[None] = request.scope["client_gone"]
    return gone


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves; then ClientGone."""
    task, gone = asyncio.ensure_future(work), gone_of(request)
    cancel = lambda _: task.cancel()  # noqa: E731
    gone.add_done_callback(cancel)
    try:
        return await task
    except asyncio.CancelledError:
        if gone.done():
            raise ClientGone from None
        raise
    finally:
        gone.remove_done_callback(cancel)
        await _end(task)


class EventStream(Response):
    """Sends events as they come, and closes their source when it ends, for whatever reason. The source ends by itself when the reader leaves.

    Parameters
    ----------
    events
        Encoded events; what ends in DONE is the last. A ServeError that it raises becomes the last event where the status has been sent
        already, and else is raised.
    patience
        Seconds that the status waits for the first event, so that a failure has one of its own.
    ping_seconds
        A comment is sent after so long a silence.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, patience: float = 10.0, ping_seconds: float = 15.0) -> None:
        self._events = events
        self._patience = patience
        self._ping_seconds = ping_seconds
        self._started = self._sending = False
        self._sent_at = time.monotonic()
        self._aside: asyncio.Future[None] | None = None  # what a silence has sent
        self.status_code, self.background = 200, None
        self.raw_headers = list(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        self._watch(send)
        try:
            await self._pump(send)
        finally:
            self._timer.cancel()
            if self._aside is not None:
                await _end(self._aside)
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        try:
            async for chunk in self._events:
                is_last = chunk.endswith(DONE)
                await self._send(send, chunk, more=not is_last)
                if is_last:
                    return
            last = b""
        except ServeError as error:
            if not self._started:
                raise
            last = event(error.body())
        if self._started:  # else the reader has left
            await self._send(send, last, more=False)

    async def _send(self, send: Send, body: bytes | None, *, more: bool = True) -> None:
        self._sending = True
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if body is not None:
            await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending, self._sent_at = False, time.monotonic()

    def _watch(self, send: Send) -> None:
        """Sends the status, and later a comment, after a silence."""
        self._timer = asyncio.get_running_loop().call_later(1, self._watch, send)
        silence = time.monotonic() - self._sent_at
        if not self._sending and silence > (self._ping_seconds if self._started else self._patience):
            self._aside = asyncio.ensure_future(self._send(send, PING if self._started else None))


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it is over; what it raises has been seen, or concerns nobody any more."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
