"""What a prefix is called."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def prefix_id(namespace: str | None, loops: int, cache_window: int, tokens: npt.NDArray[np.int32]) -> str:
    """Names a prefix by what it is: the same one has the same id after a restart."""
    key = f"{namespace}\0{loops}\0{cache_window}\0".encode() + tokens.tobytes()
    return "prefix-" + hashlib.sha256(key).hexdigest()[:24]
