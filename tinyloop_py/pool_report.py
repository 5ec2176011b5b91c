"""What PrefixPool.entries() and PrefixPool.stats() return."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class PrefixEntry:
    """A registered prefix as it stood when asked."""

    n_tokens: int
    tokens: npt.NDArray[np.int32]  # a copy, shape (n_tokens,)
    loops: int
    cache_window: int
    namespace: str | None
    pinned: bool
    hits: int  # calls that continued from it
    nbytes: int  # of all its pages, those that other entries share included


@dataclass(frozen=True)
class PoolStats:
    """What happened in a pool since it was made; a query counts when its result was used, not when it was looked up."""

    queries: int = 0  # calls that asked the pool: hits + misses
    hits: int = 0
    full_hits: int = 0  # hits whose entry was the whole prompt
    misses: int = 0
    matched_tokens: int = 0  # prompt tokens taken from entries
    prefilled_tokens: int = 0  # prompt tokens that were run
    insertions: int = 0
    evictions: int = 0  # by capacity, budget or memory; not discard, clear or a closed model
    refusals: int = 0  # PoolFullError
    fallbacks: int = 0  # hits that failed while they were prepared and ran as plain generate
