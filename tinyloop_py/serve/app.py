"""The FastAPI application around a service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from . import routes_openai, routes_prefixes, routes_status, routes_tokens
from .errors import ServeError, internal_error
from .front import validation_error
from .limits import error_response
from .service import Service
from .settings import Settings
from .strict_body import StrictRoute

ROUTERS = tuple(routes.router for routes in (routes_openai, routes_prefixes, routes_tokens, routes_status))


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
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(ServeError, _serve_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    return app


def direct_routes() -> dict[tuple[str, str], StrictRoute]:
    """(method, path) -> the routes that the application's front may call by itself."""
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, StrictRoute) and route.direct is not None]
    return {(method, route.path): route for route in routes for method in route.methods or ()}


async def _serve_error(request: Request, error: Any) -> JSONResponse:
    return error_response(error)


async def _validation_error(request: Request, error: Any) -> JSONResponse:
    return error_response(validation_error(error.errors()))


async def _http_error(request: Request, error: Any) -> JSONResponse:
    path = request.scope["path"][:200]  # request.url is made of the Host header too, which may be anything
    texts = {404: f"There is no {request.method} {path}.", 405: f"{path} does not take {request.method}."}
    response = error_response(ServeError(error.status_code, texts.get(error.status_code, str(error.detail))))
    response.headers.update(error.headers or {})
    return response


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    return error_response(internal_error())
