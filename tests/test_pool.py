"""What a pool takes, matches and reports, sentence by sentence, with payloads that hold no pages."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from pool_fakes import Payload, ids, lengths, query, register

from tinyloop_py.pool import PrefixPool
from tinyloop_py.pool_client import PoolClient
from tinyloop_py.pool_report import PoolStats

MAX_LOOPS = 8


@pytest.fixture
def model() -> PoolClient:
    return PoolClient(2, MAX_LOOPS)


# Construction


def test_capacity_is_16_unless_given() -> None:
    assert PrefixPool().capacity == 16
    assert PrefixPool(3).capacity == PrefixPool(capacity=np.int64(3)).capacity == 3


def test_capacity_zero_holds_one(model: PoolClient) -> None:
    pool = PrefixPool(0)
    register(pool, model, [1])
    register(pool, model, [1, 2])
    assert (pool.capacity, pool.size()) == (1, 1)


@pytest.mark.parametrize("name", ["capacity", "max_cached_tokens", "max_bytes"])
@pytest.mark.parametrize(
    ("value", "error"),
    [(-1, ValueError), (-(2**70), ValueError), (2**63, ValueError), (1.0, TypeError), (True, TypeError), (np.True_, TypeError), ("1", TypeError)],
)
def test_sizes_are_non_negative_integers(name: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{name} must be"):
        PrefixPool(**{name: value})


def test_capacity_has_no_none() -> None:
    with pytest.raises(TypeError, match="capacity must be an integer, got NoneType"):
        PrefixPool(None)


@pytest.mark.parametrize("name", ["max_cached_tokens", "max_bytes"])
def test_a_budget_of_zero_could_hold_nothing(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        PrefixPool(**{name: 0})
    assert getattr(PrefixPool(**{name: 1}), name) == 1
    assert getattr(PrefixPool(), name) is None


def test_eviction_is_shortest_or_lru() -> None:
    assert PrefixPool().eviction == "shortest"
    assert PrefixPool(eviction="lru").eviction == "lru"
    with pytest.raises(ValueError, match="eviction must be 'shortest' or 'lru', got 'fifo'"):
        PrefixPool(eviction="fifo")
    with pytest.raises(TypeError, match="eviction must be a str"):
        PrefixPool(eviction=None)


def test_budgets_and_eviction_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        PrefixPool(1, 2)


def test_an_empty_pool_is_true_and_says_so(model: PoolClient) -> None:
    pool = PrefixPool()
    assert bool(pool)
    assert len(pool) == pool.size() == pool.total_cached_tokens() == pool.nbytes == 0
    assert pool.entries() == []
    assert pool.stats() == PoolStats()
    assert pool.match(model, [1, 2]) == 0
    assert repr(pool) == "PrefixPool(capacity=16, size=0, total_cached_tokens=0, nbytes=0, eviction='shortest')"


def test_pools_are_weakly_referable_and_not_copied() -> None:
    import copy

    pool = PrefixPool()
    assert weakref.ref(pool)() is pool
    with pytest.raises(TypeError):
        copy.copy(pool)


# Matching


def test_the_longest_entry_wins_and_repeats_match(model: PoolClient) -> None:
    pool = PrefixPool()
    for n in (3, 1, 5):
        register(pool, model, range(n))
    assert [pool.match(model, list(range(n))) for n in range(8)] == [0, 1, 1, 3, 3, 5, 5, 5]
    assert pool.match(model, [0, 1, 9, 3]) == 1
    assert lengths(pool) == [5, 3, 1]


def test_an_entry_longer_than_the_prompt_does_not_match(model: PoolClient) -> None:
    pool = PrefixPool()
    register(pool, model, range(40))
    assert pool.match(model, range(12)) == 0
    assert pool.match(model, range(40)) == 40


def test_match_takes_any_integers_and_ids_outside_the_vocabulary(model: PoolClient) -> None:
    pool = PrefixPool()
    register(pool, model, [5, 6])
    for prompt in ([5, 6, 7], (5, 6, -1), np.array([5, 6, 2**31 - 1], dtype=np.int64), np.array([5, 0, 6, 0], dtype=np.int32)[::2]):
        assert pool.match(model, prompt) == 2
    assert pool.match(model, []) == 0
    with pytest.raises(TypeError, match="prompt must"):
        pool.match(model, "text")
    with pytest.raises(ValueError, match="prompt must be one-dimensional"):
        pool.match(model, np.zeros((1, 2), dtype=np.int32))


def test_match_has_no_side_effect(model: PoolClient) -> None:
    pool = PrefixPool(2, eviction="lru")
    register(pool, model, [1, 1])
    register(pool, model, [2, 2])
    before = pool.stats()
    assert pool.match(model, [1, 1, 1]) == 2
    assert pool.stats() == before
    assert [entry.hits for entry in pool.entries()] == [0, 0]
    register(pool, model, [3, 3])
    assert pool.match(model, [1, 1, 1]) == 0  # still the least recently used


def test_tokens_are_copied(model: PoolClient) -> None:
    pool = PrefixPool()
    tokens = ids(1, 2, 3)
    pool._insert(model._pool_key(), tokens, Payload())
    tokens[:] = 7
    assert pool.match(model, [1, 2, 3]) == 3
    assert pool.match(model, [7, 7, 7]) == 0
    [entry] = pool.entries()
    assert repr(entry).startswith("PrefixEntry(n_tokens=3, loops=2, ")  # short, however many tokens there are
    entry.tokens[:] = 7
    assert pool.match(model, [1, 2, 3]) == 3


def test_depth_window_namespace_and_model_are_part_of_the_key(model: PoolClient) -> None:
    """User report 21 and 24: an incomplete key serves one caller's cache to another."""
    pool = PrefixPool()
    register(pool, model, [1, 2], loops=2, cache_window=4, namespace="a")
    same = {"loops": 2, "cache_window": 4, "namespace": "a"}
    assert pool.match(model, [1, 2, 3], **same) == 2
    assert pool.match(model, [1, 2, 3], None, 4, namespace="a") == 2  # the default depth is 2
    for other in ({"loops": 1}, {"cache_window": 0}, {"cache_window": 5}, {"namespace": None}, {"namespace": "b"}, {"namespace": ""}):
        assert pool.match(model, [1, 2, 3], **{**same, **other}) == 0
    assert pool.match(PoolClient(2, MAX_LOOPS), [1, 2, 3], **same) == 0


def test_each_key_has_its_own_longest(model: PoolClient) -> None:
    pool = PrefixPool()
    register(pool, model, [1, 2, 3], loops=1)
    register(pool, model, [1], loops=4)
    register(pool, model, [1, 2], namespace="a")
    assert [pool.match(model, [1, 2, 3, 4], loops) for loops in (1, 4, 2)] == [3, 1, 0]
    assert pool.match(model, [1, 2, 3, 4], namespace="a") == 2


def test_a_str_subclass_is_the_same_namespace(model: PoolClient) -> None:
    class Tenant(str):
        def __hash__(self) -> int:
            raise AssertionError("foreign code ran")

        __eq__ = None

    pool = PrefixPool()
    register(pool, model, [1], namespace="a")
    assert pool.match(model, [1], namespace=Tenant("a")) == 1


@pytest.mark.parametrize("method", ["match", "discard", "unpin"])
def test_arguments_are_checked(model: PoolClient, method: str) -> None:
    call = getattr(PrefixPool(), method)
    for wrong in (None, object(), PrefixPool()):
        with pytest.raises(TypeError, match=r"model must be a tinyloop\.Model"):
            call(wrong, [1])
    for loops, error in ((0, ValueError), (MAX_LOOPS + 1, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)):
        with pytest.raises(error, match="loops must be"):
            call(model, [1], loops)
    for window, error in ((-1, ValueError), (2**31, ValueError), (None, TypeError), (1.5, TypeError)):
        with pytest.raises(error, match="cache_window must be"):
            call(model, [1], None, window)
    for namespace in (1, b"a", ("a",)):
        with pytest.raises(TypeError, match="namespace must be a str or None"):
            call(model, [1], namespace=namespace)
    with pytest.raises(TypeError):
        call(model, [1], None, 0, "a")  # namespace is keyword-only
    with pytest.raises(TypeError, match="must"):
        call(model, None)


@pytest.mark.parametrize("method", ["match", "discard", "unpin"])
def test_a_closed_model_is_named_before_anything_else(model: PoolClient, method: str) -> None:
    model.close()
    model.close()
    with pytest.raises(RuntimeError, match=rf"^tinyloop\.Model is closed; cannot call {method}$"):
        getattr(PrefixPool(), method)(model, "text", -1, -1)


# What it reports


def test_entries_tell_all_longest_first(model: PoolClient) -> None:
    pool = PrefixPool()
    register(pool, model, [4], nbytes=1)
    register(pool, model, [1, 2, 3], nbytes=3, loops=5, cache_window=9, namespace="a", pin=True)
    register(pool, model, [5], nbytes=2)
    query(pool, model, [1, 2, 3, 4], loops=5, cache_window=9, namespace="a")
    entries = pool.entries()
    rows = [(e.n_tokens, e.tokens.tolist(), e.loops, e.cache_window, e.namespace, e.pinned, e.hits, e.nbytes) for e in entries]
    assert rows == [(3, [1, 2, 3], 5, 9, "a", True, 1, 3), (1, [4], 2, 0, None, False, 0, 1), (1, [5], 2, 0, None, False, 0, 2)]
    assert all(entry.tokens.dtype == np.int32 for entry in entries)
    with pytest.raises(AttributeError):
        entries[0].hits = 5


def test_stats_count_what_was_used(model: PoolClient) -> None:
    """User report 20: look-ups, refused and retried calls inflate the hit rate."""
    pool = PrefixPool()
    register(pool, model, [1, 2, 3])
    key = model._pool_key()
    for _ in range(3):
        pool.match(model, [1, 2, 3, 4])
        pool._find(key, ids(1, 2, 3, 4))  # looked up, then refused
    assert pool.stats() == PoolStats(insertions=1)
    assert query(pool, model, [1, 2, 3, 4]) == 3
    assert query(pool, model, [1, 2, 3]) == 3
    assert query(pool, model, [9, 9]) == 0
    pool._record_fallback()
    assert pool.stats() == PoolStats(queries=3, hits=2, full_hits=1, misses=1, matched_tokens=6, prefilled_tokens=3, insertions=1, fallbacks=1)


def test_random_prompts_hit_nothing(model: PoolClient) -> None:
    pool = PrefixPool()
    register(pool, model, range(100, 110))
    rng = np.random.default_rng(0)
    assert sum(query(pool, model, rng.integers(0, 100, 12)) for _ in range(50)) == 0
    assert (pool.stats().hits, pool.stats().misses) == (0, 50)


def test_a_registered_prefix_of_one_token_and_of_many(model: PoolClient) -> None:
    pool = PrefixPool()
    register(pool, model, [0])
    register(pool, model, range(5000))
    assert pool.match(model, range(6000)) == 5000
    assert pool.match(model, range(4999)) == 1
