"""Engine without HTTP: what callers may ask for, and what is refused before it waits. Over HTTP schemas refuse the same."""

import asyncio
import math

import numpy as np
import pytest
from engine_runs import ask, held_steps, plain, prompt, run
from serving import tiny_model

import tinyloop_py as tl
from tinyloop_py.serve import Engine, GenerationRequest, ServeError


@pytest.fixture(scope="module")
def model():
    with tl.Model(tiny_model(), 512, device="cpu", threads=1) as model:
        yield model


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tokens": []}, "empty"), ({"tokens": [1, 99999]}, "outside"), ({"tokens": [-1]}, "outside"), ({"tokens": [1] * 600}, "maximum context"),
        ({"max_tokens": 512}, "maximum context"), ({"loops": 5}, "loops"), ({"n": 99}, "n is 99"),
        ({"tokens": "abc"}, "prompt"), ({"tokens": None}, "prompt"), ({"tokens": [1.5]}, "prompt"), ({"tokens": np.ones((1, 1), int)}, "prompt"),
        ({"tokens": [2**70]}, "prompt"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 2.0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"n": 1.0}, "n is 1.0"), ({"loops": "2"}, "loops"), ({"logprobs": -1}, "logprobs"), ({"logprobs": "1"}, "logprobs"),
        ({"stop": "ab"}, "stop"),
        ({"stop": ("",)}, "stop"), ({"stop": (1,)}, "stop"), ({"keep_first": -1}, "keep_first"), ({"keep_first": 20.5}, "keep_first"),
        ({"deadline": math.nan}, "deadline"), ({"deadline": -1}, "deadline"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_before_it_waits(model, fields, text):
    async def work(engine):
        with pytest.raises(ServeError, match=text) as raised:
            engine.submit(GenerationRequest(**{"tokens": [1], "max_tokens": 4, **fields}))
        assert raised.value.status == 400 and engine.n_waiting == 0
        for tokens in [fields["tokens"]] if "tokens" in fields else []:
            with pytest.raises(ServeError, match=text):
                await engine.register("a", None, tokens)

    run(model, work, tl.PrefixPool(4))


def test_a_deadline_may_be_far_away(model):
    async def work(engine):
        for deadline in (1e300, math.inf):
            [output] = await engine.submit(ask(5, 3, deadline=deadline)).collect()
            assert len(output.tokens) == 3

    run(model, work)


@pytest.mark.parametrize("kind", [tuple, np.array, lambda ids: np.array(ids, np.int32), lambda ids: memoryview(np.array(ids, np.int32))])
def test_a_prompt_is_any_sequence_of_ids(model, kind):
    request = ask(40, 5, keep_first=20)
    expected = plain(model, request)

    async def work(engine):
        for n in (1, 2):
            [output, *_] = await engine.submit(ask(40, 5, keep_first=20, n=n)).collect()
            [same, *_] = await engine.submit(GenerationRequest(kind(request.tokens), 5, n=n, **fields)).collect()
            assert output.tokens == same.tokens == expected

    fields = {"sampling": request.sampling, "stop_tokens": (), "keep_first": 20}
    run(model, work, tl.PrefixPool(8, eviction="lru"), auto_prefix=1000)


@pytest.mark.parametrize("token", [261, -1, 2**31 - 1, -(2**31)])
def test_a_turn_of_ids_that_the_model_has_not_is_not_kept(model, token):
    async def work(engine):
        for n in (20, 60):
            [output] = await engine.submit(ask(30, 4, keep_turn=lambda text, n=n: [token] * n)).collect()
            assert len(output.tokens) == 4
            while len(engine._prefixes):
                await asyncio.sleep(0.001)
        assert pool.size() == 0 and len(engine.auto) == 0

    pool = tl.PrefixPool(8, eviction="lru")
    run(model, work, pool, auto_prefix=1000)


def test_a_prompt_that_its_caller_writes_over_is_no_fault_of_memory(model):
    async def main():
        with held_steps() as held:
            async with Engine(model, pool, max_running=1, auto_prefix=1000) as engine:
                first, tokens = engine.submit(ask(30, 4)), np.array(prompt(30), np.int32)
                second = engine.submit(GenerationRequest(tokens, 4, keep_first=20))
                while not engine.n_running:
                    await asyncio.sleep(0.001)
                tokens[:] = 2**31 - 1
                held.open()
                await first.collect()
                with pytest.raises(ServeError) as raised:
                    await second.collect()
                assert raised.value.status == 400

    pool = tl.PrefixPool(8, eviction="lru")
    asyncio.run(asyncio.wait_for(main(), 60))
    pool.clear()


# ---- a queue that is full


@pytest.fixture
def held():
    with held_steps() as held:
        yield held


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


def test_a_full_queue_has_room_for_a_tenant_of_whom_fewer_wait(model, held):
    async def work(engine):
        many = [engine.submit(ask(5, 2, tenant="a")) for _ in range(4)]
        while not engine.n_running:
            await asyncio.sleep(0.001)
        many.append(engine.submit(ask(5, 2, tenant="a")))  # one runs, four wait
        others = [engine.submit(ask(5, 2, tenant="b")) for _ in range(2)]  # then it is two of each
        for tenant in "ab":
            with pytest.raises(ServeError, match="waiting already"):
                engine.submit(ask(5, 2, tenant=tenant))
        third = engine.submit(ask(5, 2, tenant="c"))
        assert engine.n_waiting == 4
        registering = [asyncio.ensure_future(engine.register(tenant, None, [70 + n] * 20)) for n, tenant in enumerate("aaaaab")]
        await asyncio.wait(registering, return_when=asyncio.FIRST_COMPLETED)
        held.open()
        ends = await asyncio.gather(*(stream.collect() for stream in [*many, *others, third]), *registering, return_exceptions=True)
        return [end.code if isinstance(end, ServeError) else "ok" for end in ends]

    ends = run(model, work, tl.PrefixPool(16), max_running=1, max_queued=4)
    assert ends[:2] == ["ok"] * 2 and ends[3:5] == ["queue_full"] * 2 and ends[5] == ends[7] == "ok" and ends[:8].count("queue_full") == 3
    assert ends[8:] == ["ok"] * 3 + ["queue_full"] * 2 + ["ok"]
