"""How entries leave; payloads live exactly as long as they are held, and nothing breaks a pool: callbacks, failures, threads."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
from pool_fakes import Payload, Span, ids, lengths, register

from tinyloop_py.errors import PoolFullError
from tinyloop_py.pool import PrefixPool
from tinyloop_py.pool_client import PoolClient
from tinyloop_py.pool_report import PoolStats


@pytest.fixture
def model() -> PoolClient:
    return PoolClient(2, 8)


# Removing


def test_discard_is_exact(model: PoolClient) -> None:
    pool = PrefixPool()
    register(pool, model, [1, 2], pin=True)
    for tokens in ([1], [1, 2, 3], [], [5]):
        assert not pool.discard(model, tokens)
    assert not pool.discard(model, [1, 2], namespace="a")
    assert not pool.discard(model, [1, 2], 3)
    assert pool.discard(model, [1, 2])
    assert not pool.discard(model, [1, 2])
    assert (pool.size(), pool.stats().evictions) == (0, 0)


def test_clear_removes_everything_and_keeps_the_counts(model: PoolClient) -> None:
    pool = PrefixPool(4)
    register(pool, model, [1], nbytes=5, pin=True)
    register(pool, model, [2], nbytes=5, namespace="a")
    pool.clear()
    assert (pool.size(), pool.total_cached_tokens(), pool.nbytes) == (0, 0, 0)
    assert pool.stats() == PoolStats(insertions=2)
    register(pool, model, [1])
    assert pool.size() == 1


def test_a_closed_models_entries_leave_and_others_stay(model: PoolClient) -> None:
    pool = PrefixPool()
    other = PoolClient(2, 2)
    register(pool, model, [1], pin=True)
    register(pool, model, [1, 2], namespace="a")
    register(pool, other, [1])
    pool._drop_model(model.model_key)
    assert pool.size() == 1
    assert pool.match(other, [1]) == 1
    assert pool.stats().evictions == 0


def test_idle_entries_of_one_model_go_under_lru(model: PoolClient) -> None:
    pool = PrefixPool(eviction="lru")
    other = PoolClient(2, 2)
    register(pool, other, [9])
    for first in (1, 2, 3):
        register(pool, model, [first], pin=first == 1)
    held = pool._find(model._pool_key(), ids(2))
    assert pool._evict_idle(model.model_key)
    assert [pool.match(model, [first]) for first in (1, 2, 3)] == [1, 1, 0]
    assert not pool._evict_idle(model.model_key)  # one is pinned, one in use
    del held
    assert pool._evict_idle(model.model_key)
    assert not pool._evict_idle(model.model_key)
    assert pool.match(other, [9]) == 1
    assert pool.stats().evictions == 2


def test_only_capacity_and_budgets_evict_under_shortest(model: PoolClient) -> None:
    pool = PrefixPool()
    register(pool, model, [1])
    assert not pool._evict_idle(model.model_key)
    assert pool.size() == 1


# Lifetimes


def test_an_entry_in_use_leaves_at_once_and_its_payload_lives_on(model: PoolClient) -> None:
    pool = PrefixPool(1)
    payload = Payload(nbytes=7)
    freed = weakref.ref(payload)
    register(pool, model, [1, 1], payload=payload)
    del payload
    in_use = pool._find(model._pool_key(), ids(1, 1, 5))
    register(pool, model, [2])
    assert pool.match(model, [1, 1, 5]) == 0
    assert pool.nbytes == 0
    assert freed() is not None and in_use.payload is freed()
    assert in_use.tokens.tolist() == [1, 1]
    pool._record(in_use, 3, 1)  # its call still counts
    assert (in_use.hits, pool.stats().hits) == (1, 1)
    assert not pool._touch(in_use, True)
    del in_use
    assert freed() is None


def test_leaving_scope_frees_every_payload_without_the_collector(model: PoolClient) -> None:
    gc.disable()
    try:
        pool = PrefixPool()
        payloads = [Payload() for _ in range(3)]
        freed = [weakref.ref(payload) for payload in payloads]
        for first, payload in enumerate(payloads):
            register(pool, model, [first], payload=payload, pin=first == 1)
        del payloads, payload
        assert all(ref() is not None for ref in freed)
        del pool
        assert all(ref() is None for ref in freed)
    finally:
        gc.enable()


def test_a_cycle_through_a_payload_is_collected(model: PoolClient) -> None:
    pool = PrefixPool()
    payload = Payload()
    payload.pool = pool
    register(pool, model, [1], payload=payload)
    freed = weakref.ref(payload)
    del pool, payload
    gc.collect()
    assert freed() is None


@pytest.mark.parametrize("action", ["clear", "discard", "register", "insert", "close", "plan"])
def test_freeing_a_payload_may_call_back_into_the_pool(model: PoolClient, action: str) -> None:
    pool = PrefixPool(2, max_cached_tokens=6)
    freed: list[list[int]] = []
    errors: list[BaseException] = []

    class Callback(Payload):
        def __del__(self) -> None:  # an exception in here would only be printed
            try:
                pool._check()
                freed.append(lengths(pool))
                if len(freed) < 5:
                    register(pool, model, [7, len(freed)], payload=Callback())
                if len(freed) == 2:
                    pool.clear()
                pool._check()
            except BaseException as error:
                errors.append(error)

    register(pool, model, [1], payload=Callback())
    register(pool, model, [1, 2], payload=Callback())
    if action == "clear":
        pool.clear()
    elif action == "discard":
        pool.discard(model, [1])
    elif action == "register":
        register(pool, model, [3, 3, 3], payload=Callback())
    elif action == "insert":
        pool._insert(model._pool_key(), ids(1), Callback())
    elif action == "close":
        pool._drop_model(model.model_key)
    else:
        pool._plan(6, 0)
    pool._check()
    assert errors == []
    assert freed


def test_a_payload_that_fails_leaves_no_entry(model: PoolClient) -> None:
    class Broken(Payload):
        def parts(self) -> tuple:
            raise MemoryError

    pool = PrefixPool(1)
    register(pool, model, [1])
    with pytest.raises(MemoryError):
        pool._insert(model._pool_key(), ids(2), Broken())
    with pytest.raises(ValueError):
        pool._insert(model._pool_key(), ids([]), Payload())
    assert lengths(pool) == [1]
    pool._check()


@pytest.mark.parametrize("eviction", ["shortest", "lru"])
@pytest.mark.parametrize("shared_at", [0, 3])
def test_no_failed_allocation_breaks_the_pool(model: PoolClient, eviction: str, shared_at: int) -> None:
    """Each of the interpreter's allocations fails once, in turn: the call raises MemoryError or works, and all sums still hold."""
    testcapi = pytest.importorskip("_testcapi")
    key, other = model._pool_key(), model._pool_key(namespace="a")
    n_failed = 0
    for nth in range(120):
        pool = PrefixPool(3, max_cached_tokens=12, max_bytes=30, eviction=eviction)
        stem = Span()
        for tokens in ([1], [1, 1], [2, 2, 2]):
            register(pool, model, tokens, payload=Payload((stem, 5), (Span(), 5)), namespace="a" if tokens == [1] else None)
        parts = [(Span(), 5), (Span(), 5), (Span(), 2)]
        parts.insert(shared_at, (stem, 5))
        tokens, again, payload = ids([3] * 5), ids(1, 1), Payload(*parts)
        entry = pool._get(key, again)
        calls = ((pool._insert, (key, tokens, payload)), (pool._insert, (other, again, payload)), (pool._touch, (entry,)))
        for call, args in calls:
            testcapi.set_nomemory(nth, nth + 1)
            try:
                call(*args)
            except MemoryError:
                testcapi.remove_mem_hooks()
                n_failed += 1
            finally:
                testcapi.remove_mem_hooks()
            pool._check()
        pool.clear()
        assert pool.nbytes == 0
        pool._check()
    assert n_failed > 20


def test_eight_threads_on_one_pool_keep_it_whole() -> None:
    pool = PrefixPool(6, max_cached_tokens=40, max_bytes=60, eviction="lru")
    models = [PoolClient(2, 2), PoolClient(2, 2)]
    stems = [(Span(), 5) for _ in range(3)]
    errors: list[BaseException] = []
    refused: list[int] = []
    start = threading.Barrier(8)

    def step(rng: np.random.Generator) -> None:
        model = models[rng.integers(2)]
        tokens = rng.integers(0, 2, rng.integers(1, 8))
        action = rng.integers(20)
        if action < 10:
            payload = Payload(stems[rng.integers(3)], (Span(), int(rng.integers(9))))
            register(pool, model, tokens, payload=payload, pin=bool(action == 0))
        elif action < 15:
            entry = pool._find(model._pool_key(), ids(tokens))
            assert entry is None or entry.tokens.tolist() == tokens[: entry.n_tokens].tolist()
            pool._record(entry, len(tokens), 0)
        elif action == 15:
            pool.discard(model, tokens)
        elif action == 16:
            pool._evict_idle(model.model_key)
        elif action == 17:
            pool._drop_model(model.model_key)
        else:
            for entry in pool.entries():
                pool.unpin(model, entry.tokens)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        start.wait()
        for _ in range(600):
            try:
                step(rng)
            except PoolFullError:
                refused.append(seed)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    pool._check()
    stats = pool.stats()
    assert stats.queries == stats.hits + stats.misses
    assert stats.refusals == len(refused)
    assert min(stats.hits, stats.evictions, stats.insertions) > 100
    pool.clear()
    assert (pool.size(), pool.total_cached_tokens(), pool.nbytes) == (0, 0, 0)
    pool._check()
