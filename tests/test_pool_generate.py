"""The pool on a real model: the specification's flow, its errors, what a hit costs, and what happens when something fails.

Numbers in names are rows of the project's list of faults that users of other prefix caches reported.
"""

import gc
import signal
import threading

import numpy as np
import pytest
from models import CONFIGS, random_tokens
from runtime import Fault, entry_of, open_model, page_nbytes

import tinyloop_py as tl

GREEDY = {"temperature": 0.0, "stop_tokens": ()}
TOKENS = random_tokens(CONFIGS["shipped"], 120)


@pytest.fixture
def model(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=256) as model:
        yield model


@pytest.fixture
def pool():
    return tl.PrefixPool(capacity=16)


def test_register_returns_the_length_and_counts(model, pool):
    assert model.register_prefix(pool, TOKENS[:50]) == 50
    assert (pool.size(), pool.total_cached_tokens()) == (1, 50)
    assert model.register_prefix(pool, TOKENS[:30]) == 30
    assert (pool.size(), pool.total_cached_tokens(), len(pool)) == (2, 80, 2)


def test_making_a_pool_takes_no_kv_memory(model):
    tl.PrefixPool(capacity=1000)
    assert model.kv_nbytes == 0


def test_the_longest_match_wins_and_only_the_rest_is_prefilled(model, pool):
    for n in (10, 40, 25):
        model.register_prefix(pool, TOKENS[:n])
    assert pool.match(model, TOKENS) == 40
    want = model.generate(TOKENS, 10, **GREEDY)
    assert model.generate_with_pool(pool, TOKENS, 10, **GREEDY) == want
    stats = pool.stats()
    assert (stats.queries, stats.hits, stats.matched_tokens, stats.prefilled_tokens) == (1, 1, 40, 80)


def test_no_match_is_generate(model, pool):
    model.register_prefix(pool, TOKENS[:20])
    other = TOKENS[1:60]
    assert model.generate_with_pool(pool, other, 10, **GREEDY) == model.generate(other, 10, **GREEDY)
    assert model.generate_with_pool(pool, other, 10, temperature=1.0, seed=3) == model.generate(other, 10, temperature=1.0, seed=3)
    stats = pool.stats()
    assert (stats.queries, stats.misses, stats.hits, stats.prefilled_tokens) == (2, 2, 0, 118)


def test_1_a_prompt_shorter_than_an_entry_never_uses_it(model, pool):
    model.register_prefix(pool, TOKENS[:40])
    assert pool.match(model, TOKENS[:12]) == 0
    for n in (12, 40):
        assert model.generate_with_pool(pool, TOKENS[:n], 8, **GREEDY) == model.generate(TOKENS[:n], 8, **GREEDY)
    assert pool.stats().full_hits == 1


def test_2_3_the_same_prompt_again_and_again(model, pool):
    model.register_prefix(pool, TOKENS)
    want = model.generate(TOKENS, 20, **GREEDY)
    for _ in range(4):
        assert model.generate_with_pool(pool, TOKENS, 20, **GREEDY) == want
        assert entry_of(pool, model, TOKENS).payload.n_tokens == 120
    assert pool.stats().full_hits == 4


@pytest.mark.parametrize("split", [1, 15, 16, 17, 31, 33, 63, 100, 119])
def test_4_cold_and_warm_logits_do_not_differ_at_all(model, pool, split):
    model.register_prefix(pool, TOKENS[:split])
    model.register_prefix(pool, TOKENS)  # built from the shorter one
    warm = entry_of(pool, model, TOKENS).payload
    cold_pool = tl.PrefixPool()
    model.register_prefix(cold_pool, TOKENS)
    cold = entry_of(cold_pool, model, TOKENS).payload
    assert np.array_equal(warm.final_x, cold.final_x) and np.array_equal(warm.boundary_x, cold.boundary_x)
    assert pool.match(model, TOKENS[:-1]) == split


def test_6_7_a_window_hits_whole_and_only_itself(backend, pool):
    with open_model(backend, "shipped", "bf16", max_seq_len=256) as model:
        model.register_prefix(pool, TOKENS[:80], cache_window=20)
        for window in (0, 19, 21):
            assert pool.match(model, TOKENS, None, window) == 0
        assert pool.match(model, TOKENS[:70], None, 20) == 0  # an entry matches whole or not at all
        assert pool.match(model, TOKENS[:85], None, 20) == 80
        want = model.generate(TOKENS[:85], 30, cache_window=20, **GREEDY)
        assert model.generate_with_pool(pool, TOKENS[:85], 30, cache_window=20, **GREEDY) == want
        assert (pool.stats().matched_tokens, pool.stats().prefilled_tokens) == (80, 5)


def test_a_windowed_entry_holds_its_window_only(model, pool):
    model.register_prefix(pool, random_tokens(model.config, 250), cache_window=20)
    assert model.kv_nbytes <= 3 * page_nbytes(model)


def test_21_depth_window_namespace_and_model_are_part_of_the_key(backend, pool):
    with open_model(backend, "shipped", "bf16") as model, open_model(backend, "shipped", "bf16") as twin:
        model.register_prefix(pool, TOKENS[:50], loops=2)
        assert pool.match(model, TOKENS, 2) == 50
        assert pool.match(model, TOKENS, 4) == 0
        assert pool.match(twin, TOKENS, 2) == 0
        assert pool.match(model, TOKENS, 2, namespace="a") == 0
        assert model.generate_with_pool(pool, TOKENS, 5, loops=4, **GREEDY) == model.generate(TOKENS, 5, loops=4, **GREEDY)
        assert twin.generate_with_pool(pool, TOKENS, 5, loops=2, **GREEDY) == model.generate(TOKENS, 5, loops=2, **GREEDY)
        assert pool.stats().hits == 0


def test_the_callers_array_is_copied(model, pool):
    tokens = TOKENS[:50].copy()
    model.register_prefix(pool, tokens)
    tokens[:] = 0
    assert pool.match(model, TOKENS) == 50 and pool.match(model, tokens) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"tokens": []}, {"tokens": np.zeros(257, np.int32)}, {"tokens": np.zeros((2, 3), np.int32)}, {"tokens": [259]}, {"tokens": [-1]},
        {"tokens": [2**33]}, {"loops": 0}, {"loops": 9}, {"cache_window": -1},
    ],
)  # fmt: skip
def test_register_returns_0_for_what_is_out_of_range(model, pool, arguments):
    model.register_prefix(pool, TOKENS[:10])
    assert model.register_prefix(pool, **{"tokens": TOKENS[:20], **arguments}) == 0
    assert (pool.size(), pool.total_cached_tokens()) == (1, 10)
    assert model.register_prefix(None, TOKENS) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tokens": np.zeros(3)}, "float64"), ({"tokens": "abc"}, "str"), ({"tokens": 5}, "int"), ({"loops": 1.5}, "loops"),
        ({"pool": [1, 2]}, "pool must be a PrefixPool or None, got list"), ({"namespace": 3}, "namespace"),
    ],
)  # fmt: skip
def test_register_raises_for_what_is_of_another_kind(model, pool, arguments, text):
    with pytest.raises(TypeError, match=text):
        model.register_prefix(**{"pool": pool, "tokens": TOKENS, **arguments})
    assert pool.size() == 0


def test_generate_with_pool_needs_a_pool(model):
    with pytest.raises(TypeError, match="pool must be a PrefixPool, got NoneType"):
        model.generate_with_pool(None, TOKENS)


def test_registering_again_allocates_nothing(model, pool):
    model.register_prefix(pool, TOKENS)
    before = model.kv_nbytes
    with Fault(model, 1) as fault:
        assert model.register_prefix(pool, TOKENS) == 120
    assert fault.taken == 0 and model.kv_nbytes == before and pool.size() == 1


def test_16_a_hit_shares_the_entrys_pages(model, pool):
    """Memory added by a hit: the pages of the new tokens, and a copy of one partly filled page."""
    model.register_prefix(pool, TOKENS[:100])  # six pages and a quarter
    held, store = model.kv_nbytes, model._engine.plan.store
    store.reset_peak()
    model.generate_with_pool(pool, TOKENS[:110], 20, **GREEDY)  # positions 100..128: a copy of page 6, then 7 and 8
    assert held == 7 * page_nbytes(model)
    assert store.peak_nbytes - held == 3 * page_nbytes(model)
    assert model.kv_nbytes == held


def test_entries_share_pages_and_the_pool_counts_them_once(model, pool):
    model.register_prefix(pool, TOKENS[:64])
    model.register_prefix(pool, TOKENS[:112])
    assert model.kv_nbytes == 7 * page_nbytes(model)
    hidden = 2 * (model.config.default_loops + 1) * model.config.dim * 4
    assert pool.nbytes == model.kv_nbytes + hidden
    assert sum(entry.nbytes for entry in pool.entries()) == 11 * page_nbytes(model) + hidden


def test_eviction_frees_pages_that_no_one_else_holds(model):
    pool = tl.PrefixPool(capacity=2)
    model.register_prefix(pool, TOKENS[:64])
    model.register_prefix(pool, random_tokens(model.config, 80, seed=1))
    model.register_prefix(pool, random_tokens(model.config, 96, seed=2))
    assert model.kv_nbytes == 11 * page_nbytes(model)  # 5 + 6: the shortest went
    pool.clear()
    assert model.kv_nbytes == 0


def test_18_an_entry_evicted_in_mid_call_lives_until_the_call_ends(model):
    pool = tl.PrefixPool(capacity=1)
    model.register_prefix(pool, TOKENS[:100])
    want = model.generate(TOKENS, 40, **GREEDY)
    got, started = [], threading.Event()

    def work():
        started.set()
        got.append(model.generate_with_pool(pool, TOKENS, 40, **GREEDY))

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    for seed in range(1, 5):
        model.register_prefix(pool, random_tokens(model.config, 110, seed=seed))
    thread.join()
    assert got == [want]
    assert pool.size() == 1 and model.kv_nbytes == 7 * page_nbytes(model)


def test_the_pool_frees_its_entries_when_it_goes(model):
    pool = tl.PrefixPool()
    model.register_prefix(pool, TOKENS)
    assert model.kv_nbytes > 0
    del pool
    gc.collect()
    assert model.kv_nbytes == 0


def test_closing_a_model_empties_its_entries_out_of_every_pool(backend):
    first, second = tl.PrefixPool(), tl.PrefixPool()
    with open_model(backend) as kept, open_model(backend) as closed:
        for pool in (first, second):
            kept.register_prefix(pool, TOKENS[:20])
            closed.register_prefix(pool, TOKENS[:30])
        closed.close()
        assert (first.size(), second.size()) == (1, 1)
        assert first.match(kept, TOKENS) == 20
        with pytest.raises(RuntimeError, match="closed; cannot call match"):
            first.match(closed, TOKENS)


def test_a_reopened_model_misses(backend, pool):
    with open_model(backend) as model:
        model.register_prefix(pool, TOKENS[:30])
    with open_model(backend) as model:
        assert pool.match(model, TOKENS) == 0


# ---- faults


@pytest.mark.parametrize("split", [40, 100, 120])
def test_a_failure_at_every_page_of_a_hit_falls_back_to_the_same_answer(model, split):
    want = model.generate(TOKENS, 12, **GREEDY)
    pool = tl.PrefixPool()
    model.register_prefix(pool, TOKENS[:split])
    held = model.kv_nbytes
    with Fault(model, 10**9) as count:
        model.generate_with_pool(pool, TOKENS, 0)
    assert count.taken > 0
    for nth in range(1, count.taken + 1):
        with Fault(model, nth):
            assert model.generate_with_pool(pool, TOKENS, 12, **GREEDY) == want
        assert pool.stats().fallbacks == nth
        assert model.kv_nbytes == held and model._engine.plan.store.reserved_nbytes == 0
    assert model.generate_with_pool(pool, TOKENS, 12, **GREEDY) == want
    assert pool.stats().hits == 2


def test_where_plain_generate_fails_too_the_call_raises(model, pool):
    model.register_prefix(pool, TOKENS[:100])
    held = model.kv_nbytes
    with Fault(model, 1, lasting=True), pytest.raises(RuntimeError, match=r"^out of memory"):
        model.generate_with_pool(pool, TOKENS, 12, **GREEDY)
    assert model.kv_nbytes == held and pool.size() == 1
    assert pool.match(model, TOKENS) == 100


def test_a_failed_registration_leaves_nothing(model, pool):
    model.register_prefix(pool, TOKENS[:50])
    held = model.kv_nbytes
    with Fault(model, 10**9) as count:
        model.register_prefix(tl.PrefixPool(), TOKENS)
    for nth in range(1, count.taken + 1):
        with Fault(model, nth), pytest.raises(tl.OutOfMemoryError):
            model.register_prefix(tl.PrefixPool(), TOKENS)
        assert model.kv_nbytes == held and model._engine.plan.store.reserved_nbytes == 0
    with Fault(model, 1), pytest.raises(tl.OutOfMemoryError):
        model.register_prefix(pool, TOKENS)
    assert (pool.size(), pool.total_cached_tokens(), pool.nbytes) == (1, 50, pool.entries()[0].nbytes)


def test_a_call_beyond_the_budget_is_refused_before_it_works(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=256) as plain:
        page = page_nbytes(plain)
    with open_model(backend, "shipped", "bf16", max_seq_len=256, kv_budget=6 * page) as model:
        pool = tl.PrefixPool()
        assert model.kv_budget == 6 * page
        model.register_prefix(pool, TOKENS[:64])
        with Fault(model, 10**9) as count, pytest.raises(tl.OutOfMemoryError, match=r"^out of memory: .* kv_budget") as caught:
            model.generate(random_tokens(model.config, 20), 30)
        assert isinstance(caught.value, RuntimeError) and f"{2 * page:,}" in str(caught.value)
        assert count.taken == 0 and pool.match(model, TOKENS) == 64
        assert len(model.generate(random_tokens(model.config, 20), 12, stop_tokens=())) == 32
        # A hit needs less: the entry's pages are there.
        assert len(model.generate_with_pool(pool, TOKENS[:70], 20, stop_tokens=())) == 90
        with pytest.raises(tl.OutOfMemoryError):
            model.register_prefix(pool, random_tokens(model.config, 60))
        assert pool.size() == 1


def test_under_lru_a_call_evicts_idle_entries_for_its_budget(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=256) as plain:
        page = page_nbytes(plain)
    with open_model(backend, "shipped", "bf16", max_seq_len=256, kv_budget=6 * page) as model:
        pool = tl.PrefixPool(eviction="lru")
        for seed in range(3):
            model.register_prefix(pool, random_tokens(model.config, 32, seed=seed), pin=seed == 1)
        assert len(model.generate_with_pool(pool, random_tokens(model.config, 20, seed=9), 12, stop_tokens=())) == 32  # the oldest went
        assert [pool.match(model, random_tokens(model.config, 32, seed=s)) for s in range(3)] == [0, 32, 32]
        with pytest.raises(tl.OutOfMemoryError):
            model.generate_with_pool(pool, random_tokens(model.config, 80, seed=9), 12)
        assert pool.match(model, random_tokens(model.config, 32, seed=1)) == 32  # pinned


def test_pool_budgets(model):
    pool = tl.PrefixPool(max_cached_tokens=100)
    model.register_prefix(pool, TOKENS[:60])
    with pytest.raises(tl.PoolFullError):
        model.register_prefix(pool, random_tokens(model.config, 120, seed=1))
    assert pool.match(model, TOKENS) == 60 and pool.stats().refusals == 1
    store = model._engine.plan.store
    store.reset_peak()
    model.register_prefix(pool, random_tokens(model.config, 90, seed=1))  # 14: never both at once
    assert pool.total_cached_tokens() == 90 and store.peak_nbytes <= 6 * page_nbytes(model)


def test_max_bytes_counts_a_shared_page_once(model):
    page, hidden = page_nbytes(model), (model.config.default_loops + 1) * model.config.dim * 4
    pool = tl.PrefixPool(max_bytes=8 * page + 2 * hidden)
    model.register_prefix(pool, TOKENS[:64])
    model.register_prefix(pool, TOKENS[:112])  # four pages shared: seven in all
    assert pool.size() == 2 and pool.nbytes == 7 * page + 2 * hidden
    model.register_prefix(pool, random_tokens(model.config, 48, seed=4))  # the shortest frees nothing, so the next goes too
    assert pool.size() == 1 and pool.nbytes == model.kv_nbytes + hidden == 3 * page + hidden


def test_26_eight_threads_on_one_pool_get_their_serial_answers(backend):
    prompts = [np.concatenate([TOKENS[: 20 * (i % 4 + 1)], random_tokens(CONFIGS["shipped"], 10 + i, seed=i)]) for i in range(8)]
    with open_model(backend, "shipped", "bf16", max_seq_len=256) as model:
        want = [model.generate(p, 12, **GREEDY) for p in prompts]
        pool = tl.PrefixPool(capacity=3, eviction="lru")
        wrong, errors = [], []

        def work(i):
            try:
                for round_ in range(6):
                    n = 20 * ((i + round_) % 4 + 1)
                    model.register_prefix(pool, TOKENS[:n])
                    if model.generate_with_pool(pool, prompts[i], 12, **GREEDY) != want[i]:
                        wrong.append((i, round_))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong and not errors
        stats = pool.stats()
        assert stats.queries == 48 and stats.hits + stats.misses == 48 and stats.hits > 0
        pool._check()
        pool.clear()
        assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0


def test_rounds_of_register_evict_and_generate_do_not_grow(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=256) as model:
        pool = tl.PrefixPool(capacity=4)
        seen = set()
        for i in range(300):
            prefix = random_tokens(model.config, 20 + i % 30, seed=i)
            model.register_prefix(pool, prefix)
            model.generate_with_pool(pool, np.concatenate([prefix, prefix[:5]]), 2, **GREEDY)
            if i >= 200:  # the longest prefixes have gathered by then
                seen.add(model._engine.plan.store.spaces[2].n_seen)
        assert len(seen) == 1 and pool.size() == 4


def test_what_a_signal_raises_while_a_hit_is_prepared_is_no_failure_of_the_hit(backend):
    """A time limit by SIGALRM ends the call; it is not answered by running the whole prompt instead."""

    def limit(*_):
        raise TimeoutError("enough")

    with open_model(backend, "shipped", "bf16", max_seq_len=40_000) as model:
        pool, prompt = tl.PrefixPool(), random_tokens(model.config, 30_000)
        model.register_prefix(pool, prompt[:40])
        held, before = model.kv_nbytes, signal.signal(signal.SIGALRM, limit)
        try:
            for call in (
                model.generate_with_pool,
                lambda pool, p, n: model.generate_batch([p], n, pool=pool),
                lambda pool, p, n: model.build_resume_handle(p, pool=pool),
            ):
                signal.setitimer(signal.ITIMER_REAL, 0.01)  # whatever runs 30,000 tokens has begun by then, and not ended
                with pytest.raises(TimeoutError, match="enough"):
                    call(pool, prompt, 5)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert pool.stats().fallbacks == pool.stats().queries == 0 and model.kv_nbytes == held
