"""What is refused by a request's head alone, and how an error is sent."""

from __future__ import annotations

from starlette.responses import JSONResponse

from .errors import ServeError
from .loopback import is_loopback
from .request_head import RequestHead


def error_response(error: ServeError) -> JSONResponse:
    """A ServeError as it is sent."""
    return JSONResponse(error.body(), error.status, error.headers())


def wrong_host(head: RequestHead) -> ServeError | None:
    """The refusal of a Host that is not this machine's own name, so that a page of another origin cannot reach a server without keys."""
    host = next((value for name, value in head.headers if name == b"host"), b"").decode("latin-1").lower()
    name = host[: host.rfind(":")] if ":" in host and not host.endswith("]") else host
    if is_loopback(name):
        return None
    text = f"This server has no API keys and answers to localhost alone, not to {name[:80]!r}; start it with --keys, or with --no-auth."
    return ServeError(403, text, code="wrong_host")
