"""Serving one model to many tenants: `Engine` without HTTP, `create_app` with it.

`Engine` needs nothing beyond tinyloop itself; the HTTP server needs the extra: pip install '.[serve]' in a clone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .engine import Engine
from .errors import ServeError
from .requests import GenerationRequest, Piece, Stream

if TYPE_CHECKING:
    from .app import create_app

__all__ = ["Engine", "GenerationRequest", "Piece", "ServeError", "Stream", "create_app"]


def __getattr__(name: str) -> Any:
    if name == "create_app":  # late: it imports fastapi
        from .app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
