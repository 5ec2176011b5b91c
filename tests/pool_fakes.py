"""Payloads and models for pool tests: no device, no pages, only what the pool asks for."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tinyloop_py.pool import PrefixPool
from tinyloop_py.pool_client import PoolClient
from tinyloop_py.pool_ledger import PoolEntry

Key = tuple[object, int, int, str | None]


class Span:
    """A part that payloads share by identity."""


class Payload:
    """A payload of the given (part, nbytes) pairs, or of one part of its own."""

    def __init__(self, *parts: tuple[object, int], nbytes: int = 0) -> None:
        self._parts = parts or ((Span(), nbytes),)

    def parts(self) -> tuple[tuple[object, int], ...]:
        return self._parts


def ids(*tokens: int | Iterable[int]) -> np.ndarray:
    """ids(1, 2) or ids(range(5)) as an int32 array."""
    return np.array(tokens[0] if tokens and not isinstance(tokens[0], int) else tokens, dtype=np.int32)


def register(
    pool: PrefixPool,
    model: PoolClient,
    tokens: Iterable[int],
    *,
    nbytes: int = 0,
    payload: Payload | None = None,
    pin: bool = False,
    loops: int | None = None,
    cache_window: int = 0,
    namespace: str | None = None,
) -> PoolEntry:
    """What Model.register_prefix does with the pool."""
    key = model._pool_key(loops, cache_window, namespace)
    entry = pool._get(key, ids(tokens))
    if entry is not None and pool._touch(entry, pin):
        return entry
    payload = payload or Payload(nbytes=nbytes)
    pool._plan(len(ids(tokens)), sum(size for _, size in payload.parts()))
    return pool._insert(key, ids(tokens), payload, pin)


def query(pool: PrefixPool, model: PoolClient, prompt: Iterable[int], **key: object) -> int:
    """What Model.generate_with_pool does with the pool: find, run the rest, record. Returns the matched length."""
    entry = pool._find(model._pool_key(**key), ids(prompt))
    matched = 0 if entry is None else entry.n_tokens
    pool._record(entry, len(ids(prompt)), len(ids(prompt)) - matched)
    return matched


def lengths(pool: PrefixPool) -> list[int]:
    """Lengths of the entries, longest first."""
    return [entry.n_tokens for entry in pool.entries()]
