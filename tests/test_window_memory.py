"""Sliding windows: where every layer has one, a sequence holds its window, and one step's rows while a prompt runs."""

import numpy as np
import pytest
from models import CONFIGS, random_tokens
from runtime import open_model

import tinyloop_py as tl

GREEDY = {"temperature": 0.0, "stop_tokens": ()}
LENGTH, N_NEW = 700, 40  # two steps on the CPU, of up to 512 rows
CASES = [("shipped", 20, 20), ("huginn", 33, 33), ("mistral", 0, 5), ("mistral", 3, 3), ("mistral", 100, 5)]  # config, cache_window, what it comes to


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def windowed(request, backend):
    """(model, its cache_window, bytes of a window of one sequence, bytes of a window and a step, bytes of a page of all stages)."""
    name, window, effective = request.param
    with open_model(backend, name, "bf16", max_seq_len=1024) as model:
        loops = model.config.default_loops
        page = sum(s.page_nbytes * (loops if part == 2 else 1) for part, s in enumerate(model._engine.plan.store.spaces) if s)
        pages = -(-effective // 16) + 1 + pages_ahead(backend)
        yield model, window, pages * page, (pages + rows_of_step(model, LENGTH) // 16) * page, page


def pages_ahead(backend):
    """Pages ahead of the tokens that were taken: a GPU's are taken four at a time. Its up to 8 steps ahead come into what a window rounds up to."""
    return 0 if backend == "cpu" else 3


def rows_of_step(model, n_tokens):
    """Rows of the longest step of a prompt, in whole pages."""
    return -(-min(model._engine.max_rows, n_tokens) // 16) * 16


def prompt(model, n=LENGTH, seed=0):
    return random_tokens(model.config, n, seed=seed)


def peak(model, call):
    """The most bytes of KV in use during a call, beside what was held before it."""
    store, held = model._engine.plan.store, model.kv_nbytes
    store.reset_peak()
    call()
    return store.peak_nbytes - held


def test_one_call(windowed):
    model, window, _, extending, _ = windowed
    calls = (
        lambda: model.generate(prompt(model), N_NEW, cache_window=window, **GREEDY),
        lambda: model.logits(prompt(model), cache_window=window),
        lambda: model.logits(prompt(model), cache_window=window, last_only=True),
        lambda: list(model.generate_stream(prompt(model), N_NEW, cache_window=window, **GREEDY)),
    )
    for call in calls:
        assert 0 < peak(model, call) <= extending
        assert model.kv_nbytes == 0


def test_a_stream_holds_its_window(windowed):
    model, window, resident, _, _ = windowed
    stream = model.generate_stream(prompt(model), 100, cache_window=window, **GREEDY)
    for _ in stream:
        assert model.kv_nbytes <= resident


def test_a_batch_holds_a_window_for_each_and_one_step(windowed):
    model, window, resident, _, page = windowed
    asked = [prompt(model, n, seed=n) for n in (600, 33, 530, 700)]
    a_step = rows_of_step(model, sum(map(len, asked))) // 16 * page  # may have rows of several prompts
    want = [model.generate(p, N_NEW, cache_window=window, **GREEDY) for p in asked]
    assert peak(model, lambda: model.generate_batch(asked, N_NEW, cache_window=window, **GREEDY)) <= 4 * resident + a_step
    assert model.generate_batch(asked, N_NEW, cache_window=window, **GREEDY) == want


@pytest.mark.parametrize("n_prefix", [40, 512, 600, 699])
def test_a_prefix_longer_than_the_window_hits_and_holds_the_window(windowed, n_prefix):
    model, window, resident, extending, _ = windowed
    tokens, pool = prompt(model), tl.PrefixPool()
    want = model.generate(tokens, N_NEW, cache_window=window, **GREEDY)
    assert peak(model, lambda: model.register_prefix(pool, tokens[:n_prefix], cache_window=window)) <= extending
    assert model.kv_nbytes <= resident
    store = model._engine.plan.store
    store.reset_peak()
    assert model.generate_with_pool(pool, tokens, N_NEW, cache_window=window, **GREEDY) == want
    assert store.peak_nbytes <= resident + extending  # the entry's pages too
    assert (pool.stats().matched_tokens, pool.stats().prefilled_tokens) == (n_prefix, LENGTH - n_prefix)
    with model.generate_stream(tokens, 5, pool=pool, cache_window=window, **GREEDY) as stream:
        assert stream.cached_tokens == n_prefix and list(stream) == want[LENGTH : LENGTH + 5]
    assert model.generate_batch([tokens] * 3, N_NEW, cache_window=window, pool=pool, **GREEDY) == [want] * 3
    assert pool.stats().hits == 5


def test_prefixes_that_grow_out_of_each_other(windowed):
    model, window, resident, extending, _ = windowed
    tokens, pool = prompt(model), tl.PrefixPool()
    for n, end in enumerate(range(50, LENGTH, 37), 1):
        assert peak(model, lambda end=end: model.register_prefix(pool, tokens[:end], cache_window=window)) <= extending
        assert model.kv_nbytes <= n * resident
        if end > 50:
            assert pool.discard(model, tokens[: end - 37], cache_window=window)
            assert model.kv_nbytes <= resident  # what the older one alone held is gone
    assert model.generate_with_pool(pool, tokens, 5, cache_window=window, **GREEDY) == model.generate(tokens, 5, cache_window=window, **GREEDY)
    assert pool.stats().hits == 1


def test_a_call_on_a_cache_that_is_closed_lets_its_pages_go_one_by_one(windowed):
    model, window, resident, _, page = windowed
    tokens = prompt(model)
    want = model.generate(tokens, 100, cache_window=window, **GREEDY)
    cache = model.build_prefix_cache(tokens[:650], cache_window=window)
    assert model.kv_nbytes <= resident
    stream = model.stream_from_prefix_cache(cache, 100, suffix=tokens[650:], **GREEDY)
    cache.close()
    out = []
    for token in stream:
        out.append(token)
        assert model.kv_nbytes <= resident + page
    assert tokens.tolist() + out == want and model.kv_nbytes == 0


def test_a_budget_of_a_window_and_a_step_is_enough_for_any_length(backend):
    config = CONFIGS["shipped"]
    with open_model(backend, "shipped", "bf16", max_seq_len=2048) as plain:
        page = plain._engine.plan.store.spaces[2].page_nbytes * config.default_loops
        n_pages = 4 + pages_ahead(backend) + rows_of_step(plain, 1500) // 16
    with open_model(backend, "shipped", "bf16", max_seq_len=2048, kv_budget=n_pages * page) as model:
        tokens = random_tokens(config, 1500)
        assert len(model.generate(tokens, 100, cache_window=20, **GREEDY)) == 1600
        with pytest.raises(tl.OutOfMemoryError):
            model.generate(tokens, 100)
        with model.build_prefix_cache(tokens[:1000], cache_window=20) as cache:
            assert cache.nbytes <= 3 * page + (config.default_loops + 1) * config.dim * 4


def test_where_a_layer_is_full_its_part_is_kept_and_the_others_slide(backend):
    with open_model(backend, "zero_init", "bf16", max_seq_len=1024) as model:  # layer windows: prelude full, core 4 and full, coda 9
        prelude, coda, core = (s.page_nbytes for s in model._engine.plan.store.spaces)
        tokens = random_tokens(model.config, 600)
        with model.build_prefix_cache(tokens) as cache:
            hidden = 4 * model.config.dim * 4
            assert cache.nbytes == 38 * (prelude + 3 * core) + 1 * coda + hidden  # position 600 reads 592 to 600
            want = model.generate(tokens, 5, **GREEDY)
            assert model.generate_from_prefix_cache(cache, 5, **GREEDY) == want
        assert np.array_equal(model.logits(tokens, last_only=True), model.logits(tokens)[-1:])
