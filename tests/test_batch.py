"""generate_batch and step_generations: batch invariance (E2) seen from outside, and that one's failure is not the others'."""

import itertools
import os
import signal
import threading

import numpy as np
import pytest
from models import CONFIGS, random_tokens
from runtime import Fault, open_model, page_nbytes, same_bits

import tinyloop_py as tl
from tinyloop_py.lockstep import step_generations

GREEDY = {"temperature": 0.0, "stop_tokens": ()}
SEEDED = {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 77, "stop_tokens": ()}
LENGTHS = (1, 33, 16, 7, 64, 2, 47, 15, 65, 31, 17, 5, 90)  # odd, around pages and attention chunks


def prompts(n, config=CONFIGS["shipped"]):
    return [random_tokens(config, LENGTHS[i % len(LENGTHS)], seed=i) for i in range(n)]


@pytest.fixture
def model(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=160) as model:
        yield model


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 16, 17, 32, 33])
def test_a_batch_of_any_size_equals_one_at_a_time(model, n):
    for how in ({**GREEDY, "loops": 3}, {**SEEDED, "loops": 2}):
        assert model.generate_batch(prompts(n), 12, **how) == [model.generate(p, 12, **how) for p in prompts(n)]
    assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0


@pytest.mark.parametrize(("dtype", "group_size"), [("f32", None), ("bf16", None), ("f16", None), ("int8", 64)])
@pytest.mark.parametrize("name", ["shipped", "huginn", "ouro", "mixed_windows", "olmo2"])
def test_every_family_and_weight_type(backend, name, dtype, group_size):
    with open_model(backend, name, dtype, group_size=group_size, max_seq_len=160) as model:
        asked = prompts(9, model.config)
        for window in (0, 17):
            how = {**SEEDED, "cache_window": window, "top_k": 0}
            assert model.generate_batch(asked, 10, **how) == [model.generate(p, 10, **how) for p in asked], window


def test_the_number_of_threads_does_not_matter(backend):
    outs = []
    for threads in (1, 2, 3):
        with open_model(backend, "huginn", "int8", max_seq_len=160, threads=threads) as model:
            outs.append(model.generate_batch(prompts(7, model.config), 12, **SEEDED))
    assert outs[0] == outs[1] == outs[2]


@pytest.mark.parametrize("window", [0, 1, 15, 33])
@pytest.mark.parametrize("loops", [1, 8])
def test_each_prompt_has_its_own_hit(model, loops, window):
    pool = tl.PrefixPool(capacity=32)
    asked = prompts(13)
    splits = [0 if i % 4 == 0 else len(p) if i % 4 == 1 else len(p) // 2 + i % 3 for i, p in enumerate(asked)]
    for p, split in zip(asked, splits, strict=True):
        model.register_prefix(pool, p[:split], loops, window)
    held = model.kv_nbytes
    matched = [pool.match(model, p, loops, window) for p in asked]
    how = {**SEEDED, "loops": loops, "cache_window": window}
    want = [model.generate(p, 12, **how) for p in asked]
    assert model.generate_batch(asked, 12, pool=pool, **how) == want
    stats = pool.stats()
    assert (stats.queries, stats.fallbacks) == (13, 0)
    assert stats.hits == sum(m > 0 for m in matched) >= 9
    assert stats.full_hits == sum(m == len(p) for m, p in zip(matched, asked, strict=True)) >= 3
    assert (stats.matched_tokens, stats.prefilled_tokens) == (sum(matched), sum(map(len, asked)) - sum(matched))
    assert model.kv_nbytes == held


def test_the_logits_of_every_step_are_those_of_the_tokens_alone(model):
    """At mixed depths and windows, with prompts joining while others draw."""
    kinds = itertools.cycle([(1, 0), (3, 0), (3, 17), (8, 0), (3, 5)])
    asked = [(p, *next(kinds)) for p in prompts(25)]
    waiting = [model._start(p, 9, loops, cache_window=w, run_prompt=False, **SEEDED) for p, loops, w in asked]
    for g in waiting:
        g.keep_logits()
    rows, live, late = {id(g): [] for g in waiting}, waiting[:10], waiting[10:]
    while live:
        for g, token in zip(live, step_generations(live), strict=True):
            if token is not None:
                rows[id(g)].append(g.logits.copy())
        live = [g for g in live if g.finish_reason is None] + late[:2]
        late = late[2:]
    for g, (p, loops, w) in zip(waiting, asked, strict=True):
        want = model.logits(g.all_tokens(), loops, w)[len(p) - 1 : -1]
        assert len(rows[id(g)]) == 9 and same_bits(np.stack(rows[id(g)]), want)
        assert g.all_tokens() == model.generate(p, 9, loops, cache_window=w, **SEEDED)


@pytest.mark.parametrize("max_seq_len", [16, 25])
def test_more_than_one_native_step_takes(backend, max_seq_len):
    """A step of this model has no more rows than max_seq_len."""
    with open_model(backend, "shipped", "bf16", max_seq_len=max_seq_len) as model:
        assert model._engine.max_rows == model._engine.max_out == max_seq_len
        asked = [p[: max_seq_len - 5] for p in prompts(70)]
        live = [model._start(p, 5, 2, run_prompt=False, **SEEDED) for p in asked]
        while any(g.finish_reason is None for g in live):
            step_generations(live)
        want = [model.generate(p, 5, 2, **SEEDED) for p in asked]
        assert [g.all_tokens() for g in live] == want
        assert model.generate_batch(asked, 5, 2, **SEEDED) == want


def test_a_step_draws_for_all_whose_prompt_has_run_and_fills_up_with_prompts(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=64) as model:  # 64 rows a step
        long, short = random_tokens(model.config, 60, seed=1), random_tokens(model.config, 10, seed=2)
        first, second = (model._start(p, 4, 1, run_prompt=False, **GREEDY) for p in (short, long))
        drawn = [[t is not None for t in step_generations([first, second])] for _ in range(5)]
        assert drawn == [[True, False], [True, True], [True, True], [True, True], [False, True]]  # 10 + 54 rows, then 1 + 6
        assert first.finish_reason == second.finish_reason == "length"


def test_each_stops_for_itself(model):
    asked = prompts(12)
    free = [model.generate(p, 20, 2, **GREEDY) for p in asked]
    stops = {free[0][len(asked[0]) + 3], free[5][len(asked[5]) + 9]}
    want = [model.generate(p, 20, 2, temperature=0.0, stop_tokens=stops) for p in asked]
    assert len({len(w) - len(p) for w, p in zip(want, asked, strict=True)}) > 1
    assert model.generate_batch(asked, 20, 2, temperature=0.0, stop_tokens=stops) == want


def test_a_seed_for_each_or_one_for_all(model):
    p = prompts(3)[1]
    how = {"loops": 2, "temperature": 50.0, "top_k": 0, "stop_tokens": ()}  # hot: random weights are sure of themselves
    assert model.generate_batch([p] * 3, 10, seed=5, **how) == [model.generate(p, 10, seed=5, **how)] * 3
    for seeds in ([1, 2, 3], (1, 2, 3), np.array([1, 2, 3])):
        assert model.generate_batch([p] * 3, 10, seed=seeds, **how) == [model.generate(p, 10, seed=s, **how) for s in (1, 2, 3)]
    assert len({tuple(out) for out in model.generate_batch([p] * 3, 10, **how)}) == 3
    mixed = model.generate_batch([p] * 2, 10, seed=[4, None], **how)
    assert mixed[0] == model.generate(p, 10, seed=4, **how) != mixed[1]


def test_prompts_of_every_kind_are_taken(model):
    asked = [[1, 2, 3], (4, 5), np.array([6, 7, 8], np.int64), range(5)]
    want = [model.generate(p, 4, **GREEDY) for p in asked]
    assert model.generate_batch(asked, 4, **GREEDY) == want
    assert model.generate_batch(iter(asked), 4, **GREEDY) == want
    square = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert model.generate_batch(square, 4, **GREEDY) == [model.generate(p, 4, **GREEDY) for p in square]
    assert model.generate_batch([], 4) == []
    assert model.generate_batch([[1, 2], [3]], 0) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"prompts": [[1], []]}, ValueError, r"prompts\[1\] is empty"),
        ({"prompts": [[1], [2, 259]]}, ValueError, r"prompts\[1\]\[1\] is 259"),
        ({"prompts": [1, 2, 3]}, TypeError, r"prompts\[0\] must be a 1-D"),
        ({"prompts": ["ab"]}, TypeError, r"prompts\[0\] must be token ids"),
        ({"prompts": "ab"}, TypeError, "prompts must be a sequence of prompts, got str"),
        ({"prompts": None}, TypeError, "prompts must be a sequence of prompts, got NoneType"),
        ({"prompts": [[1]] * 3 + [[1] * 150]}, RuntimeError, r"prompts\[3\]'s 150 tokens and max_tokens = 12 exceed max_seq_len = 160"),
        ({"seed": [1, 2]}, ValueError, "seed has 2 seeds for 3 prompts"),
        ({"seed": [1, 2, -1]}, ValueError, "seed is -1"),
        ({"seed": "abc"}, TypeError, "seed"),
        ({"pool": []}, TypeError, "pool must be a PrefixPool, got list"),
        ({"namespace": 1}, TypeError, "namespace"),
        ({"temperature": -1.0}, ValueError, "temperature"),
    ],
)
def test_every_prompt_is_checked_before_any_work(model, arguments, error, text):
    with Fault(model, 10**9) as pages, pytest.raises(error, match=text):
        model.generate_batch(**{"prompts": prompts(3), "max_tokens": 12, **arguments})
    assert pages.taken == 0 and model.kv_nbytes == 0


def test_a_closed_model(backend):
    model = open_model(backend)
    model.close()
    with pytest.raises(RuntimeError, match=r"^tinyloop.Model is closed; cannot call generate_batch$"):
        model.generate_batch([[1]])


# ---- memory and failures


def test_what_the_budget_has_no_room_for_waits(backend):
    asked = prompts(13)
    with open_model(backend, "shipped", "bf16", max_seq_len=160) as plain:
        want, page = [plain.generate(p, 12, **GREEDY) for p in asked], page_nbytes(plain)
    for n_pages in (7, 10, 20):  # the longest, of 102 positions, needs 7
        with open_model(backend, "shipped", "bf16", max_seq_len=160, kv_budget=n_pages * page) as model:
            assert model.generate_batch(asked, 12, **GREEDY) == want
            assert model._engine.plan.store.peak_nbytes <= n_pages * page and model.kv_nbytes == 0
    with open_model(backend, "shipped", "bf16", max_seq_len=160, kv_budget=6 * page) as model:
        with pytest.raises(tl.OutOfMemoryError, match=r"^out of memory"):
            model.generate_batch(asked, 12, **GREEDY)
        assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0


def test_one_that_fails_leaves_the_others_as_they_are(model):
    asked = prompts(9)
    want = [model.generate(p, 12, 2, **GREEDY) for p in asked]
    with Fault(model, 10**9) as pages:
        model.generate_batch(asked, 12, 2, **GREEDY)
    for nth in range(1, pages.taken + 1, 5):
        live = [model._start(p, 12, 2, run_prompt=False, **GREEDY) for p in asked]
        with Fault(model, nth):
            while any(g.finish_reason is None for g in live):
                step_generations(live)
        failed = [i for i, g in enumerate(live) if g.error is not None]
        assert len(failed) == 1 and isinstance(live[failed[0]].error, tl.OutOfMemoryError)
        assert live[failed[0]].finish_reason == "cancelled"
        assert all(g.all_tokens() == w for g, w in zip(live, want, strict=True) if g.error is None)
        assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0
        with Fault(model, nth), pytest.raises(tl.OutOfMemoryError, match="injected"):
            model.generate_batch(asked, 12, 2, **GREEDY)
        assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0
    assert model.generate_batch(asked, 12, 2, **GREEDY) == want


def test_a_hit_that_fails_while_it_is_prepared_starts_again_without_or_waits(model):
    """It waits where it has no memory while others are at work, which will give some back."""
    asked = prompts(6)
    pool = tl.PrefixPool()
    for p in asked:
        model.register_prefix(pool, p[: len(p) // 2 + 1], 2)
    want, held = [model.generate(p, 3, 2, **GREEDY) for p in asked], model.kv_nbytes
    with Fault(model, 10**9) as pages:
        model.generate_batch(asked, 0, 2, pool=pool)
    seen = set()
    for nth in range(1, pages.taken + 1):
        before = pool.stats()
        with Fault(model, nth):
            assert model.generate_batch(asked, 3, 2, pool=pool, **GREEDY) == want
        after = pool.stats()
        seen.add((after.fallbacks - before.fallbacks, after.hits - before.hits, after.queries - before.queries))
        assert model.kv_nbytes == held
    assert seen == {(1, 5, 6), (0, 6, 6)}


def test_idle_entries_of_an_lru_pool_go_for_a_batch(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=160) as plain:
        page, asked = page_nbytes(plain), prompts(6)
        want = [plain.generate(p, 12, **GREEDY) for p in asked]
    with open_model(backend, "shipped", "bf16", max_seq_len=160, kv_budget=12 * page) as model:
        pool = tl.PrefixPool(eviction="lru")
        for seed in range(5):
            model.register_prefix(pool, random_tokens(model.config, 32, seed=seed + 50))
        assert model.generate_batch(asked, 12, pool=pool, **GREEDY) == want
        assert 0 < pool.stats().evictions <= 5


def test_a_generation_is_in_one_step_at_a_time(model):
    """What another thread does to one that is in a step: refused, or left to the step's end."""
    g, seen = model._start([1, 2, 3], 50, run_prompt=False, **GREEDY), []

    def meddle(part):
        for act in (lambda: step_generations([g]), lambda: next(g)):
            with pytest.raises(RuntimeError, match="stepped by another thread"):
                act()
        g.close()
        seen.append(g.finish_reason)

    store = model._engine.plan.store
    store.fault = meddle
    try:
        assert step_generations([g]) == [None]
    finally:
        store.fault = None
    assert seen and set(seen) == {None} and g.finish_reason == "cancelled" and model.kv_nbytes == 0
    assert step_generations([g]) == [None]


def test_an_interrupt_frees_all(backend):
    with open_model(backend, "shipped", max_seq_len=50_000) as model:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            model.generate_batch(prompts(5), 40_000, stop_tokens=())
            pytest.fail("the call ended before the interrupt")
        assert model.kv_nbytes == 0
        assert model.generate_batch([[1, 2]], 3, **GREEDY) == [model.generate([1, 2], 3, **GREEDY)]


def test_batches_of_several_threads_get_their_serial_answers(model):
    sets = [prompts(13)[i : i + 5] for i in range(4)]
    want = [[model.generate(p, 10, 2, **SEEDED) for p in asked] for asked in sets]
    got, errors = {}, []

    def work(i):
        try:
            for round_ in range(3):
                got[i, round_] = model.generate_batch(sets[i], 10, 2, **SEEDED) == want[i]
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors and len(got) == 12 and all(got.values()) and model.kv_nbytes == 0
