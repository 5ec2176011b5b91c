"""Rows that step together on CUDA, ahead of the host: how they begin, leave and wait, and what errors leave of them.

That a batch equals one at a time is test_batch.py's. Counters of allocations and launches are the emulator's.
"""

import asyncio
import itertools
import sys
import time

import emulated_cuda
import numpy as np
import pytest
from engine_runs import ask, plain, run
from faults import PageFault
from models import CONFIGS, random_tokens
from runtime import backends, open_model
from serving import tiny_model

import tinyloop_py as tl
from tinyloop_py.lockstep import step_generations

pytestmark = pytest.mark.skipif("cuda" not in backends(), reason="no CUDA device, and TINYLOOP_TEST_BACKENDS does not name cuda-emulated")
DRAWN = {"temperature": 0.9, "top_k": 30, "repetition_penalty": 1.1, "seed": 7, "stop_tokens": ()}
AHEAD = 4  # steps of several rows that are launched before their tokens are asked for


def prompts(n):
    return [random_tokens(CONFIGS["shipped"], 3 + 5 * i, seed=i) for i in range(n)]


@pytest.fixture
def model():
    with open_model("cuda", "shipped", "bf16", max_seq_len=96) as model:
        yield model


def started(model, asked, n_new, **how):
    """Generations whose prompts have run: each has drawn one token."""
    generations = [model._start(p, n_new, 1, run_prompt=False, **DRAWN | how) for p in asked]
    while any(t is None for t in step_generations(generations)):
        pass
    return generations


def alone(model, asked, n_new, **how):
    return [model.generate(p, n_new, 1, **DRAWN | how) for p in asked]


def finish(generations):
    while any(g.finish_reason is None for g in generations):
        step_generations(generations)
    return [g.all_tokens() for g in generations]


def test_a_warm_batch_allocates_nothing_and_launches_one_graph_a_step(emulated, model):
    asked = prompts(5)
    want = model.generate_batch(asked, 14, 1, **DRAWN)
    calls, graphs, launched = emulated.n_calls, emulated.n_instantiated, emulated.n_launched
    assert model.generate_batch(asked[:4], 14, 1, **DRAWN) == want[:4]
    assert emulated.n_instantiated == graphs + 1  # of four rows; five had eight
    calls, graphs, launched = emulated.n_calls, emulated.n_instantiated, emulated.n_launched
    for n in (5, 4):
        assert model.generate_batch(asked[:n], 14, 1, **DRAWN) == want[:n]
    assert (emulated.n_calls, emulated.n_instantiated) == (calls, graphs)
    assert emulated.n_launched == launched + 2 * 13  # a prompt's last row draws the first token
    assert want == alone(model, asked, 14)


def test_steps_are_ahead_of_what_was_taken(emulated, model):
    batch = started(model, prompts(3), 20)
    launched = emulated.n_launched
    step_generations(batch)
    assert emulated.n_launched == launched + AHEAD
    for _ in range(3):
        step_generations(batch)
    assert emulated.n_launched == launched + AHEAD + 3
    for g in batch:
        g.close()


def test_one_that_comes_to_others_begins_with_them_when_what_was_ahead_is_taken(model):
    asked = prompts(4)
    want = alone(model, asked, 16)
    batch = started(model, asked[:3], 16)
    step_generations(batch)
    [late] = started(model, asked[3:], 16)
    drew = [[t is not None for t in step_generations([*batch, late])] for _ in range(AHEAD + 2)]
    assert all(all(row[:3]) for row in drew)
    assert [row[3] for row in drew] == [False] * (AHEAD - 1) + [True] * 3
    assert finish([*batch, late]) == want


def test_a_prompt_among_them_shares_its_steps_once_what_was_ahead_is_taken(model):
    asked = [*prompts(3), random_tokens(CONFIGS["shipped"], 80, seed=9)]
    want = alone(model, asked, 12)
    batch = started(model, asked[:3], 12)
    step_generations(batch)
    batch.append(model._start(asked[3], 12, 1, run_prompt=False, **DRAWN))
    for _ in range(6):
        assert all(t is not None for t in step_generations(batch, 8)[:3])
    assert finish(batch) == want


def test_rows_that_stop_leave_the_others_a_smaller_lane(model):
    asked = prompts(5)
    hot = DRAWN | {"temperature": 50.0, "top_k": 0}  # else random weights repeat themselves
    free = alone(model, asked, 24, **hot)
    hot["stop_tokens"] = tuple({free[i][len(asked[i]) + 3 + 4 * i] for i in range(4)})
    want = alone(model, asked, 24, **hot)
    assert len({len(w) - len(p) for w, p in zip(want, asked, strict=True)}) > 2
    assert model.generate_batch(asked, 24, 1, **hot) == want


def test_what_a_cancelled_row_had_launched_disturbs_nobody(model):
    asked, other = prompts(4), random_tokens(CONFIGS["shipped"], 60, seed=5)
    want, others = alone(model, asked, 20), model.generate(other, 20, 2, **DRAWN)
    for n in (1, 2, 6):
        batch = started(model, asked, 20)
        for _ in range(n):
            step_generations(batch)
        held = model.kv_nbytes
        batch[1].close()
        assert model.kv_nbytes < held
        assert model.generate(other, 20, 2, **DRAWN) == others  # on the pages that it had
        assert finish([g for g in batch if g is not batch[1]]) == [want[0], want[2], want[3]]
        assert batch[1].all_tokens() == want[1][: len(asked[1]) + 1 + n]
        assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0


def test_a_row_whose_generation_is_dropped_leaves(emulated, model):
    asked = prompts(4)
    want = alone(model, asked, 20)
    batch = started(model, asked, 20)
    step_generations(batch)
    held, calls = model.kv_nbytes, emulated.n_calls
    batch.pop()
    assert model.kv_nbytes < held
    assert finish(batch) == want[:3]
    assert model.generate_batch(asked, 20, 1, **DRAWN) == want and emulated.n_calls == calls  # its lane came back


def test_any_part_of_them_may_be_stepped_together_or_alone(model):
    asked = prompts(4)
    want, rng = alone(model, asked, 20), np.random.default_rng(3)
    batch = started(model, asked, 20)
    for turn in range(24):
        some = [g for g in batch if rng.random() < 0.7]
        if turn % 5 == 4 and some:
            next(some[0], None)
        else:
            step_generations(some)
    assert finish(batch) == want


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_one_that_lacks_a_page_fails_alone(model, nth):
    asked = prompts(4)
    want = alone(model, asked, 24)
    batch = started(model, asked, 24)
    with PageFault(model, nth) as fault:
        got = finish(batch)
    assert fault.taken >= nth
    failed = [g for g in batch if g.error is not None]
    assert len(failed) == 1 and isinstance(failed[0].error, tl.OutOfMemoryError) and failed[0].finish_reason == "cancelled"
    assert [t for t, g in zip(got, batch, strict=True) if g.error is None] == [w for w, g in zip(want, batch, strict=True) if g.error is None]
    assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0


def test_without_memory_for_rows_ahead_they_step_as_the_host_asks(emulated, model, monkeypatch):
    asked = prompts(3)
    want = alone(model, asked, 12)
    batch = started(model, asked, 12)
    runtime, pin = sys.modules["cuda.bindings.runtime"], []

    def no_memory(nbytes, flags):
        pin.append(nbytes)
        return emulated_cuda.Status.outOfMemory, None

    monkeypatch.setattr(runtime, "cudaHostAlloc", no_memory)
    launched = emulated.n_launched
    for _ in range(3):
        step_generations(batch)
    assert len(pin) >= 3
    monkeypatch.undo()
    assert finish(batch) == want and emulated.n_launched > launched


def test_a_failed_launch_fails_the_step_and_leaves_all_as_they_were(emulated, model, monkeypatch):
    asked = prompts(3)
    want = alone(model, asked, 16)
    batch = started(model, asked, 16)
    step_generations(batch)
    monkeypatch.setattr(emulated, "launch", lambda graph, stream: emulated_cuda.Status.invalidValue)
    before = [g.n_tokens for g in batch]
    with pytest.raises(RuntimeError, match="CUDA failed at launching a graph: invalidValue"):
        step_generations(batch)
    assert [g.n_tokens for g in batch] == before and all(g.finish_reason is None for g in batch)
    monkeypatch.undo()
    assert finish(batch) == want


def test_a_token_is_waited_for_while_the_device_works(emulated, model, monkeypatch):
    asked = prompts(1)[0]
    want = model.generate(asked, 12, 1, **DRAWN)
    launch, later, asked_for = emulated.launch, [], itertools.count(1)

    def run_later(graph, stream):
        later.append((graph, stream))
        return emulated_cuda.Status.success

    def work(stream):  # done when it was asked for the third time
        if later and next(asked_for) % 3:
            return emulated_cuda.Status.notReady
        while later:
            launch(*later.pop(0))
        return emulated_cuda.Status.success

    monkeypatch.setattr(emulated, "launch", run_later)
    monkeypatch.setattr(emulated, "query", work)
    generation = model._start(asked, 12, 1, **DRAWN)
    assert list(generation) == want[len(asked) :]
    assert next(asked_for) > 3


def test_long_steps_have_fewer_of_them_ahead(emulated, model, monkeypatch):
    """Who comes next waits for all that is launched."""
    asked = prompts(2)
    want = [model.generate(p, 20, 1, **DRAWN) for p in asked]
    launch, later, ahead = emulated.launch, [], []

    def run_later(graph, stream):
        later.append((graph, stream))
        ahead.append(len(later))
        return emulated_cuda.Status.success

    def work(stream):
        if later:
            time.sleep(0.005)  # a step's time, more than what covers a late host
            launch(*later.pop(0))
        return emulated_cuda.Status.notReady if later else emulated_cuda.Status.success

    batch = [model._start(p, 20, 1, **DRAWN) for p in asked]  # prompts are run by then
    monkeypatch.setattr(emulated, "launch", run_later)
    monkeypatch.setattr(emulated, "query", work)
    assert finish(batch) == want
    assert max(ahead[:4]) == AHEAD and max(ahead[-8:]) == 2


def test_a_token_that_never_comes_is_an_error(emulated, model, monkeypatch):
    asked = prompts(1)[0]
    want = model.generate(asked, 12, 1, **DRAWN)
    monkeypatch.setattr(emulated, "launch", lambda graph, stream: emulated_cuda.Status.success)
    with pytest.raises(RuntimeError, match="the device is done and a token is missing"):
        model.generate(asked, 12, 1, **DRAWN)
    monkeypatch.undo()
    assert model.generate(asked, 12, 1, **DRAWN) == want


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_what_a_launch_that_failed_draws_is_nobodys(emulated, model, monkeypatch, nth):
    asked = prompts(2)
    want = model.generate(asked[1], 20, 1, **DRAWN)
    launch, n_launches = emulated.launch, itertools.count(1)

    def launch_and_fail(graph, stream):  # the driver may tell of work before this one
        launch(graph, stream)
        return emulated_cuda.Status.invalidValue if next(n_launches) == nth else emulated_cuda.Status.success

    monkeypatch.setattr(emulated, "launch", launch_and_fail)
    with pytest.raises(RuntimeError, match="launching a graph"):
        model.generate(asked[0], 20, 1, **DRAWN)
    monkeypatch.undo()

    runtime, later = sys.modules["cuda.bindings.runtime"], []

    def run_all(*_):
        while later:
            later.pop(0)()
        return (emulated_cuda.Status.success,)

    # As on a device: nothing before the host asks for a token, and then in order.
    monkeypatch.setattr(emulated, "launch", lambda *args: later.append(lambda: launch(*args)) or emulated_cuda.Status.success)
    for name in ("cudaMemcpyAsync", "cudaMemsetAsync"):
        call = getattr(runtime, name)
        monkeypatch.setattr(runtime, name, lambda *args, call=call: later.append(lambda: call(*args)) or (emulated_cuda.Status.success,))
    for name in ("cudaStreamQuery", "cudaStreamSynchronize", "cudaEventSynchronize"):
        monkeypatch.setattr(runtime, name, run_all)
    assert model.generate(asked[1], 20, 1, **DRAWN) == want


def test_what_is_ahead_of_a_closed_model_is_not_drawn(model):
    batch, [single] = started(model, prompts(3), 20), started(model, prompts(1), 20)
    step_generations(batch)
    next(single)
    model.close()
    for draw in (lambda: step_generations(batch), lambda: next(single)):
        with pytest.raises(RuntimeError, match="is closed"):
            draw()


def test_an_output_among_others_that_is_kept_is_the_prefix_of_its_tokens(model):
    asked = prompts(3)
    batch = started(model, asked, 12)
    batch[1].hold = True
    finish(batch)
    kept = batch[1].keep()
    want = model._engine.build_prefix(np.array(batch[1].all_tokens(), np.int32), 1, 0)
    assert np.asarray(kept.final_x).tobytes() == np.asarray(want.final_x).tobytes()
    batch[1].close()


def test_beams_and_logits_repeat_a_graph_for_each_number_of_rows(emulated, model):
    def search():
        return [beam.tokens for beam in model.beam_search(prompts(2)[1], 3, 8, 1, stop_tokens=())]

    def scored():
        with model.generate_stream(prompts(1)[0], 6, 1, temperature=0.0, logprobs=1, stop_tokens=()) as stream:
            return list(stream), [(p.logprob, p.top) for p in stream.logprobs]

    first = search(), scored(), search(), scored()
    graphs, launched, calls = emulated.n_instantiated, emulated.n_launched, emulated.n_calls
    assert (search(), scored()) == first[:2] == first[2:]
    assert (emulated.n_instantiated, emulated.n_calls) == (graphs, calls)
    assert emulated.n_launched >= launched + 7 + 5


def test_the_servers_answers_equal_generate_in_any_company():
    requests = [ask(n, 9, seed=i, loops=1 + i % 2) for i, n in enumerate((1, 15, 40, 17, 33))]
    model = tl.Model(tiny_model(), 64, device="cuda")

    async def work(engine):
        return await asyncio.gather(*(engine.submit(request).collect() for request in requests))

    outputs = run(model, work, max_running=4, prefill_rows=16)
    assert [o[0].tokens for o in outputs] == [plain(model, request) for request in requests]
    model.close()


@pytest.mark.parametrize(("device", "n_turns"), [("cpu", 4), ("cuda", 1)])
def test_a_server_runs_longer_parts_of_prompts_on_a_gpu(device, n_turns):
    turns = []

    async def work(engine):
        engine.on_turn = lambda seconds, n_rows: turns.append(n_rows)
        await engine.submit(ask(500, 1)).collect()

    with tl.Model(tiny_model(), 512, device=device, threads=1) as model:
        run(model, work)
    assert len(turns) == n_turns
