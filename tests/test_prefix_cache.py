"""PrefixCache: one prefix in the caller's hands, used any number of times."""

import gc
import threading

import numpy as np
import pytest
from models import CONFIGS, random_tokens
from runtime import Fault, open_model, page_nbytes

import tinyloop_py as tl

TOKENS = random_tokens(CONFIGS["shipped"], 100)
GREEDY = {"temperature": 0.0, "stop_tokens": ()}
SEEDED = {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.1, "logit_bias": {3: 2.0}, "seed": 5, "stop_tokens": ()}


@pytest.fixture
def model(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=256) as model:
        yield model


@pytest.mark.parametrize("n", [1, 15, 16, 17, 64, 65, 100])
@pytest.mark.parametrize(("loops", "window"), [(None, 0), (2, 0), (3, 20)])
def test_a_cache_gives_what_generate_gives(model, n, loops, window):
    with model.build_prefix_cache(TOKENS[:n], loops, window) as cache:
        assert (cache.tokens.tolist(), len(cache), cache.loops, cache.cache_window) == (TOKENS[:n].tolist(), n, loops or 8, window)
        suffix = random_tokens(model.config, 23, seed=4)
        for end in (None, [], suffix, suffix[:1].tolist()):
            prompt = TOKENS[:n] if end is None else np.concatenate([TOKENS[:n], np.asarray(end, np.int32)])
            for how in (GREEDY, SEEDED):
                want = model.generate(prompt, 12, loops, cache_window=window, **how)
                assert model.generate_from_prefix_cache(cache, 12, suffix=end, **how) == want
                with model.stream_from_prefix_cache(cache, 12, suffix=end, logprobs=2, **how) as stream:
                    assert stream.cached_tokens == n
                    assert prompt.tolist() + list(stream) == want
                    assert [record.token for record in stream.logprobs] == want[len(prompt) :]
    assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0


def test_no_row_runs_where_the_whole_prompt_is_cached(model):
    cache = model.build_prefix_cache(TOKENS[:96])  # six full pages
    want = int(model.logits(TOKENS[:96], last_only=True).argmax())
    with Fault(model, 1) as pages:  # a row would need a page
        assert model.generate_from_prefix_cache(cache, 1, **GREEDY) == [*TOKENS[:96].tolist(), want]
    assert pages.taken == 0


def test_memory(model):
    page, hidden = page_nbytes(model), (model.config.default_loops + 1) * model.config.dim * 4
    cache = model.build_prefix_cache(TOKENS)
    assert model.kv_nbytes == 7 * page and cache.nbytes == 7 * page + hidden
    model._engine.plan.store.reset_peak()
    model.generate_from_prefix_cache(cache, 20, **GREEDY)  # positions 100..118: a copy of page 6, and page 7
    assert model._engine.plan.store.peak_nbytes == 9 * page and model.kv_nbytes == 7 * page
    cache.close()
    assert model.kv_nbytes == 0 and cache.nbytes == 0 and cache.closed
    cache.close()
    other = model.build_prefix_cache(TOKENS)
    del other
    gc.collect()
    assert model.kv_nbytes == 0


def test_many_streams_at_once_share_the_pages(model):
    cache = model.build_prefix_cache(TOKENS[:96])
    ends = [random_tokens(model.config, 1 + i, seed=i) for i in range(6)]
    want = [model.generate(np.concatenate([TOKENS[:96], end]), 10, **SEEDED)[96 + len(end) :] for end in ends]
    streams = [model.stream_from_prefix_cache(cache, 10, suffix=end, **SEEDED) for end in ends]
    assert model.kv_nbytes == 12 * page_nbytes(model)  # six shared, and one of its own for each
    outs = [[next(stream) for stream in streams] for _ in range(10)]
    assert [list(out) for out in zip(*outs, strict=True)] == want


def test_closing_a_cache_in_use_lets_its_calls_end(model):
    cache = model.build_prefix_cache(TOKENS[:50])
    want = model.generate(TOKENS[:50], 10, **SEEDED)[50:]
    stream = model.stream_from_prefix_cache(cache, 10, **SEEDED)
    out = [next(stream)]
    cache.close()
    assert model.kv_nbytes > 0
    assert out + list(stream) == want
    assert model.kv_nbytes == 0
    for call in (model.generate_from_prefix_cache, model.stream_from_prefix_cache):
        with pytest.raises(RuntimeError, match="the prefix cache is closed; build it again"):
            call(cache)


def test_the_callers_array_is_copied_and_the_caches_is_read_only(model):
    mine = TOKENS[:20].copy()
    cache = model.build_prefix_cache(mine)
    mine[:] = 0
    assert cache.tokens.tolist() == TOKENS[:20].tolist()
    with pytest.raises(ValueError, match="read-only"):
        cache.tokens[0] = 1


def test_another_models_cache_is_refused(backend):
    with open_model(backend, "shipped", "bf16") as model, open_model(backend, "shipped", "bf16", kv_mode="fp32") as other:
        cache = model.build_prefix_cache(TOKENS)
        for call in (other.generate_from_prefix_cache, other.stream_from_prefix_cache):
            with pytest.raises(ValueError, match=r"built by another model \(.*fp16.*\) than this one \(.*fp32.*\)"):
                call(cache)
        assert other.kv_nbytes == 0 and len(model.generate_from_prefix_cache(cache, 2, **GREEDY)) == 102


def test_a_closed_model(backend):
    model = open_model(backend, "shipped", "bf16")
    cache = model.build_prefix_cache(TOKENS)
    model.close()
    assert cache.closed and cache.nbytes == 0
    for name, arguments in (("build_prefix_cache", ([1],)), ("generate_from_prefix_cache", (cache,)), ("stream_from_prefix_cache", (cache,))):
        with pytest.raises(RuntimeError, match=f"^tinyloop.Model is closed; cannot call {name}$"):
            getattr(model, name)(*arguments)
    cache.close()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"tokens": []}, ValueError, "tokens is empty"), ({"tokens": [259]}, ValueError, r"tokens\[0\] is 259"),
        ({"tokens": None}, TypeError, "tokens"),
        ({"tokens": [1] * 257}, RuntimeError, "257 tokens and max_tokens = 0 exceed max_seq_len = 256"), ({"loops": 9}, ValueError, "loops"),
        ({"cache_window": -1}, ValueError, "cache_window"),
    ],
)  # fmt: skip
def test_building_errors(model, arguments, error, text):
    with pytest.raises(error, match=text):
        model.build_prefix_cache(**{"tokens": TOKENS, **arguments})
    assert model.kv_nbytes == 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"cache": None}, TypeError, "cache must be a PrefixCache, got NoneType"), ({"suffix": [1, 300]}, ValueError, r"suffix\[1\] is 300"),
        ({"suffix": "ab"}, TypeError, "suffix must be token ids"), ({"max_tokens": 157}, RuntimeError, "100 tokens and max_tokens = 157 exceed"),
        ({"suffix": [1] * 150, "max_tokens": 7}, RuntimeError, "250 tokens and max_tokens = 7 exceed"),
        ({"temperature": -1}, ValueError, "temperature"),
    ],
)  # fmt: skip
def test_calling_errors(model, arguments, error, text):
    cache = model.build_prefix_cache(TOKENS)
    held = model.kv_nbytes
    with pytest.raises(error, match=text):
        model.generate_from_prefix_cache(**{"cache": cache, **arguments})
    assert model.kv_nbytes == held and len(model.generate_from_prefix_cache(cache, 3, **GREEDY)) == 103


def test_a_failure_leaves_the_cache_as_it_was(model):
    cache = model.build_prefix_cache(TOKENS)
    held, want = model.kv_nbytes, model.generate_from_prefix_cache(cache, 20, suffix=[5, 6, 7], **GREEDY)
    with Fault(model, 10**9) as pages:
        model.generate_from_prefix_cache(cache, 20, suffix=[5, 6, 7], **GREEDY)
    for nth in range(1, pages.taken + 1):
        with Fault(model, nth), pytest.raises(tl.OutOfMemoryError):
            model.generate_from_prefix_cache(cache, 20, suffix=[5, 6, 7], **GREEDY)
        assert model.kv_nbytes == held and model._engine.plan.store.reserved_nbytes == 0
    assert model.generate_from_prefix_cache(cache, 20, suffix=[5, 6, 7], **GREEDY) == want


def test_threads_share_a_cache(model):
    cache = model.build_prefix_cache(TOKENS)
    ends = [random_tokens(model.config, 3 + i, seed=i) for i in range(6)]
    want = [model.generate_from_prefix_cache(cache, 12, suffix=end, **SEEDED) for end in ends]
    wrong = []

    def work(i):
        for _ in range(4):
            try:
                if model.generate_from_prefix_cache(cache, 12, suffix=ends[i], **SEEDED) != want[i]:
                    wrong.append(i)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
