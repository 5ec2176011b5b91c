"""Who asks: the tenant of a request; and the form of the log."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from .errors import ServeError
from .service import Service
from .tenants import Tenant

_json = json.JSONEncoder(ensure_ascii=True, default=str)
bearer = HTTPBearer(auto_error=False, description="An API key, where the server was started with a key file.")


# Coroutines, as FastAPI gives a plain function a thread of its own, which costs more than all the rest of a small request.


async def service_of(request: Request) -> Service:
    """The server's service."""
    service: Service = request.app.state.service
    return service


async def tenant_of(request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)] = None) -> Tenant:
    """The tenant, by the request's key."""
    service: Service = request.app.state.service
    tenant = service.tenants.find(request.headers.get("authorization"))
    note(request, tenant=tenant.name)
    return tenant


async def operator_of(tenant: Annotated[Tenant, Depends(tenant_of)]) -> Tenant:
    """The tenant, if it may see what concerns all of them."""
    if not tenant.operator:
        raise ServeError(403, "This tells of all tenants: it needs the key of a tenant with 'operator': true.", code="operator_only")
    return tenant


CurrentService = Annotated[Service, Depends(service_of)]
CurrentTenant = Annotated[Tenant, Depends(tenant_of)]
Operator = Annotated[Tenant, Depends(operator_of)]


def note(request: Request, **fields: Any) -> None:
    """Add fields to the request's line in the log."""
    request.scope.setdefault("tinyloop_log", {}).update(fields)


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        body = {"time": at, "level": record.levelname.lower(), "message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            body["error"] = self.formatException(record.exc_info)
        return _json.encode(body)


def write_logs_to_stderr(level: int = logging.INFO) -> None:
    """The process's log: tinyloop's and uvicorn's, as JSON lines on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("tinyloop", "uvicorn.error"):
        logging.getLogger(name).setLevel(level)
