"""Engine without HTTP: answers are those of generate, whatever their company; and what ends early leaves nothing behind."""

import asyncio
import threading
import time

import numpy as np
import pytest
from engine_runs import GREEDY, ask, plain, prompt, run
from serving import CONFIG, tiny_model

import tinyloop_py as tl
from tinyloop_py.serve import Engine, GenerationRequest, runner


@pytest.fixture
def model():
    with tl.Model(tiny_model(), 512, device="cpu", threads=1) as model:
        yield model


def test_answers_equal_generate_in_any_company(model):
    requests = [ask(n, 9, seed=i, loops=1 + i % 4) for i, n in enumerate((1, 15, 16, 17, 100, 200, 3, 64, 65, 31))]

    async def work(engine):
        return await asyncio.gather(*(engine.submit(request).collect() for request in requests))

    outputs = run(model, work, max_running=4, prefill_rows=16)
    assert [o[0].tokens for o in outputs] == [plain(model, request) for request in requests]
    assert all(o[0].finish_reason == "length" for o in outputs)


def test_several_outputs_share_a_prompt_and_differ_by_seed(model):
    request = ask(70, 8, seed=3, n=3)

    async def work(engine):
        stream = engine.submit(request)
        return await stream.collect(), stream.n_cached

    for pool in (None, tl.PrefixPool(8)):
        outputs, n_cached = run(model, work, pool)
        assert [o.tokens for o in outputs] == [plain(model, request, index) for index in range(3)]
        assert n_cached == 0 and len({tuple(o.tokens) for o in outputs}) == 3


def test_a_hit_is_reported_and_changes_nothing(model):
    pool = tl.PrefixPool(8)
    request = ask(40, 8, seed=1, namespace="a")
    model.register_prefix(pool, request.tokens[:33], namespace="a")

    async def work(engine):
        streams = [engine.submit(request), engine.submit(ask(40, 8, seed=1, namespace="b"))]
        return [(await stream.collect())[0].tokens for stream in streams], [stream.n_cached for stream in streams]

    tokens, cached = run(model, work, pool)
    assert tokens == [plain(model, request)] * 2 and cached == [33, 0]


def test_register_runs_in_parts_and_equals_register_prefix(model):
    pool, other = tl.PrefixPool(8), tl.PrefixPool(8)
    tokens = prompt(131)

    async def work(engine):
        assert await engine.register("t", "n", tokens, pin=True) == 0
        assert await engine.register("t", "n", tokens) == 131
        stream = engine.submit(GenerationRequest([*tokens, 7], 6, sampling=GREEDY, stop_tokens=(), namespace="n"))
        [output] = await stream.collect()
        assert pool.entries()[0].pinned and stream.n_cached == 131
        assert not await engine.discard("other", tokens, 2) and await engine.discard("n", tokens, 2)
        return output.tokens

    drawn = run(model, work, pool, prefill_rows=16)
    model.register_prefix(other, tokens)
    assert drawn == model.generate_with_pool(other, [*tokens, 7], 6, temperature=0.0, stop_tokens=())[132:]


def test_a_closed_models_prefixes_leave_the_pool():
    pool = tl.PrefixPool(8)

    async def main():
        with tl.Model(tiny_model(), 512, device="cpu", threads=1) as model:
            async with Engine(model, pool) as engine:
                await engine.register("t", "n", prompt(40))
            assert pool.size() == 1

    asyncio.run(main())
    assert pool.size() == 0


@pytest.mark.skipif(not hasattr(tl.PrefixPool, "save"), reason="this build cannot save pools")
def test_an_engines_pool_is_saved_and_loaded(tmp_path):
    from tinyloop_py.serve.service import Service
    from tinyloop_py.serve.settings import Settings

    fixed = {"max_seq_len": 512, "device": "cpu", "threads": 1, "auto_prefix": 1000}
    settings = Settings(str(tiny_model()), **fixed, pool_capacity=7, pool_file=str(tmp_path / "pool"))

    async def live(work):
        service = Service(settings)
        service.begin_loading()
        await service.loaded()
        service.listened = True
        try:
            return await work(service)
        finally:
            await service.close()

    async def first(service):
        await service.engine.register("t", "t", prompt(40), pin=True)
        await service.engine.submit(ask(50, 8, seed=1, tenant="t", namespace="t/own")).collect()
        while len(service.engine._prefixes):
            await asyncio.sleep(0.01)
        return [(e.n_tokens, e.namespace, e.pinned) for e in service.pool.entries()]

    async def second(service):
        assert service.pool.capacity == 7 and service.engine.auto.n_tokens == 58
        stream = service.engine.submit(GenerationRequest([*prompt(40), 9], 4, stop_tokens=(), namespace="t"))
        await stream.collect()
        assert stream.n_cached == 40
        return [(e.n_tokens, e.namespace, e.pinned) for e in service.pool.entries()]

    saved = asyncio.run(live(first))
    assert saved == [(58, "t/own", False), (40, "t", True)]
    assert asyncio.run(live(second))[-2:] == saved
    (tmp_path / "pool").write_bytes(b"no pool")

    async def third(service):
        assert service.status == ("ok", "") and service.pool.size() == 0

    asyncio.run(live(third))


def test_stop_strings_end_an_output_and_are_not_shown(model):
    request = ask(20, 40, seed=5)
    text = model.tokenizer.decode([t for t in plain(model, request) if t < 261])
    assert len(text) > 12
    stop = text[8:11]

    async def work(engine):
        pieces = [piece async for piece in engine.submit(ask(20, 40, seed=5, stop=(stop, "never this")))]
        return pieces

    pieces = run(model, work)
    shown = "".join(piece.text for piece in pieces)
    assert shown == text[: text.find(stop)] and pieces[-1].finish_reason == "stop"
    assert sum(len(piece.tokens) for piece in pieces) < 40


def counted_steps(monkeypatch):
    """A list that grows by the number of rows at every step, when the worker takes it."""
    steps, real = [], runner.step_generations

    def counting(generations, rows):
        steps.append(len(generations))
        return real(generations, rows)

    monkeypatch.setattr(runner, "step_generations", counting)
    return steps


def test_cancelling_frees_everything_within_two_steps(model, monkeypatch):
    steps = counted_steps(monkeypatch)

    async def work(engine):
        stream = engine.submit(ask(20, 400))
        async for _ in stream:
            stream.cancel()
            n = len(steps)
            break
        while engine.n_running:
            await asyncio.sleep(0.001)
        assert 1 <= n < 400 and len(steps) - n <= 2 and [piece async for piece in stream] == []
        assert model.kv_nbytes == 0
        [output] = await engine.submit(ask(20, 5)).collect()
        return output.tokens

    assert run(model, work) == plain(model, ask(20, 5))


def test_turns_follow_each_other_unless_the_event_loop_calls(model, monkeypatch):
    """The worker does not wait for the event loop between two tokens, yet who comes new, or asks for the lock, waits for one turn at most."""
    monkeypatch.setattr(runner, "STRETCH_SECONDS", 3600.0)
    steps, real, gate = [], runner.step_generations, threading.Event()

    def stepping(generations, rows):
        steps.append(len(generations))
        if len(steps) == 8:
            gate.wait(60)
        return real(generations, rows)

    monkeypatch.setattr(runner, "step_generations", stepping)

    async def work(engine):
        first = engine.submit(ask(20, 400))
        await first.__anext__()
        for _ in range(3000):  # the event loop does nothing meanwhile
            if len(steps) == 8:
                break
            time.sleep(0.01)
        assert len(steps) == 8
        second = engine.submit(ask(20, 5))
        dropped = asyncio.ensure_future(engine.discard(None, [1, 2, 3], 2))
        await asyncio.sleep(0)
        gate.set()
        assert not await dropped
        [output] = await second.collect()
        assert steps[8] == 2 and output.tokens == plain(model, ask(20, 5))
        first.cancel()

    run(model, work, tl.PrefixPool(4), max_running=2)


def test_cancelling_while_queued_or_in_a_prompt(model):
    async def work(engine):
        running = engine.submit(ask(20, 300))
        await running.__anext__()
        queued = engine.submit(ask(20, 300, seed=1))
        assert engine.n_waiting == 1
        queued.cancel()
        assert engine.n_waiting == 0
        running.cancel()
        long = engine.submit(ask(500, 2))
        while not engine.n_running:
            await asyncio.sleep(0)
        long.cancel()
        assert queued.n_cached == 0 and [piece async for piece in queued] == []

    run(model, work, max_running=1, prefill_rows=16)


def test_a_long_prompt_does_not_hold_up_the_others(model):
    async def work(engine):
        short = engine.submit(ask(10, 200))
        await short.__anext__()
        long = engine.submit(ask(480, 2, seed=1))
        first = asyncio.ensure_future(long.__anext__())
        n_between = 0
        async for _ in short:
            n_between += 1
            if first.done():
                break
        await first
        short.cancel()
        long.cancel()
        return n_between

    assert run(model, work, prefill_rows=16) >= 480 // 16 - 2  # one token between any two parts of the prompt


def test_a_prefix_build_does_not_hold_up_the_others(model):
    async def work(engine):
        stream = engine.submit(ask(10, 300))
        await stream.__anext__()
        build = asyncio.ensure_future(engine.register("t", None, prompt(480)))
        n_between = 0
        async for _ in stream:
            n_between += 1
            if build.done():
                break
        stream.cancel()
        return n_between

    assert run(model, work, tl.PrefixPool(4), prefill_rows=16) >= 480 // 16 - 2


def test_tenants_take_turns(model):
    async def work(engine):
        order = []

        async def one(tenant, seed):
            await engine.submit(ask(5, 4, seed=seed, tenant=tenant)).collect()
            order.append(tenant)

        first = engine.submit(ask(5, 30, tenant="many"))
        tasks = [asyncio.ensure_future(one("many", i)) for i in range(6)]
        await asyncio.sleep(0)
        tasks += [asyncio.ensure_future(one("few", i)) for i in range(2)]
        await first.collect()
        await asyncio.gather(*tasks)
        return order

    order = run(model, work, max_running=1)
    assert order.index("few") <= 1 and [i for i, tenant in enumerate(order) if tenant == "few"][1] <= 3


def test_logprobs_equal_logits(model):
    request = ask(12, 6, logprobs=3)

    async def work(engine):
        return await engine.submit(request).collect()

    [output] = run(model, work)
    assert [item.token for item in output.logprobs] == output.tokens
    for i, item in enumerate(output.logprobs):
        logits = model.logits([*request.tokens, *output.tokens[:i]], last_only=True)[0].astype(np.float64)
        logs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert item.logprob == pytest.approx(logs[item.token], abs=1e-9)
        assert [token for token, _ in item.top] == np.lexsort((np.arange(CONFIG.vocab_size), -logs))[:3].tolist()
