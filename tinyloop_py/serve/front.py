"""What every request passes: an id, a line of the log and a count, the way to its route, and errors in the API's shape."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ServeError, bad_request
from .limits import error_response
from .strict_body import StrictRequest, StrictRoute

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .service import Service

access = logging.getLogger("tinyloop.serve.access")


class Front:
    """The outermost layer of the application.

    Routes that take a body are called from here by their path: they need none of what FastAPI does for a request, only for the
    API's description. Everything else goes through it.
    """

    def __init__(self, app: FastAPI, service: Service, direct: Mapping[tuple[str, str], StrictRoute]) -> None:
        self._app: ASGIApp = app
        self._service = service
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a request answered and written down."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, request_id = time.perf_counter(), 0, uuid.uuid4().hex
        fields: dict[str, Any] = scope.setdefault("tinyloop_log", {})

        async def count(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            refused: ServeError | None = scope.get("refused")
            if refused is not None:
                response = error_response(refused)
                response.headers["connection"] = "close"  # a client that sends too much, or too slowly, is done
                await response(scope, receive, count)
            elif (route := self._direct.get((scope["method"], scope["path"]))) is not None:
                await self._answer(route, scope, receive, count)
            else:
                await self._app(scope, receive, count)
            await asyncio.sleep(0)  # the answer's last part goes out before it is written down
        except Exception:
            status = status or 500
            raise
        finally:
            path = getattr(scope.get("route"), "path", "other")  # never the path as it was sent: anybody could fill the metrics with names
            self._service.metrics.requests.labels(path, str(status or 499)).inc()
            seconds = time.perf_counter() - begin
            record = {
                "request_id": request_id, "method": scope["method"], "route": path, "status": status or 499, "ms": round(1e3 * seconds, 1), **fields,
            }  # fmt: skip
            access.info("request", extra={"fields": record})

    async def _answer(self, route: StrictRoute, scope: Scope, receive: Receive, send: Send) -> None:
        """What a route answers, or the error that it raises before it has begun to."""
        assert route.direct is not None
        scope["route"], scope["app"] = route, self._app
        try:
            response = await route.direct(StrictRequest(scope, receive))
            await response(scope, receive, send)
            return
        except ServeError as error:
            response = error_response(error)
        except ValidationError as error:
            response = error_response(validation_error(error.errors(include_url=False, include_context=False, include_input=False)))
        await response(scope, receive, send)


def validation_error(faults: Any) -> ServeError:
    """The first fault that pydantic found, in the API's words; of a field with several types, the one that got furthest."""
    fault = max(faults, key=lambda fault: (len(fault["loc"]), not fault["type"].endswith("_type")))
    names = [part for part in fault["loc"] if part != "body"]
    is_unknown = fault["type"] == "extra_forbidden"  # then the last one is the sender's own, and may look like anything
    path = ".".join(str(part) for n, part in enumerate(names, 1) if not is_type(part) or (is_unknown and n == len(names)))[:120]
    if is_unknown:
        return bad_request(f"Unrecognized request argument supplied: {path}", path)
    if fault["type"] == "missing":
        return bad_request(f"Missing required parameter: '{path or 'body'}'.", path or None, "missing_required_parameter")
    if fault["type"] == "model_type":
        return bad_request(f"Invalid value for '{path or 'body'}': expected an object.", path or None, "invalid_value")
    return bad_request(f"Invalid value for '{path or 'body'}': {fault['msg']}.", path or None, "invalid_value")


def is_type(part: Any) -> bool:
    """Whether a part of a fault's place names one of the types that a field may have, and no field."""
    return isinstance(part, str) and ("[" in part or part in ("str", "list", "constrained-str"))
