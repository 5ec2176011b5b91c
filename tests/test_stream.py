"""generate_stream: the tokens of generate one by one, and what ends a stream."""

import gc
import math
import os
import signal
import threading

import numpy as np
import pytest
from models import CONFIGS, random_tokens
from runtime import Fault, open_model, page_nbytes

import tinyloop_py as tl

PROMPT = random_tokens(CONFIGS["shipped"], 50)
GREEDY = {"temperature": 0.0, "stop_tokens": ()}
SEEDED = {"temperature": 0.9, "top_k": 30, "min_p": 0.02, "repetition_penalty": 1.1, "logit_bias": {3: 2.0}, "seed": 5, "stop_tokens": ()}


@pytest.fixture
def model(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=256) as model:
        yield model


@pytest.mark.parametrize("how", [GREEDY, SEEDED, {**SEEDED, "loops": 3}, {**SEEDED, "cache_window": 20}])
def test_a_stream_yields_the_new_tokens_of_generate(model, how):
    stream = model.generate_stream(PROMPT, 20, **how)
    assert iter(stream) is stream and stream.finish_reason is None
    out = list(stream)
    assert PROMPT.tolist() + out == model.generate(PROMPT, 20, **how)
    assert all(type(token) is int for token in out)
    assert (stream.finish_reason, stream.cached_tokens, stream.logprobs) == ("length", 0, [])
    assert next(stream, None) is None and model.kv_nbytes == 0


def test_a_stop_token_ends_it_and_is_yielded(model):
    free = model.generate(PROMPT, 20, **GREEDY)[50:]
    stop = free[7]
    with model.generate_stream(PROMPT, 20, temperature=0.0, stop_tokens=[stop]) as stream:
        assert list(stream) == free[: free.index(stop) + 1]
    assert stream.finish_reason == "stop"


def test_the_seed_of_a_stream_draws_it_again(model):
    how = {"temperature": 2.0, "top_k": 0, "stop_tokens": ()}
    streams = [model.generate_stream(PROMPT, 12, **how) for _ in range(2)]
    assert streams[0].seed != streams[1].seed
    for stream in streams:
        assert list(stream) == model.generate(PROMPT, 12, seed=stream.seed, **how)[50:]
    assert model.generate_stream(PROMPT, 1, seed=9).seed == 9


def test_no_tokens_asked(model):
    pool = tl.PrefixPool()
    stream = model.generate_stream(PROMPT, 0, pool=pool, logprobs=2)
    assert list(stream) == [] and stream.finish_reason == "length"
    assert pool.stats().prefilled_tokens == 50 and model.kv_nbytes == 0


@pytest.mark.parametrize("split", [1, 16, 33, 49, 50])
def test_a_pool_hit(model, split):
    pool = tl.PrefixPool()
    model.register_prefix(pool, PROMPT[:split])
    with model.generate_stream(PROMPT, 15, pool=pool, logprobs=1, **SEEDED) as stream:
        assert stream.cached_tokens == split
        assert PROMPT.tolist() + list(stream) == model.generate(PROMPT, 15, **SEEDED)
    assert (pool.stats().hits, pool.stats().matched_tokens, pool.stats().full_hits) == (1, split, int(split == 50))
    with model.generate_stream(PROMPT, 3, pool=pool, namespace="other") as other:
        assert other.cached_tokens == 0


def test_an_entry_evicted_while_a_stream_uses_it_changes_nothing(model):
    pool = tl.PrefixPool(capacity=1)
    model.register_prefix(pool, PROMPT[:40])
    want = model.generate(PROMPT, 30, **GREEDY)[50:]
    stream = model.generate_stream(PROMPT, 30, pool=pool, **GREEDY)
    out = [next(stream) for _ in range(3)]
    for seed in range(4):
        model.register_prefix(pool, random_tokens(model.config, 100, seed=seed))
    assert out + list(stream) == want
    pool.clear()
    assert model.kv_nbytes == 0


# ---- log-probabilities


@pytest.mark.parametrize("n_top", [1, 5, 259, 10_000])
def test_logprobs_are_of_the_models_own_distribution(model, n_top):
    stream = model.generate_stream(PROMPT, 10, logprobs=n_top, **SEEDED)
    out = []
    for n, token in enumerate(stream):
        assert len(stream.logprobs) == n + 1
        record = stream.logprobs[-1]
        logits = model.logits([*PROMPT, *out], last_only=True)[0].astype(np.float64)
        want = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
        out.append(token)
        assert record.token == token and record.logprob == pytest.approx(want[token], abs=1e-12)
        best = np.lexsort((np.arange(259), -want))[:n_top]
        assert [i for i, _ in record.top] == best.tolist()
        assert [p for _, p in record.top] == pytest.approx(want[best].tolist(), abs=1e-12)
    assert [record.token for record in stream.logprobs] == out == model.generate(PROMPT, 10, **SEEDED)[50:]


def test_logprobs_of_extreme_logits_are_finite_sums():
    from tinyloop_py.token_logprobs import token_logprobs

    logits = np.array([3e38, -3e38, 3e38, 0.0, 3e38], np.float32)
    record = token_logprobs(logits, 2, 2)
    assert record.logprob == pytest.approx(-math.log(3)) and record.top == ((0, record.logprob), (2, record.logprob))  # a tie: the lower ids
    assert token_logprobs(np.float32([0, 40]), 0, 0).logprob == pytest.approx(-40)
    assert token_logprobs(np.float32([0, 40]), 0, 0).top == ()


# ---- ending


def test_closing_frees_the_pages_and_ends_the_iteration(model):
    stream = model.generate_stream(PROMPT, 100, **GREEDY)
    next(stream)
    assert model.kv_nbytes == 4 * page_nbytes(model)
    stream.close()
    assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0
    assert stream.finish_reason == "cancelled" and list(stream) == []
    stream.close()
    assert stream.finish_reason == "cancelled"


def test_dropping_a_stream_or_leaving_its_block_frees_it(model):
    stream = model.generate_stream(PROMPT, 100, logprobs=2, **GREEDY)
    next(stream)
    del stream
    gc.collect()
    assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0
    with pytest.raises(ZeroDivisionError), model.generate_stream(PROMPT, 100, **GREEDY) as stream:
        next(stream)
        raise ZeroDivisionError
    assert stream.finish_reason == "cancelled" and model.kv_nbytes == 0
    for token in model.generate_stream(PROMPT, 100, **GREEDY):
        assert token >= 0
        break
    assert model.kv_nbytes == 0


def test_closing_after_the_end_keeps_the_reason(model):
    with model.generate_stream(PROMPT, 5, **GREEDY) as stream:
        list(stream)
    assert stream.finish_reason == "length"


def test_a_stream_of_a_closed_model_raises(backend):
    model = open_model(backend, "shipped", "bf16")
    pool = tl.PrefixPool()
    model.register_prefix(pool, PROMPT[:20])
    ended, running = model.generate_stream(PROMPT, 2, **GREEDY), model.generate_stream(PROMPT, 90, pool=pool, **GREEDY)
    assert len(list(ended)) == 2
    next(running)
    model.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^tinyloop.Model is closed; cannot call TokenStream.__next__$"):
            next(running)
    assert next(ended, None) is None
    running.close()
    assert running.finish_reason == "cancelled" and next(running, None) is None
    with pytest.raises(RuntimeError, match=r"^tinyloop.Model is closed; cannot call generate_stream$"):
        model.generate_stream(PROMPT)


def test_an_error_in_a_step_ends_the_stream(model):
    stream = model.generate_stream(PROMPT, 100, **GREEDY)
    out = [next(stream) for _ in range(3)]
    with Fault(model, 1), pytest.raises(tl.OutOfMemoryError, match="injected"):
        out += list(stream)
    assert stream.finish_reason == "cancelled" and next(stream, None) is None
    assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0
    assert list(model.generate_stream(PROMPT, 3, **GREEDY)) == out[:3]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"logprobs": -1}, ValueError, "logprobs must be at least 0, got -1"),
        ({"logprobs": True}, TypeError, "logprobs must be an integer, got bool"),
        ({"pool": 3}, TypeError, "pool must be a PrefixPool, got int"),
        ({"prompt": []}, ValueError, "prompt is empty"),
        ({"max_tokens": 300}, RuntimeError, "exceed max_seq_len = 256"),
        ({"seed": -1}, ValueError, "seed"),
    ],
)
def test_bad_arguments_leave_nothing(model, arguments, error, text):
    with pytest.raises(error, match=text):
        model.generate_stream(**{"prompt": PROMPT, "max_tokens": 5, **arguments})
    assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0


def test_an_interrupt_ends_the_stream(backend):
    with open_model(backend, "shipped", max_seq_len=100_000) as model:
        stream = model.generate_stream(PROMPT, 90_000, **GREEDY)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            for _ in stream:
                pass
            pytest.fail("the stream ended before the interrupt")
        # Python may notice the interrupt in the loop's own code; then the stream goes on, and closing it is the loop's affair.
        stream.close()
        assert stream.finish_reason == "cancelled" and model.kv_nbytes == 0


def test_an_interrupt_inside_a_step_frees_the_pages(model):
    stream = model.generate_stream(PROMPT, 100, **GREEDY)
    store = model._engine.plan.store
    store.fault = lambda part: os.kill(os.getpid(), signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    finally:
        store.fault = None
    assert stream.finish_reason == "cancelled" and model.kv_nbytes == 0 and store.reserved_nbytes == 0


# ---- several at once


def test_streams_interleave_with_each_other_and_with_other_calls(model):
    asked = [random_tokens(model.config, n, seed=n) for n in (3, 17, 40, 64)]
    want = [model.generate(p, 20, **SEEDED) for p in asked]
    streams = [model.generate_stream(p, 20, **SEEDED) for p in asked]
    outs = [p.tolist() for p in asked]
    for i in range(20):
        for out, stream in zip(outs, streams, strict=True):
            out.append(next(stream))
        assert model.generate(asked[i % 4], 20, **SEEDED) == want[i % 4]
    assert outs == want and model.kv_nbytes == 0


def test_streams_in_threads_get_their_serial_answers(model):
    pool = tl.PrefixPool(capacity=2, eviction="lru")
    asked = [np.concatenate([PROMPT[: 10 * (i % 4 + 1)], random_tokens(model.config, 5 + i, seed=i)]) for i in range(8)]
    want = [model.generate(p, 15, **SEEDED)[len(p) :] for p in asked]
    wrong, errors = [], []

    def work(i):
        try:
            for round_ in range(5):
                model.register_prefix(pool, PROMPT[: 10 * ((i + round_) % 4 + 1)])
                with model.generate_stream(asked[i], 15, pool=pool, **SEEDED) as stream:
                    n = 15 if round_ % 2 else 6  # every other one is left early
                    out = [token for _, token in zip(range(n), stream, strict=False)]
                if out != want[i][:n]:
                    wrong.append((i, round_))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and not errors
    pool.clear()
    assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0


def test_30_closing_from_another_thread_ends_the_work(backend):
    with open_model(backend, "shipped", max_seq_len=100_000) as model:
        stream, drawn, errors = model.generate_stream(PROMPT, 90_000, **GREEDY), threading.Event(), []

        def work():
            try:
                for _ in stream:
                    drawn.set()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        assert drawn.wait(60)
        stream.close()
        thread.join(60)
        assert not thread.is_alive() and not errors
        assert stream.finish_reason == "cancelled" and model.kv_nbytes == 0
        assert len(model.generate(PROMPT, 3, **GREEDY)) == 53


def test_a_forked_child_is_told_to_make_its_own_model(model):
    stream = model.generate_stream(PROMPT, 5, **GREEDY)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            next(stream)
            text = "no error"
        except RuntimeError as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"forked" in os.read(read, 1000)
    assert len(list(stream)) == 5


def test_logits_are_kept_from_the_first_token_on_or_not_at_all(model):
    generation = model._start(PROMPT, 5, **GREEDY)
    with pytest.raises(RuntimeError, match="keep_logits came after the prompt has run"):
        generation.keep_logits()
