"""Request bodies: JSON as the standard has it, UTF-8, no NaN, not too deep, and errors in the API's shape."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .access import service_of, tenant_of
from .beside import beside
from .errors import ServeError, bad_request

MAX_DEPTH = 64
MAX_KEYS = 1024  # of one object: an error is made for each key that is not known
MAX_CONTAINERS = 1 << 16  # lists and objects: a million empty ones would hold the interpreter for seconds
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)  # one without end goes to the end, so that no byte is looked at twice


class StrictRequest(Request):
    """A request whose `json()` is strict."""

    _parsed: tuple[Any] | None = None

    async def json(self) -> Any:
        """The parsed body; ServeError(400) for what is no JSON."""
        if self._parsed is None:
            body = await self.body()
            self._parsed = (await beside(len(body) // 32, lambda: parse(body)),)
        return self._parsed[0]


class StrictRoute(APIRoute):
    """A route that takes JSON alone, parsed strictly.

    Attributes
    ----------
    direct : callable or None
        What answers a request, where the route takes a body: who asks, the body by its schema, and then the endpoint, which is given what it
        names. It does what FastAPI's dependencies and validation would, at a fraction of their price; they describe the route.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.direct: Callable[[StrictRequest], Coroutine[Any, Any, Response]] | None = None
        parameters = inspect.signature(endpoint, eval_str=True).parameters
        if "body" in parameters:
            self.direct = _direct(endpoint, parameters["body"].annotation, tuple(parameters))
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's hook."""
        direct = self.direct
        if direct is None:
            return super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await direct(StrictRequest(request.scope, request.receive))

        return handle


def _direct(endpoint: Callable[..., Any], schema: Any, names: tuple[str, ...]) -> Callable[[StrictRequest], Coroutine[Any, Any, Response]]:
    async def answer(request: StrictRequest) -> Response:
        found = {"request": request, "service": await service_of(request), "tenant": await tenant_of(request)}
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another origin cannot send this without being asked for leave
            raise ServeError(415, f"The body must be JSON: send content-type application/json, not {kind[:80]!r}.")
        if (coding := request.headers.get("content-encoding", "").lower()) not in ("", "identity"):
            raise ServeError(415, f"The body must come as it is, without content-encoding {coding[:40]!r}.")
        found["body"] = schema.model_validate(await request.json())
        answer = await endpoint(**{name: found[name] for name in names})
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    return answer


def parse(body: bytes) -> Any:
    """JSON of a body; ServeError(400) says what is wrong."""
    if not body:
        raise bad_request("The body is empty, expected a JSON object.")
    n_opened = body.count(b"[") + body.count(b"{")
    if n_opened > MAX_CONTAINERS:
        plain = STRING.sub(b"", body)
        if plain.count(b"[") + plain.count(b"{") > MAX_CONTAINERS:
            raise bad_request(f"The JSON has more than {MAX_CONTAINERS} lists and objects.")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"The body is not UTF-8: byte {error.start} cannot be read.") from None
    try:
        value = json.loads(text, parse_constant=_no_constant)
        is_small = n_opened <= MAX_DEPTH and body.count(b":") <= MAX_KEYS  # no deeper, and with no more keys, than that
        if not is_small and _depth_exceeds(value, MAX_DEPTH):
            raise bad_request(f"The JSON is nested more than {MAX_DEPTH} deep.")
        if "\\u" in text:  # an escape may name half a surrogate pair, which is no text
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise bad_request(f"The JSON is nested more than {MAX_DEPTH} deep.") from None
    except UnicodeEncodeError:
        raise bad_request("The JSON has an escape for half a surrogate pair, which is no text.") from None
    except ValueError as error:
        raise bad_request(f"The body is not valid JSON: {str(error)[:200]}") from None
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limit):
        if any(len(inner) > MAX_KEYS for inner in level if isinstance(inner, dict)):
            raise bad_request(f"The JSON has an object with more than {MAX_KEYS} keys.")
        inside = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level = [inner for inner in inside if isinstance(inner, (dict, list))]
        if not level:
            return False
    return True
