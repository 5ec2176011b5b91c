"""The FastAPI application around a service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from . import routes_openai, routes_prefixes, routes_status, routes_tokens
from .access import RequestLog
from .errors import ServeError, bad_request
from .limits import AbsoluteTarget, BodyLimit, CloseUnread, OwnHost, error_response
from .service import Service
from .settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """An application that loads its model when it starts; `app.state.service` is its service."""
    service = Service(settings)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        service.begin_loading()
        yield
        await service.close()

    from .. import __version__

    # Pages of documentation load scripts from elsewhere, and a redirect leads to whatever host the request names
    app = FastAPI(title="tinyloop", version=__version__, lifespan=life, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    for routes in (routes_openai, routes_prefixes, routes_tokens, routes_status):
        app.include_router(routes.router)
    app.add_exception_handler(ServeError, _serve_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, seconds=settings.body_seconds)
    if settings.check_host:
        app.add_middleware(OwnHost)
    app.add_middleware(RequestLog, service=service)
    app.add_middleware(CloseUnread)
    app.add_middleware(AbsoluteTarget)
    return app


async def _serve_error(request: Request, error: Any) -> JSONResponse:
    return error_response(error)


async def _validation_error(request: Request, error: Any) -> JSONResponse:
    """The first fault that pydantic found, in the API's words; of a field with several types, the one that got furthest."""
    fault = max(error.errors(), key=lambda fault: len(fault["loc"]))
    names = [part for part in fault["loc"] if part != "body"]
    path = ".".join(str(part) for part in names if not (isinstance(part, str) and ("[" in part or part in ("str", "list"))))[:120]
    if fault["type"] == "extra_forbidden":
        return error_response(bad_request(f"Unrecognized request argument supplied: {path}", path))
    if fault["type"] == "missing":
        return error_response(bad_request(f"Missing required parameter: '{path or 'body'}'.", path or None, "missing_required_parameter"))
    return error_response(bad_request(f"Invalid value for '{path or 'body'}': {fault['msg']}.", path or None, "invalid_value"))


async def _http_error(request: Request, error: Any) -> JSONResponse:
    texts = {404: f"There is no {request.method} {request.url.path[:200]}.", 405: f"{request.url.path[:200]} does not take {request.method}."}
    response = error_response(ServeError(error.status_code, texts.get(error.status_code, str(error.detail))))
    response.headers.update(error.headers or {})
    return response


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    return error_response(ServeError(500, "The server failed; its log has the reason.", code="internal_error"))
