"""Engine without HTTP, when something is in the way: full queues, deadlines, no memory, failing steps, a dead worker, the end."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from engine_runs import GREEDY, ask, held_steps, plain, prompt, run
from serving import tiny_model

import tinyloop_py as tl
from tinyloop_py.serve import Engine, GenerationRequest, ServeError
from tinyloop_py.serve.runner import Runner


@pytest.fixture
def model():
    with tl.Model(tiny_model(), 512, device="cpu", threads=1) as model:
        yield model


@pytest.fixture
def held():
    with held_steps() as held:
        yield held


def test_a_deadline_ends_requests_at_work_and_waiting(model, held):
    async def work(engine):
        streams = [engine.submit(ask(5, 500, deadline=0.003)) for _ in range(2)]
        for stream in streams:
            with pytest.raises(ServeError, match="deadline") as raised:
                await stream.collect()
            assert raised.value.status == 504
        held.open()
        [output] = await engine.submit(ask(5, 3)).collect()
        assert len(output.tokens) == 3

    run(model, work, max_running=1)


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


def test_a_killed_worker_fails_everybody_and_nobody_hangs(model, monkeypatch):
    from tinyloop_py.serve import runner

    gate = threading.Event()

    def killed(generations, rows):
        assert gate.wait(60)
        raise SystemExit  # here, as one that is thrown into the thread may land where nothing can be raised

    monkeypatch.setattr(runner, "step_generations", killed)

    async def main():
        async with Engine(model, tl.PrefixPool(4), max_running=1) as engine:
            running, queued = engine.submit(ask(5, 400)), engine.submit(ask(5, 400))
            while not engine.n_running:
                await asyncio.sleep(0)
            build = asyncio.ensure_future(engine.register("t", None, prompt(400)))
            await asyncio.sleep(0)
            assert engine.alive
            gate.set()
            for work in (running.collect(), queued.collect(), build):
                with pytest.raises(ServeError) as raised:
                    await asyncio.wait_for(work, 60)
                assert raised.value.status == 503
            assert not engine.alive and "died" in engine.problem
            with pytest.raises(ServeError):
                engine.submit(ask(5, 5))

    asyncio.run(main())


def test_draining_finishes_what_runs_and_refuses_what_comes(model, held):
    async def main():
        async with Engine(model) as engine:
            stream = engine.submit(ask(5, 30))
            drained = asyncio.ensure_future(engine.drain(60))
            await asyncio.sleep(0)
            with pytest.raises(ServeError) as raised:
                engine.submit(ask(5, 5))
            assert raised.value.status == 503
            held.allow(30)
            assert len((await stream.collect())[0].tokens) == 30
            await drained
            endless = GenerationRequest(prompt(5), 500, sampling=GREEDY, stop_tokens=())
            engine._draining = False
            stream = engine.submit(endless)
            held.allow(1)
            await stream.__anext__()
            await engine.drain(0)
            with pytest.raises(ServeError, match="shutting down"):
                await stream.collect()
            held.open()

    asyncio.run(main())


def test_registrations_wait_in_turn_and_too_many_are_refused(model):
    async def work(engine):
        builds = [asyncio.ensure_future(engine.register(tenant, tenant, prompt(200, seed))) for seed, tenant in enumerate("aab")]
        await asyncio.sleep(0)
        assert len(engine._prefixes) == 3 and engine._prefixes.n_waiting == 3
        with pytest.raises(ServeError) as raised:
            await engine.register("b", "b", prompt(200, 3))
        assert raised.value.status == 429 and int(raised.value.headers()["retry-after"]) >= 1
        ended = []
        for build, name in zip(builds, ("a0", "a1", "b2"), strict=True):
            build.add_done_callback(lambda _, name=name: ended.append(name))
        assert await asyncio.gather(*builds) == [0, 0, 0]
        assert ended == ["a0", "b2", "a1"] and len(engine._prefixes) == 0  # one at a time, tenants taking turns

    run(model, work, tl.PrefixPool(4), max_running=1, max_queued=3)


def test_a_registration_has_the_deadline_of_requests(model, held):
    async def work(engine):
        builds = [asyncio.ensure_future(engine.register("t", "t", prompt(400, seed))) for seed in range(2)]
        for build in builds:
            with pytest.raises(ServeError, match="deadline") as raised:
                await build
            assert raised.value.status == 504
        held.open()
        while len(engine._prefixes):
            await asyncio.sleep(0.001)
        assert engine.pool.size() == 0
        engine.deadline = None
        assert await engine.register("t", "t", prompt(40)) == 0

    run(model, work, tl.PrefixPool(4), max_running=1, deadline=0.003)


def test_a_registration_whose_client_leaves_while_it_waits_never_runs(model, held):
    async def work(engine):
        first, second = (asyncio.ensure_future(engine.register("t", "t", prompt(400, seed))) for seed in range(2))
        while engine._prefixes.n_waiting != 1:
            await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert engine._prefixes.n_waiting == 0 and len(engine._prefixes) == 1
        held.open()
        assert await first == 0 and engine.pool.size() == 1

    run(model, work, tl.PrefixPool(4), max_running=1)


def test_the_end_is_told_to_registrations_too(model):
    async def main():
        async with Engine(model, tl.PrefixPool(4), max_running=1) as engine:
            builds = [asyncio.ensure_future(engine.register("t", None, prompt(400, seed))) for seed in range(2)]
            await asyncio.sleep(0)
            await engine.drain(0)
            for build in builds:
                with pytest.raises(ServeError, match="shutting down") as raised:
                    await asyncio.wait_for(build, 20)
                assert raised.value.status == 503

    asyncio.run(main())
    assert model.kv_nbytes == 0


def test_a_stuck_worker_fails_all_that_wait_and_serves_again_when_it_comes_back(model, monkeypatch):
    from tinyloop_py.serve import runner

    real, stuck, gate = runner.step_generations, threading.Event(), threading.Event()

    def sticking(generations, rows):
        stuck.set()
        gate.wait(60)
        return real(generations, rows)

    async def main():
        pool = tl.PrefixPool(4)
        async with Engine(model, pool, max_running=1) as engine:
            await engine.submit(ask(5, 3)).collect()
            engine.stall_seconds = 0.3  # from here on, so that a slow machine alone makes nobody stuck
            monkeypatch.setattr(runner, "step_generations", sticking)
            running, queued = engine.submit(ask(5, 400)), engine.submit(ask(5, 400))
            build = asyncio.ensure_future(engine.register("t", None, prompt(400)))
            try:
                for work in (running.collect(), queued.collect(), build):
                    with pytest.raises(ServeError, match="stuck") as raised:
                        await asyncio.wait_for(work, 20)
                    assert raised.value.status == 503
                while engine.alive:  # the worker may have taken the turn a while after it was given it
                    await asyncio.sleep(0.01)
                assert stuck.is_set() and engine.n_waiting == 0
                with pytest.raises(ServeError, match="stuck"):
                    await engine.discard(None, prompt(400), 2)
            finally:
                engine.stall_seconds = 60.0
                gate.set()
            while not engine.alive or engine.n_running or len(engine._prefixes):
                await asyncio.sleep(0.01)
            [output] = await engine.submit(ask(5, 3)).collect()
            assert output.tokens == plain(model, ask(5, 3)) and not engine.failed
        pool.clear()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert model.kv_nbytes == 0


def test_a_long_stretch_of_short_turns_is_not_stuck(model, monkeypatch):
    from tinyloop_py.serve import runner, worker

    real, seconds, problems = runner.step_generations, 0.0, []
    monkeypatch.setattr(runner, "STRETCH_SECONDS", 1e9)
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: seconds))

    async def work(engine):
        def slow(generations, rows):
            nonlocal seconds
            seconds += 20.0  # of the 30 that a turn may take
            problems.append(engine.problem)
            return real(generations, rows)

        engine.stall_seconds = 30.0
        monkeypatch.setattr(runner, "step_generations", slow)
        [output] = await engine.submit(ask(5, 12)).collect()
        assert output.tokens == plain(model, ask(5, 12))
        assert len(problems) >= 12 and not any(problems)

    run(model, work)


def test_an_engine_with_a_stuck_turn_may_be_closed_twice(model, held):
    async def main():
        engine = await Engine(model, stall_seconds=0.2).start()
        stream = engine.submit(ask(5, 10))
        with pytest.raises(ServeError, match="stuck"):
            await stream.collect()
        for _ in range(2):
            await asyncio.wait_for(engine.close(), 30)
        assert engine.failed
        return engine._worker.thread

    thread = asyncio.run(main())
    held.open()
    thread.join(30)  # or the model would be closed under it
    assert not thread.is_alive()


def test_a_registration_whose_end_a_failed_turn_lost_is_told(model, monkeypatch):
    pool = tl.PrefixPool(4)

    def fail_at_the_end(*arguments):
        raise RuntimeError("injected")

    monkeypatch.setattr(Runner, "_end_task", fail_at_the_end)
    monkeypatch.setattr("tinyloop_py.serve.runner.STRETCH_SECONDS", 0.0)  # it was begun by a call before

    async def work(engine):
        with pytest.raises(ServeError) as raised:
            await asyncio.wait_for(engine.register("a", "a", prompt(200)), 30)
        assert raised.value.status == 500
        monkeypatch.undo()
        assert await engine.register("a", "a", prompt(200)) == 200
        assert len(engine._prefixes) == 0

    run(model, work, pool, prefill_rows=16)


def test_registrations_that_a_close_cut_off_hold_no_memory(model, held):
    pool = tl.PrefixPool(4)

    async def main():
        engine = await Engine(model, pool, prefill_rows=16).start()
        waiting = [asyncio.ensure_future(engine.register("a", "a", prompt(200, seed))) for seed in range(2)]
        held.allow(3)
        while not model.kv_nbytes:
            await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)  # it has begun: a worker let go before could put the prefixes into the pool, which then holds them
        held.open()
        await closing
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, ServeError) and error.status == 503 for error in errors)
        assert model.kv_nbytes == 0
        return errors  # whose tracebacks hold what they were raised in

    assert asyncio.run(main())
