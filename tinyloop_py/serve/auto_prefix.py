"""Which prefixes are kept without being asked for, within a budget that tenants share fairly."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .prefix_id import prefix_id

if TYPE_CHECKING:
    from ..model import Model
    from ..pool import PrefixPool
    from ..pool_report import PrefixEntry
    from .steps import PrefixBuild

Key = tuple[str | None, int, bytes]  # namespace, loops, tokens


@dataclass
class Kept:
    """A prefix that was put into the pool by itself."""

    tenant: str
    tokens: npt.NDArray[np.int32]
    n_own: int  # tokens beyond the entry that it was built from, whose pages it shares


class AutoPrefixes:
    """The ledger of automatic prefixes, least recently used first.

    The budget counts tokens, those shared with the entry that one was built from left out. Beyond it, the tenant that
    holds most gives up the one that it used least recently; so nobody can drive out what others use by asking a lot.

    Parameters
    ----------
    max_tokens
        The budget of all tenants together.
    min_tokens
        Shorter prefixes are not worth an entry.
    """

    def __init__(self, model: Model, pool: PrefixPool, max_tokens: int, *, min_tokens: int = 16, window: int = 0) -> None:
        self._model = model
        self._pool = pool
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self._window = window
        self._kept: OrderedDict[Key, Kept] = OrderedDict()
        self._n_own: dict[str, int] = {}  # by tenant

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def n_tokens(self) -> int:
        """Tokens held, as the budget counts them."""
        return sum(self._n_own.values())

    def wants(self, n_tokens: int) -> bool:
        """Whether a prefix of that length is kept at all."""
        return self.min_tokens <= n_tokens <= min(self.max_tokens, self._model.max_seq_len)

    def holds(self, namespace: str | None, loops: int | None, tokens: npt.NDArray[np.int32]) -> bool:
        """Whether exactly this prefix was kept by itself."""
        return self._key(namespace, loops, tokens) in self._kept

    def touch(self, namespace: str | None, loops: int | None, tokens: npt.NDArray[np.int32]) -> None:
        """It was hit."""
        key = self._key(namespace, loops, tokens)
        if key in self._kept:
            self._kept.move_to_end(key)

    def add(self, tenant: str, namespace: str | None, loops: int | None, tokens: npt.NDArray[np.int32], n_shared: int) -> None:
        """It was put into the pool; what goes beyond the budget is discarded there."""
        key = self._key(namespace, loops, tokens)
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        kept = Kept(tenant, np.array(tokens, np.int32), len(tokens) - n_shared)
        self._kept[key] = kept
        self._n_own[tenant] = self._n_own.get(tenant, 0) + kept.n_own
        while self.n_tokens > self.max_tokens:
            self._drop(self._victim(key))

    def built(self, tenant: str, loops: int | None, build: PrefixBuild) -> None:
        """Count one that was built, unless it was there: then it is counted already, or somebody registered it on purpose."""
        if build.inserted:
            self.add(tenant, build.namespace, loops, build.tokens, build.n_matched)
        else:
            self.touch(build.namespace, loops, build.tokens)

    def restore(self, entries: Iterable[PrefixEntry]) -> None:
        """Take back those that were automatic when the pool was saved, in the order of their use."""
        for entry in entries:
            if entry.cache_window != self._window or entry.namespace is None:  # none of this run's requests can hit it
                self._pool.discard(self._model, entry.tokens, entry.loops, entry.cache_window, namespace=entry.namespace)
                continue
            n_shared = self._pool.match(self._model, entry.tokens[:-1], entry.loops, self._window, namespace=entry.namespace)
            self.add(entry.namespace.partition("/")[0], entry.namespace, entry.loops, entry.tokens, n_shared)

    def ids(self) -> list[str]:
        """Of those held, the least recently used one first."""
        return [prefix_id(namespace, loops, self._window, kept.tokens) for (namespace, loops, _), kept in self._kept.items()]

    def forget(self, namespace: str | None, loops: int | None, tokens: npt.NDArray[np.int32]) -> None:
        """It has left the pool, or somebody registered it on purpose: it is no longer ours to drop."""
        self._remove(self._key(namespace, loops, tokens))

    def sweep(self) -> None:
        """Forget what the pool has evicted on its own."""
        for key in list(self._kept):
            if self._pool._get(self._model._pool_key(key[1], self._window, key[0]), self._kept[key].tokens) is None:
                self._remove(key)

    def _key(self, namespace: str | None, loops: int | None, tokens: npt.NDArray[np.int32]) -> Key:
        loops = self._model.config.default_loops if loops is None else loops
        return namespace, loops, np.ascontiguousarray(tokens, np.int32).tobytes()

    def _victim(self, newest: Key) -> Key:
        most = max(self._n_own, key=lambda tenant: self._n_own[tenant])
        return next((key for key, kept in self._kept.items() if kept.tenant == most and key != newest), newest)

    def _drop(self, key: Key) -> None:
        kept = self._remove(key)
        if kept is not None:
            self._pool.discard(self._model, kept.tokens, key[1], self._window, namespace=key[0])

    def _remove(self, key: Key) -> Kept | None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._n_own[kept.tenant] -= kept.n_own
            if not self._n_own[kept.tenant]:
                del self._n_own[kept.tenant]
        return kept
