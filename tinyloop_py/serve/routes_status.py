"""/health, /metrics, and the page at /."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse

from .access import CurrentService, Operator
from .routes_openai import ERRORS

router = APIRouter(tags=["status"])


class Health(BaseModel):
    """Whether requests are answered."""

    status: str
    model: str
    detail: str


@router.head("/health", include_in_schema=False)
@router.get("/health", response_model=None, responses={200: {"model": Health}, 503: {"model": Health}})
async def health(service: CurrentService) -> JSONResponse:
    """200 where requests are answered; 503 while the model loads, when the worker is dead or stuck, and before the end."""
    status, detail = service.status
    return JSONResponse({"status": status, "model": service.name, "detail": detail}, 200 if status == "ok" else 503)


@router.get("/metrics", response_class=PlainTextResponse, responses=ERRORS)
async def metrics(service: CurrentService, operator: Operator) -> PlainTextResponse:
    """Prometheus metrics of the whole server; with keys, for operators."""
    return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def page_with_policy() -> tuple[str, str]:
    """The page, and the Content-Security-Policy that allows its own script and style and nothing else."""
    page = files("tinyloop_py.serve").joinpath("page.html").read_text("utf-8")

    def allowed(tag: str) -> str:
        blocks: list[Any] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'" for block in blocks)

    rest = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return page, f"default-src 'none'; script-src {allowed('script')}; style-src {allowed('style')}; {rest}"


PAGE, POLICY = page_with_policy()


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def page() -> HTMLResponse:
    """A chat and the prefixes, for a browser."""
    return HTMLResponse(PAGE, headers={"content-security-policy": POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"})
