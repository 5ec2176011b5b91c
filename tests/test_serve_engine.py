"""Engine without HTTP: answers are those of generate, whatever their company; and what ends early leaves nothing behind."""

import asyncio
import ctypes

import numpy as np
import pytest
from serving import CONFIG, tiny_model

import tinyloop_py as tl
from tinyloop_py.serve import Engine, GenerationRequest, ServeError
from tinyloop_py.serve.requests import Sampling

RNG = np.random.default_rng(7)
GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def model():
    with tl.Model(tiny_model(), 512, device="cpu", threads=1) as model:
        yield model


def prompt(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, n]).integers(5, 261, n).tolist()


def ask(n_prompt: int = 20, max_tokens: int = 12, seed: int = 0, **fields) -> GenerationRequest:
    fields.setdefault("sampling", Sampling(seed=seed))
    fields.setdefault("stop_tokens", ())
    return GenerationRequest(prompt(n_prompt, seed), max_tokens, **fields)


def plain(model: tl.Model, request: GenerationRequest, index: int = 0) -> list[int]:
    s = request.sampling
    seed = None if s.seed is None else s.seed + index
    tokens = model.generate(request.tokens, request.max_tokens, request.loops, s.temperature, s.top_k, seed=seed, stop_tokens=request.stop_tokens)
    return tokens[len(request.tokens) :]


def run(model: tl.Model, work, pool: tl.PrefixPool | None = None, **options):
    """Run `work(engine)` on a started engine, and check that nothing is left at work or in memory."""

    async def main():
        async with Engine(model, pool, **options) as engine:
            result = await asyncio.wait_for(work(engine), 60)
            for _ in range(200):
                if not (engine.n_running or engine.n_waiting):
                    break
                await asyncio.sleep(0.01)
            assert engine.n_running == 0 and engine.n_waiting == 0
            return result

    result = asyncio.run(main())
    if pool is not None:
        pool._check()
        pool.clear()
    assert model.kv_nbytes == 0
    return result


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


def test_cancelling_frees_everything_within_two_steps(model):
    async def work(engine):
        steps = []
        engine.on_turn = lambda seconds, n_rows: steps.append(n_rows)
        stream = engine.submit(ask(20, 400))
        async for _ in stream:
            stream.cancel()
            n = len(steps)
            break
        while engine.n_running:
            await asyncio.sleep(0.001)
        assert len(steps) - n <= 2 and [piece async for piece in stream] == []
        assert model.kv_nbytes == 0
        [output] = await engine.submit(ask(20, 5)).collect()
        return output.tokens

    assert run(model, work) == plain(model, ask(20, 5))


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


def test_a_full_queue_refuses_with_429(model):
    async def work(engine):
        streams = [engine.submit(ask(5, 200)) for _ in range(3)]
        with pytest.raises(ServeError) as raised:
            engine.submit(ask(5, 200))
        for stream in streams:
            stream.cancel()
        return raised.value

    error = run(model, work, max_running=1, max_queued=3)
    assert error.status == 429 and int(error.headers()["retry-after"]) >= 1


def test_a_deadline_ends_requests_at_work_and_waiting(model):
    async def work(engine):
        streams = [engine.submit(ask(5, 500, deadline=0.05)) for _ in range(2)]
        for stream in streams:
            with pytest.raises(ServeError, match="deadline") as raised:
                await stream.collect()
            assert raised.value.status == 504
        [output] = await engine.submit(ask(5, 3)).collect()
        assert len(output.tokens) == 3

    run(model, work, max_running=1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tokens": []}, "empty"), ({"tokens": [1, 99999]}, "outside"), ({"tokens": [-1]}, "outside"), ({"tokens": [1] * 600}, "maximum context"),
        ({"tokens": [1], "max_tokens": 512}, "maximum context"), ({"tokens": [1], "loops": 5}, "loops"), ({"tokens": [1], "n": 99}, "n is 99"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_before_it_waits(model, fields, text):
    async def work(engine):
        with pytest.raises(ServeError, match=text) as raised:
            engine.submit(GenerationRequest(**fields))
        assert raised.value.status == 400 and engine.n_waiting == 0

    run(model, work)


def test_memory_that_is_short_makes_a_request_wait(model):
    with tl.Model(tiny_model(), 512, device="cpu", threads=1) as probe:
        generation = probe._start(prompt(20), 100, run_prompt=False)
        budget = int(probe._engine.kv_nbytes_for(121, 2, 0) * 1.6)
        generation.close()
    with tl.Model(tiny_model(), 512, device="cpu", threads=1, kv_budget=budget) as small:

        async def work(engine):
            requests = [ask(20, 100, seed=i) for i in range(4)]
            outputs = await asyncio.gather(*(engine.submit(request).collect() for request in requests))
            assert [o[0].tokens for o in outputs] == [plain(model, request) for request in requests]
            with pytest.raises(ServeError) as raised:
                await engine.submit(ask(20, 480)).collect()
            assert raised.value.status == 503 and "out of memory" in raised.value.message

        run(small, work)


def test_an_error_in_a_step_reaches_the_client_and_the_next_is_served(model, monkeypatch):
    from tinyloop_py.serve import runner

    real, failures = runner.step_generations, [RuntimeError("injected")]

    def failing(generations, rows):
        if failures:
            raise failures.pop()
        return real(generations, rows)

    monkeypatch.setattr(runner, "step_generations", failing)

    async def work(engine):
        with pytest.raises(ServeError) as raised:
            await engine.submit(ask(5, 5)).collect()
        assert raised.value.status == 500 and "injected" not in raised.value.message
        [output] = await engine.submit(ask(5, 5)).collect()
        return output.tokens

    assert run(model, work) == plain(model, ask(5, 5))


def test_a_fault_of_the_runner_itself_is_survived(model, monkeypatch):
    from tinyloop_py.serve.runner import Runner

    real, failures = Runner._step, [KeyError("injected")]

    def failing(self, result):
        if failures:
            raise failures.pop()
        return real(self, result)

    monkeypatch.setattr(Runner, "_step", failing)

    async def work(engine):
        with pytest.raises(ServeError) as raised:
            await engine.submit(ask(5, 5)).collect()
        assert raised.value.status == 500
        assert len((await engine.submit(ask(5, 5)).collect())[0].tokens) == 5

    run(model, work)


def test_a_killed_worker_fails_everybody_and_nobody_hangs(model):
    async def main():
        async with Engine(model, tl.PrefixPool(4), max_running=1) as engine:
            running, queued = engine.submit(ask(5, 400)), engine.submit(ask(5, 400))
            await running.__anext__()
            assert engine.alive
            build = asyncio.ensure_future(engine.register("t", None, prompt(400)))
            await asyncio.sleep(0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(engine._worker.thread.ident), ctypes.py_object(SystemExit))
            for work in (running.collect(), queued.collect(), build):
                with pytest.raises(ServeError) as raised:
                    await asyncio.wait_for(work, 20)
                assert raised.value.status == 503
            assert not engine.alive and "died" in engine.problem
            with pytest.raises(ServeError):
                engine.submit(ask(5, 5))

    asyncio.run(main())


def test_draining_finishes_what_runs_and_refuses_what_comes(model):
    async def main():
        async with Engine(model) as engine:
            stream = engine.submit(ask(5, 30))
            drained = asyncio.ensure_future(engine.drain(30))
            await asyncio.sleep(0)
            with pytest.raises(ServeError) as raised:
                engine.submit(ask(5, 5))
            assert raised.value.status == 503
            assert len((await stream.collect())[0].tokens) == 30
            await drained
            endless = GenerationRequest(prompt(5), 500, sampling=GREEDY, stop_tokens=())
            engine._draining = False
            stream = engine.submit(endless)
            await stream.__anext__()
            await engine.drain(0)
            with pytest.raises(ServeError, match="shutting down"):
                await stream.collect()

    asyncio.run(main())


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
