"""JSON as a file format: UTF-8 only, no duplicate keys, every fault a FormatError."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .errors import FormatError


def load_json(text: str | bytes, what: str) -> Any:
    """Parse `text`; FormatError begins with `what`."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise FormatError(f"{what} is not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not valid JSON: {error}") from None


def load_object(text: str | bytes, what: str) -> dict[str, Any]:
    """`load_json` of what must be an object."""
    value = load_json(text, what)
    if not isinstance(value, dict):
        raise FormatError(f"{what} is a JSON {type(value).__name__}, expected an object")
    return value


def is_int(value: object) -> bool:
    """An integer in JSON's sense: True is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object, limit: int = 80) -> str:
    """`value` as it may stand in an error text: one line, printable anywhere, not longer than `limit`."""
    text = ascii(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def first_of(names: Sequence[str]) -> str:
    """The first of some names and how many follow."""
    return shown(names[0]).strip("'") + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        raise ValueError(f"key {next(shown(key) for key, _ in pairs if key in seen or seen.add(key))} appears twice")  # type: ignore[func-returns-value]
    return found
