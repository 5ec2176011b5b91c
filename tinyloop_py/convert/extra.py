"""Packages that only the `convert` extra installs."""

from __future__ import annotations

import importlib
from typing import Any


class MissingExtraError(ImportError):
    """An optional package is not installed; the text says what to install."""


def require_extra(module: str) -> Any:
    """Import a package of the convert extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise MissingExtraError(f"this needs the package {module}: pip install {module}") from None
