"""What is refused by a request's head alone, and how an error is sent."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import JSONResponse

from .errors import ServeError
from .loopback import is_loopback
from .request_head import NO_BODY, RequestHead
from .settings import Settings
from .tenants import Tenants


def error_response(error: ServeError) -> JSONResponse:
    """A ServeError as it is sent."""
    return JSONResponse(error.body(), error.status, error.headers())


def admission(settings: Settings, tenants: Tenants) -> Callable[[RequestHead], ServeError | None]:
    """What a server refuses by a head: the refusal, or None."""

    def refusal(head: RequestHead) -> ServeError | None:
        error = wrong_host(head) if settings.check_host else None
        has_body = head.n_body != 0 and head.method not in NO_BODY
        return error or (unknown_key(head, tenants) if has_body and tenants.need_keys else None)

    return refusal


def unknown_key(head: RequestHead, tenants: Tenants) -> ServeError | None:
    """The refusal of a body whose sender nobody knows: without, anybody could fill the memory with bodies."""
    key = next((value.decode("latin-1") for name, value in head.headers if name == b"authorization"), None)
    try:
        tenants.find(key)
    except ServeError as error:
        return error
    return None


def wrong_host(head: RequestHead) -> ServeError | None:
    """The refusal of a Host that is not this machine's own name, so that a page of another origin cannot reach a server without keys."""
    host = next((value for name, value in head.headers if name == b"host"), b"").decode("latin-1").lower()
    name = host[: host.rfind(":")] if ":" in host and not host.endswith("]") else host
    if is_loopback(name):
        return None
    text = f"This server has no API keys and answers to localhost alone, not to {name[:80]!r}; start it with --keys, or with --no-auth."
    return ServeError(403, text, code="wrong_host")
