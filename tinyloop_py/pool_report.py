"""What PrefixPool.entries() and PrefixPool.stats() return."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class PrefixEntry:
    """A registered prefix as it stood when asked.

    Attributes
    ----------
    n_tokens : int
        Its length.
    tokens : int32 array
        A copy of its token ids, shape (n_tokens,).
    loops, cache_window, namespace
        What a call must have to match it.
    pinned : bool
        Whether it is never evicted.
    hits : int
        Calls that continued from it.
    nbytes : int
        Bytes of all its pages, those that other entries share included.
    """

    n_tokens: int
    tokens: npt.NDArray[np.int32] = field(repr=False)
    loops: int
    cache_window: int
    namespace: str | None
    pinned: bool
    hits: int
    nbytes: int


@dataclass(frozen=True)
class PoolStats:
    """What happened in a pool since it was made; a query counts when its result was used, not when it was looked up.

    Attributes
    ----------
    queries, hits, misses : int
        Calls that asked the pool, those that continued from an entry, and those that found none: queries = hits + misses.
    full_hits : int
        Hits whose entry was the whole prompt.
    matched_tokens, prefilled_tokens : int
        Prompt tokens taken from entries, and those that were run.
    insertions, evictions : int
        Entries added, and entries evicted by capacity, budget or memory; not those that went by `discard`, `clear` or a
        closed model.
    refusals : int
        Prefixes refused with PoolFullError.
    fallbacks : int
        Hits that failed while they were prepared and ran as plain `generate`.
    """

    queries: int = 0
    hits: int = 0
    full_hits: int = 0
    misses: int = 0
    matched_tokens: int = 0
    prefilled_tokens: int = 0
    insertions: int = 0
    evictions: int = 0
    refusals: int = 0
    fallbacks: int = 0
