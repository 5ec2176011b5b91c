"""Variables of the environment that are on or off."""

from __future__ import annotations

import os
from collections.abc import Mapping

_OFF, _ON = ("", "0", "false", "off"), ("1", "true", "on")


def is_on(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a variable is on; one that is not set is off.

    Raises
    ------
    ValueError
        It is neither on nor off.
    """
    value = environ.get(name, "").strip().lower()
    if value not in _OFF + _ON:
        raise ValueError(f"the environment variable {name} is {environ[name]!r}, expected 1, true or on; or 0, false, off or nothing")
    return value in _ON
