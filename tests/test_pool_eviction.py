"""Which entry goes when room is short, and which prefix is refused: capacity, pins, budgets."""

from __future__ import annotations

import weakref

import pytest
from pool_fakes import Payload, Span, ids, lengths, query, register

from tinyloop_py.errors import PoolFullError
from tinyloop_py.pool import PrefixPool
from tinyloop_py.pool_client import PoolClient
from tinyloop_py.pool_report import PoolStats


@pytest.fixture
def model() -> PoolClient:
    return PoolClient(2, 8)


# Capacity, order of eviction


def test_size_and_totals_follow_registration_and_eviction(model: PoolClient) -> None:
    pool = PrefixPool(2)
    sizes = []
    for tokens in ([1, 1], [2, 2, 2], [3, 3, 3, 3]):
        register(pool, model, tokens, nbytes=10 * len(tokens))
        sizes.append((pool.size(), len(pool), pool.total_cached_tokens(), pool.nbytes))
    assert sizes == [(1, 1, 2, 20), (2, 2, 5, 50), (2, 2, 7, 70)]
    assert pool.stats().evictions == 1


def test_the_shortest_existing_entry_goes_even_for_a_shorter_one(model: PoolClient) -> None:
    pool = PrefixPool(2)
    register(pool, model, range(10))
    register(pool, model, range(20))
    register(pool, model, [7])
    assert lengths(pool) == [20, 1]
    assert pool.match(model, [7]) == 1


def test_of_equally_short_entries_the_older_goes(model: PoolClient) -> None:
    pool = PrefixPool(3)
    for first in (1, 2, 3):
        register(pool, model, [first, 0])
    register(pool, model, [1, 0])  # again: not newer for it
    register(pool, model, [4, 0])
    assert [pool.match(model, [first, 0]) for first in (1, 2, 3, 4)] == [0, 2, 2, 2]


def test_hits_do_not_reorder_under_shortest(model: PoolClient) -> None:
    pool = PrefixPool(2)
    register(pool, model, [1])
    register(pool, model, [2, 2])
    for _ in range(3):
        query(pool, model, [1, 5])
    register(pool, model, [3, 3, 3])
    assert pool.match(model, [1, 5]) == 0


def test_lru_evicts_what_was_not_hit(model: PoolClient) -> None:
    """User report 19: register A, B; hit A; register C evicts B."""
    pool = PrefixPool(2, eviction="lru")
    register(pool, model, [1] * 9)
    register(pool, model, [2])
    query(pool, model, [1] * 10)
    register(pool, model, [3])
    assert [pool.match(model, [first] * 10) for first in (1, 2, 3)] == [9, 0, 1]


def test_lru_is_refreshed_by_registering_again(model: PoolClient) -> None:
    pool = PrefixPool(2, eviction="lru")
    register(pool, model, [1])
    register(pool, model, [2])
    register(pool, model, [1])
    register(pool, model, [3])
    assert [pool.match(model, [first]) for first in (1, 2, 3)] == [1, 0, 1]


def test_capacity_is_shared_by_all_keys(model: PoolClient) -> None:
    pool = PrefixPool(2)
    register(pool, model, [1], namespace="a")
    register(pool, model, [1, 2], namespace="b")
    register(pool, PoolClient(2, 2), [1, 2, 3])
    assert pool.match(model, [1], namespace="a") == 0
    assert pool.match(model, [1, 2], namespace="b") == 2


def test_registering_again_is_one_entry_and_counts_once(model: PoolClient) -> None:
    pool = PrefixPool()
    first = register(pool, model, [1, 2], nbytes=10)
    again = register(pool, model, [1, 2], nbytes=10)
    assert again is first
    assert (pool.size(), pool.total_cached_tokens(), pool.nbytes, pool.stats().insertions) == (1, 2, 10, 1)


def test_insert_of_what_came_meanwhile_returns_that(model: PoolClient) -> None:
    pool = PrefixPool()
    payload = Payload()
    dropped = weakref.ref(payload)
    first = pool._insert(model._pool_key(), ids(1, 2), Payload(nbytes=3))
    assert pool._insert(model._pool_key(), ids(1, 2), payload, True) is first
    assert first.pinned
    del payload
    assert dropped() is None
    assert (pool.size(), pool.nbytes, pool.stats().insertions) == (1, 3, 1)


# Pins


def test_a_pinned_entry_is_never_evicted_and_unpin_frees_it(model: PoolClient) -> None:
    """User report 19: capacity 2, pin A; register B, C, D: A stays; unpin makes it evictable."""
    pool = PrefixPool(2)
    register(pool, model, [1], pin=True)
    for first in (2, 3, 4):
        register(pool, model, [first, first])
    assert pool.match(model, [1]) == 1
    assert pool.unpin(model, [1])
    assert not pool.unpin(model, [1])
    register(pool, model, [5, 5])
    assert pool.match(model, [1]) == 0
    assert not pool.unpin(model, [1])


def test_pinning_past_capacity_is_refused(model: PoolClient) -> None:
    pool = PrefixPool(2)
    register(pool, model, [1], pin=True)
    register(pool, model, [2], pin=True)
    with pytest.raises(PoolFullError, match="only pinned entries are left"):
        register(pool, model, [3])
    assert lengths(pool) == [1, 1]
    assert pool.stats().refusals == 1


def test_registering_again_pins_if_asked_and_never_unpins(model: PoolClient) -> None:
    pool = PrefixPool()
    register(pool, model, [1])
    assert [entry.pinned for entry in pool.entries()] == [False]
    register(pool, model, [1], pin=True)
    register(pool, model, [1])
    assert [entry.pinned for entry in pool.entries()] == [True]


@pytest.mark.parametrize("budget", [{"max_cached_tokens": 10}, {"max_bytes": 10}])
def test_pins_count_against_budgets(model: PoolClient, budget: dict[str, int]) -> None:
    pool = PrefixPool(**budget)
    register(pool, model, [1] * 4, nbytes=4)
    register(pool, model, [2] * 6, nbytes=6, pin=True)
    with pytest.raises(PoolFullError, match="only pinned entries are left"):
        register(pool, model, [3] * 5, nbytes=5)
    assert lengths(pool) == [6, 4]
    register(pool, model, [3] * 4, nbytes=4)
    assert pool.match(model, [1] * 4) == 0


# Budgets


@pytest.mark.parametrize("budget", [{"max_cached_tokens": 100}, {"max_bytes": 100}])
def test_room_is_made_before_the_build(model: PoolClient, budget: dict[str, int]) -> None:
    """User report 14: capacity 100, two of 90: at no instant are both resident."""
    pool = PrefixPool(**budget)
    payload = Payload(nbytes=90)
    freed = weakref.ref(payload)
    register(pool, model, [1] * 90, payload=payload)
    del payload
    pool._plan(90, 90)
    assert freed() is None
    assert (pool.size(), pool.nbytes) == (0, 0)
    pool._insert(model._pool_key(), ids([2] * 90), Payload(nbytes=90))
    assert (pool.size(), pool.total_cached_tokens(), pool.nbytes) == (1, 90, 90)


def test_capacity_evicts_only_after_the_build(model: PoolClient) -> None:
    pool = PrefixPool(1)
    register(pool, model, [1])
    pool._plan(5, 5)
    assert pool.match(model, [1]) == 1  # a failed build would lose nothing
    pool._insert(model._pool_key(), ids([2] * 5), Payload())
    assert lengths(pool) == [5]


def test_a_budget_evicts_no_more_than_it_must(model: PoolClient) -> None:
    pool = PrefixPool(max_cached_tokens=20)
    for n in (2, 3, 4, 5):
        register(pool, model, [n] * n)
    pool._plan(10, 0)
    assert lengths(pool) == [5, 4]
    assert pool.stats().evictions == 2


@pytest.mark.parametrize("budget", [{"max_cached_tokens": 100}, {"max_bytes": 100}])
@pytest.mark.parametrize("eviction", ["shortest", "lru"])
def test_an_oversized_prefix_is_refused_and_takes_nothing_along(model: PoolClient, budget: dict[str, int], eviction: str) -> None:
    """User report 15: an entry above the budget evicts every other entry, then itself."""
    pool = PrefixPool(eviction=eviction, **budget)
    register(pool, model, [1] * 60, nbytes=60)
    before = pool.stats()
    with pytest.raises(PoolFullError, match=f"{next(iter(budget))} of 100"):
        register(pool, model, [2] * 150, nbytes=150)
    assert pool.match(model, [1] * 61) == 60
    assert pool.stats() == PoolStats(insertions=before.insertions, refusals=1)


def test_a_shared_part_counts_once_and_goes_with_its_last_holder(model: PoolClient) -> None:
    pool = PrefixPool()
    stem, left, right = Span(), Span(), "right"
    register(pool, model, [1] * 16, payload=Payload((stem, 100), (left, 10)))
    register(pool, model, [1] * 32, payload=Payload((stem, 100), (right, 20), (stem, 100)))
    assert pool.nbytes == 130
    assert [entry.nbytes for entry in pool.entries()] == [120, 110]
    assert pool.discard(model, [1] * 16)
    assert pool.nbytes == 120
    assert pool.discard(model, [1] * 32)
    assert pool.nbytes == 0


def test_an_extension_pays_only_for_what_it_adds(model: PoolClient) -> None:
    pool = PrefixPool(max_bytes=100)
    stem, rest = Span(), Span()
    register(pool, model, [1] * 16, payload=Payload((stem, 70)))
    pool._plan(32, 30, ((stem, 70),))
    assert lengths(pool) == [16]
    pool._insert(model._pool_key(), ids([1] * 32), Payload((stem, 70), (rest, 30)))
    assert (lengths(pool), pool.nbytes) == ([32, 16], 100)
    with pytest.raises(PoolFullError, match="takes 101 bytes"):
        pool._plan(48, 31, ((stem, 70),))


def test_evicting_what_the_new_entry_shares_frees_nothing_for_it(model: PoolClient) -> None:
    pool = PrefixPool(max_bytes=100)
    stem = Span()
    register(pool, model, [1] * 4, payload=Payload((stem, 60)))
    register(pool, model, [2] * 8, nbytes=40)
    pool._plan(16, 30, ((stem, 60),))  # evicting the first alone would still leave 40 + 60 + 30
    assert lengths(pool) == []


def test_a_part_that_only_an_evictable_entry_holds_must_fit_beside_the_pins(model: PoolClient) -> None:
    pool = PrefixPool(max_bytes=100)
    stem = Span()
    register(pool, model, [1], nbytes=50, pin=True)
    register(pool, model, [2] * 2, payload=Payload((stem, 40)))
    with pytest.raises(PoolFullError, match=r"only pinned entries are left"):
        pool._plan(4, 30, ((stem, 40),))
    with pytest.raises(PoolFullError, match=r"only pinned entries are left"):
        pool._insert(model._pool_key(), ids([2] * 4), Payload((stem, 40), (Span(), 30)))
    assert (lengths(pool), pool.nbytes) == ([2, 1], 90)
    pool._plan(4, 10, ((stem, 40),))
    assert lengths(pool) == [2, 1]


def test_a_smaller_estimate_than_the_build_keeps_the_budget(model: PoolClient) -> None:
    pool = PrefixPool(max_bytes=100)
    register(pool, model, [1], nbytes=60)
    pool._plan(2, 10)
    pool._insert(model._pool_key(), ids(2, 2), Payload(nbytes=80))
    assert (lengths(pool), pool.nbytes) == ([2], 80)
    pool._plan(3, 10)
    with pytest.raises(PoolFullError):
        pool._insert(model._pool_key(), ids(3, 3, 3), Payload(nbytes=101))
    assert (lengths(pool), pool.nbytes) == ([2], 80)


def test_insert_decides_again_when_the_pool_changed_since_the_plan(model: PoolClient) -> None:
    pool = PrefixPool(1)
    pool._plan(1, 0)
    register(pool, model, [9], pin=True)
    with pytest.raises(PoolFullError):
        pool._insert(model._pool_key(), ids(1), Payload())
    assert pool.match(model, [9]) == 1
    assert pool.stats().refusals == 1


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ((((1, 2), 10),), TypeError),  # hashing a tuple may run its items' code
        (((Span(), -1),), ValueError),
        (((Span(), 1.5),), TypeError),
        (((7, 1), (7, 2)), ValueError),  # one part, two sizes
    ],
)
def test_payloads_that_break_the_contract_change_nothing(model: PoolClient, parts: tuple, error: type[Exception]) -> None:
    pool = PrefixPool()
    register(pool, model, [1], payload=Payload((7, 5)))
    with pytest.raises(error):
        pool._insert(model._pool_key(), ids(2), Payload(*parts))
    with pytest.raises(ValueError, match="5 bytes was given again with 6"):
        pool._insert(model._pool_key(), ids(2), Payload((7, 6)))
    assert (pool.size(), pool.nbytes) == (1, 5)
    pool._check()
