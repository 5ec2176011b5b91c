"""Limits of requests as ASGI middleware: how large a body may be, how long it may take, and which hosts are meant."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any
from urllib.parse import unquote

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ServeError
from .loopback import is_loopback

MAX_HEAD_BYTES = 32 << 10
LINGER_SECONDS = 0.5


def error_response(error: ServeError) -> JSONResponse:
    """A ServeError as it is sent."""
    return JSONResponse(error.body(), error.status, error.headers())


class AbsoluteTarget:
    """Takes a request for a whole URL (`GET http://host/path`), as those that go to a proxy are: its host counts, not the Host header's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app on the path alone."""
        if scope["type"] == "http":
            scheme, found, rest = scope["raw_path"].partition(b"://")
            if found and scheme.lower() in (b"http", b"https"):
                host, slash, path = rest.partition(b"/")
                raw = slash + path or b"/"
                headers = [(b"host", host), *(field for field in scope["headers"] if field[0] != b"host")]
                scope = {**scope, "raw_path": raw, "path": unquote(raw.decode("ascii")), "headers": headers}
        await self._app(scope, receive, send)


class CloseUnread:
    """Ends a connection after an answer that was given before the request's body was read: its rest has no timer, so it could come for ever."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app and watch what it reads."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        unread = b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0") != b""

        async def read() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def drop() -> None:
            while unread:
                if (await read())["type"] != "http.request":
                    return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and unread:
                if b"expect" not in headers:  # closed while the body still comes, the answer might be lost on its way
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(drop(), LINGER_SECONDS)
                given = [header for header in message.get("headers", ()) if header[0] != b"connection"]
                message["headers"] = [*given, (b"connection", b"close")]
            await send(message)

        await self._app(scope, read, answer)


class BodyLimit:
    """Limits heads to 32 KiB. Reads the body before the app runs: no more than `max_bytes` of it, and within `seconds`."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with 431, 413 or 408, or let the app run on what was read."""
        if scope["type"] == "http" and _head_nbytes(scope) > MAX_HEAD_BYTES:
            text = f"The request's head is larger than {MAX_HEAD_BYTES} bytes."
            await self._refuse(ServeError(431, text, code="head_too_large"), scope, receive, send)
            return
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            messages = await asyncio.wait_for(self._read(scope, receive), self._seconds)
        except asyncio.TimeoutError:
            await self._refuse(ServeError(408, f"The body did not arrive within {self._seconds:g} s.", code="body_timeout"), scope, receive, send)
            return
        except ServeError as error:
            await self._refuse(error, scope, receive, send)
            return
        if messages[-1]["type"] != "http.request":  # the client has left in the middle
            return

        async def replay() -> Message:
            return messages.popleft() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> deque[Message]:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._max_bytes:
            raise self._too_large()
        n_bytes = 0
        messages: deque[Message] = deque()
        while True:
            message = await receive()
            messages.append(message)
            n_bytes += len(message.get("body", b""))
            if n_bytes > self._max_bytes:
                raise self._too_large()
            if message["type"] != "http.request" or not message.get("more_body", False):
                return messages

    def _too_large(self) -> ServeError:
        return ServeError(413, f"The body is larger than {self._max_bytes} bytes.", code="body_too_large")

    @staticmethod
    async def _refuse(error: ServeError, scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(error)
        response.headers["connection"] = "close"  # a client that sends too much, or too slowly, is done
        await response(scope, receive, send)


def _head_nbytes(scope: Scope) -> int:
    return len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(name) + len(value) for name, value in scope["headers"])


class OwnHost:
    """Refuses requests whose Host is not this machine's own name, so that a page of another origin cannot reach a server without keys."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with 403, or let the app run."""
        if scope["type"] == "http":
            headers: dict[bytes, Any] = dict(scope["headers"])
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host[: host.rfind(":")] if ":" in host and not host.endswith("]") else host
            if not is_loopback(name):
                text = f"This server has no API keys and answers to localhost alone, not to {name[:80]!r}; start it with --keys, or with --no-auth."
                await error_response(ServeError(403, text, code="wrong_host"))(scope, receive, send)
                return
        await self._app(scope, receive, send)
