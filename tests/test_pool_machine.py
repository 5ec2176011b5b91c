"""Random operations on a pool against a list-based one, everything compared after every step."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule
from pool_fakes import Payload, Span, ids

from tinyloop_py.errors import PoolFullError
from tinyloop_py.pool import PrefixPool
from tinyloop_py.pool_client import PoolClient
from tinyloop_py.pool_ledger import PoolEntry
from tinyloop_py.pool_report import PoolStats

token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
budgets = st.none() | st.integers(1, 20)
key_args = st.sampled_from([(0, None, 0, None), (0, 1, 4, None), (0, None, 0, "a"), (1, None, 0, None)])  # model, loops, window, namespace
DEFAULT_LOOPS = 2


@dataclass(eq=False)
class NaiveEntry:
    key: tuple[int, int, int, str | None]
    tokens: tuple[int, ...]
    parts: dict[object, int]
    born: int
    used: int
    pinned: bool = False
    hits: int = 0


class NaivePool:
    """The rules of the pool over a plain list."""

    def __init__(self, capacity: int, max_tokens: int | None, max_bytes: int | None, lru: bool) -> None:
        self.capacity = max(capacity, 1)
        self.max_tokens = float("inf") if max_tokens is None else max_tokens
        self.max_bytes = float("inf") if max_bytes is None else max_bytes
        self.lru = lru
        self.entries: list[NaiveEntry] = []
        self.now = 0
        self.counts: Counter[str] = Counter()

    def tick(self) -> int:
        self.now += 1
        return self.now

    def longest(self, key: tuple, prompt: tuple[int, ...]) -> NaiveEntry | None:
        matching = [e for e in self.entries if e.key == key and prompt[: len(e.tokens)] == e.tokens]
        return max(matching, key=lambda e: len(e.tokens), default=None)

    def exact(self, key: tuple, tokens: tuple[int, ...]) -> NaiveEntry | None:
        return next((e for e in self.entries if (e.key, e.tokens) == (key, tokens)), None)

    @staticmethod
    def union(entries: list[NaiveEntry], parts: dict[object, int]) -> int:
        held = dict(parts)
        for entry in entries:
            held.update(entry.parts)
        return sum(held.values())

    def within(self, entries: list[NaiveEntry], n_tokens: int, parts: dict[object, int], nbytes: int) -> bool:
        tokens = sum(len(e.tokens) for e in entries) + n_tokens
        return tokens <= self.max_tokens and self.union(entries, parts) + nbytes <= self.max_bytes

    def make_room(self, n_tokens: int, parts: dict[object, int], nbytes: int, count: bool) -> bool:
        """Evict in order; False, with nothing changed, where even evicting all would not do."""
        pinned = [e for e in self.entries if e.pinned]
        if len(pinned) >= self.capacity or not self.within(pinned, n_tokens, parts, nbytes):
            self.counts["refusals"] += 1
            return False
        order = (lambda e: e.used) if self.lru else (lambda e: (len(e.tokens), e.born))
        victims = sorted((e for e in self.entries if not e.pinned), key=order)
        while not self.within(self.entries, n_tokens, parts, nbytes) or (count and len(self.entries) >= self.capacity):
            self.entries.remove(victims.pop(0))
            self.counts["evictions"] += 1
        return True

    def register_again(self, entry: NaiveEntry, pin: bool) -> None:
        entry.used = self.tick()
        entry.pinned |= pin

    def insert(self, key: tuple, tokens: tuple[int, ...], parts: dict[object, int], pin: bool) -> bool:
        entry = self.exact(key, tokens)
        if entry is not None:
            self.register_again(entry, pin)
            return True
        if not self.make_room(len(tokens), parts, 0, True):
            return False
        now = self.tick()
        self.entries.append(NaiveEntry(key, tokens, parts, now, now, pin))
        self.counts["insertions"] += 1
        return True

    def record(self, entry: NaiveEntry | None, prompt_len: int, prefilled: int) -> None:
        self.counts["queries"] += 1
        self.counts["prefilled_tokens"] += prefilled
        if entry is None:
            self.counts["misses"] += 1
            return
        self.counts["hits"] += 1
        self.counts["full_hits"] += len(entry.tokens) == prompt_len
        self.counts["matched_tokens"] += len(entry.tokens)
        entry.hits += 1
        entry.used = self.tick()


class PoolMachine(RuleBasedStateMachine):
    builds = Bundle("builds")  # planned, not yet inserted
    uses = Bundle("uses")  # numbers of entries that a call holds; the entries themselves Hypothesis would keep alive

    @initialize(capacity=st.integers(0, 5), max_tokens=budgets, max_bytes=budgets, lru=st.booleans())
    def make(self, capacity: int, max_tokens: int | None, max_bytes: int | None, lru: bool) -> None:
        self.pool = PrefixPool(capacity, max_cached_tokens=max_tokens, max_bytes=max_bytes, eviction="lru" if lru else "shortest")
        self.naive = NaivePool(capacity, max_tokens, max_bytes, lru)
        self.models = [PoolClient(DEFAULT_LOOPS, 4), PoolClient(DEFAULT_LOOPS, 4)]
        self.held: dict[int, tuple[PoolEntry, NaiveEntry, int]] = {}
        self.n_uses = 0
        self.payloads: list[weakref.ref[Payload]] = []

    def key(self, args: tuple) -> tuple[tuple, tuple]:
        """The pool's key and the naive one."""
        model, loops, window, namespace = args
        return self.models[model]._pool_key(loops, window, namespace), (model, loops or DEFAULT_LOOPS, window, namespace)

    def parts_for(self, key: tuple, tokens: tuple[int, ...], n_shared: int, sizes: list[int]) -> dict[object, int]:
        """Parts of the entry it extends, as far as wanted, and new ones."""
        base = self.naive.longest(key, tokens)
        shared = dict(list(base.parts.items())[:n_shared]) if base else {}
        return {**shared, **{Span(): size for size in sizes}}

    @rule(target=builds, args=key_args, tokens=token_lists, n_shared=st.integers(0, 2), sizes=st.lists(st.integers(0, 7), max_size=2))
    def plan(self, args: tuple, tokens: tuple[int, ...], n_shared: int, sizes: list[int]) -> object:
        real_key, key = self.key(args)
        entry = self.pool._get(real_key, ids(tokens))
        known = self.naive.exact(key, tokens)
        assert (entry is None) == (known is None)
        if entry is not None:
            assert self.pool._touch(entry)
            self.naive.register_again(known, False)
            return multiple()
        parts = self.parts_for(key, tokens, n_shared, sizes)
        resident = {part for known in self.naive.entries for part in known.parts}
        shared = {part: size for part, size in parts.items() if part in resident}
        n_new = sum(parts.values()) - sum(shared.values())
        possible = self.naive.make_room(len(tokens), shared, n_new, False)
        try:
            self.pool._plan(len(tokens), n_new, tuple(shared.items()))
        except PoolFullError:
            assert not possible
            return multiple()
        assert possible
        return args, tokens, parts

    @rule(build=consumes(builds), pin=st.booleans())
    def insert(self, build: tuple, pin: bool) -> None:
        args, tokens, parts = build
        real_key, key = self.key(args)
        payload = Payload(*parts.items()) if parts else Payload((Span(), 0))
        self.payloads.append(weakref.ref(payload))
        possible = self.naive.insert(key, tokens, parts, pin)
        try:
            entry = self.pool._insert(real_key, ids(tokens), payload, pin)
        except PoolFullError:
            assert not possible
        else:
            assert possible
            assert tuple(entry.tokens) == tokens and entry.key == real_key

    @rule(build=consumes(builds))
    def build_fails(self, build: tuple) -> None:
        """Nothing to undo."""

    @rule(target=uses, args=key_args, prompt=token_lists)
    def look_up(self, args: tuple, prompt: tuple[int, ...]) -> object:
        real_key, key = self.key(args)
        entry, known = self.pool._find(real_key, ids(prompt)), self.naive.longest(key, prompt)
        assert (entry is None) == (known is None)
        model, loops, window, namespace = args
        matched = self.pool.match(self.models[model], list(prompt), loops, window, namespace=namespace)
        if entry is None:
            assert matched == 0
            return multiple()
        assert matched == entry.n_tokens
        assert tuple(entry.tokens) == known.tokens
        self.n_uses += 1
        self.held[self.n_uses] = entry, known, len(prompt)
        return self.n_uses

    @rule(use=consumes(uses), used=st.booleans())
    def finish(self, use: int, used: bool) -> None:
        entry, known, prompt_len = self.held.pop(use)
        if used:
            self.pool._record(entry, prompt_len, prompt_len - entry.n_tokens)
            self.naive.record(known, prompt_len, prompt_len - len(known.tokens))

    @rule(n=st.integers(1, 9))
    def miss_or_fall_back(self, n: int) -> None:
        self.pool._record(None, n, n)
        self.naive.record(None, n, n)
        self.pool._record_fallback()
        self.naive.counts["fallbacks"] += 1

    @rule(args=key_args, tokens=token_lists, pin=st.booleans())
    def register_again(self, args: tuple, tokens: tuple[int, ...], pin: bool) -> None:
        real_key, key = self.key(args)
        known = self.naive.exact(key, tokens)
        assert self.pool._touch(self.pool._get(real_key, ids(tokens)), pin) == (known is not None)
        if known is not None:
            self.naive.register_again(known, pin)

    @rule(args=key_args, tokens=token_lists)
    def discard(self, args: tuple, tokens: tuple[int, ...]) -> None:
        model, loops, window, namespace = args
        known = self.naive.exact(self.key(args)[1], tokens)
        assert self.pool.discard(self.models[model], tokens, loops, window, namespace=namespace) == (known is not None)
        if known is not None:
            self.naive.entries.remove(known)

    @rule(data=st.data())
    @precondition(lambda self: self.naive.entries)
    def unpin(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.naive.entries), label="entry")
        model, loops, window, namespace = known.key
        assert self.pool.unpin(self.models[model], known.tokens, loops, window, namespace=namespace) == known.pinned
        known.pinned = False

    @rule(model=st.integers(0, 1))
    def evict_idle(self, model: int) -> None:
        used = [known for _, known, _ in self.held.values()]
        idle = [e for e in self.naive.entries if e.key[0] == model and not e.pinned and e not in used]
        assert self.pool._evict_idle(self.models[model].model_key) == (self.naive.lru and bool(idle))
        if self.naive.lru and idle:
            self.naive.entries.remove(min(idle, key=lambda e: e.used))
            self.naive.counts["evictions"] += 1

    @rule(model=st.integers(0, 1))
    def drop_model(self, model: int) -> None:
        self.pool._drop_model(self.models[model].model_key)
        self.naive.entries = [e for e in self.naive.entries if e.key[0] != model]

    @rule()
    @precondition(lambda self: len(self.naive.entries) > 3)
    def clear(self) -> None:
        self.pool.clear()
        self.naive.entries.clear()

    @invariant()
    @precondition(lambda self: hasattr(self, "pool"))
    def same(self) -> None:
        pool, naive = self.pool, self.naive
        pool._check()
        assert pool.size() == len(pool) == len(naive.entries) <= naive.capacity
        assert pool.total_cached_tokens() == sum(len(e.tokens) for e in naive.entries) <= naive.max_tokens
        assert pool.nbytes == naive.union(naive.entries, {}) <= naive.max_bytes
        listed = [(tuple(e.tokens), e.loops, e.cache_window, e.namespace, e.pinned, e.hits, e.nbytes) for e in pool.entries()]
        ordered = sorted(naive.entries, key=lambda e: (-len(e.tokens), e.born))
        assert listed == [(e.tokens, *e.key[1:], e.pinned, e.hits, sum(e.parts.values())) for e in ordered]
        assert pool.stats() == PoolStats(**naive.counts)

    @invariant()
    @precondition(lambda self: hasattr(self, "pool"))
    def payloads_live_exactly_as_long_as_held(self) -> None:
        n_alive = sum(ref() is not None for ref in self.payloads)
        left = {id(entry) for entry, known, _ in self.held.values() if known not in self.naive.entries}
        assert n_alive == len(self.naive.entries) + len(left)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.held.clear()
            del self.pool
            gc.collect()


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestPoolMachine = pytest.mark.usefixtures("small_heap")(PoolMachine.TestCase)
