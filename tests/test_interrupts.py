"""Signals, finalisers and other calls that come in the middle of one: nothing is lost, held back or taken for something else."""

import gc
import os
import signal
import sys
import threading

import numpy as np
import pytest
from models import random_tokens
from runtime import model_file, open_model, page_nbytes

import tinyloop_py as tl
from tinyloop_py.errors import BackendError
from tinyloop_py.model_file import open_model_file

GREEDY = {"temperature": 0.0, "stop_tokens": ()}
pytestmark = pytest.mark.usefixtures("small_heap")
CPU_ONLY = True  # what is tested here lies above the backends


@pytest.fixture
def model(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=160) as model:
        yield model


@pytest.fixture
def interrupt():
    """`interrupt(is_here)`: Ctrl-C at the first event of Python's profiler that `is_here(frame, event, arg)` accepts; returns what was raised."""
    before = sys.getprofile(), signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(call, is_here):
        armed = [call]

        def profile(frame, event, arg):
            if armed and frame is not here and is_here(frame, event, arg):
                armed.clear()
                signal.raise_signal(signal.SIGINT)

        here = sys._getframe()
        try:
            sys.setprofile(profile)
            call()
        except KeyboardInterrupt:
            return True
        finally:
            armed *= 0
            sys.setprofile(before[0])
        return False

    yield interrupted
    signal.signal(signal.SIGINT, before[1])


# ---- streams


def after_drawing(file):
    return lambda frame, event, arg: event == "c_return" and arg is next and frame.f_code.co_filename.endswith(file)


@pytest.mark.parametrize("logprobs", [0, 2])
def test_an_interrupt_that_takes_a_drawn_token_along_ends_the_stream(model, interrupt, logprobs):
    """It went on, one token short and without a sign, and its records no longer stood beside its tokens."""
    stream = model.generate_stream([1, 2, 3], 20, logprobs=logprobs, **GREEDY)
    got = [next(stream), next(stream)]
    assert interrupt(lambda: next(stream), after_drawing("token_stream.py"))
    assert stream.finish_reason == "cancelled" and list(stream) == [] and model.kv_nbytes == 0
    assert len(stream.logprobs) == (len(got) if logprobs else 0)


def test_an_interrupt_that_takes_text_along_ends_the_stream(interrupt):
    with tl.Model(tl.demo_model(), 64, device="cpu") as model:
        text = model.stream_text("Once upon", 20, temperature=0.0)
        assert next(text)
        assert interrupt(lambda: next(text), after_drawing("text_stream.py"))
        assert text.finish_reason == "cancelled" and list(text) == [] and model.kv_nbytes == 0


def test_a_stream_that_another_thread_steps_is_not_ended_by_who_asks_meanwhile(model):
    stream, seen = model.generate_stream([1, 2, 3], 20, **GREEDY), []
    want = model.generate([1, 2, 3], 20, **GREEDY)[3:]

    def meddle(part):
        with pytest.raises(RuntimeError, match="stepped by another thread"):
            next(stream)
        seen.append(stream.finish_reason)

    model._engine.plan.store.fault = meddle
    try:
        assert list(stream) == want
    finally:
        model._engine.plan.store.fault = None
    assert seen and set(seen) == {None}


# ---- closing


def opened(backend, n_pools=3):
    model = open_model(backend, "shipped", "bf16")
    pools = [tl.PrefixPool() for _ in range(n_pools)]
    for pool in pools:
        model.register_prefix(pool, [1, 2, 3])
    return model, pools, model.build_resume_handle([1, 2, 3])


def test_closing_again_after_an_interrupted_close_frees_the_rest(backend, interrupt):
    """The second close did nothing: weights, KV and the entries of pools stayed."""
    n = 0
    while True:
        model, pools, handle = opened(backend)
        left = [n]

        def is_here(frame, event, arg, left=left):
            left[0] -= event == "call"
            return left[0] < 0

        was_interrupted = interrupt(model.close, is_here)
        model.close()
        assert model.kv_nbytes == 0 and handle.closed and not any(pool.size() for pool in pools)
        n += 1
        if not was_interrupted:
            break
    assert n > 1


def test_a_pool_may_join_while_the_model_closes(backend):
    """Another thread's registration changed the set that closing went through, and closing gave up half way."""
    model, pools, handle = opened(backend)
    joined = []

    def join(frame, event, arg):
        if event == "call" and len(joined) < 50:
            joined.append(tl.PrefixPool())
            model._depend(joined[-1])

    before = sys.getprofile()
    sys.setprofile(join)
    try:
        model.close()
    finally:
        sys.setprofile(before)
    assert joined and model.kv_nbytes == 0 and handle.closed and not any(pool.size() for pool in pools)


# ---- files


def every_interrupt(interrupt, call, files):
    """Makes a call again and again with Ctrl-C at the n-th event in some files of code, for every n; yields after each until it was not reached."""
    n = -1
    was_interrupted = True
    while was_interrupted:
        n += 1
        left = [n]

        def is_here(frame, event, arg, left=left):
            if event not in ("call", "c_return") or arg in (
                os.open,
                os.dup,
            ):  # where handlers run; nobody has a new descriptor yet: a gap that Python leaves
                return False
            left[0] -= os.path.basename(frame.f_code.co_filename) in files  # their own, and what they call in C
            return left[0] < 0

        was_interrupted = interrupt(call, is_here)
        yield n
    assert n > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a handler that raises in a finaliser: Python says so and goes on
@pytest.mark.parametrize("nameless", [True, False])
@pytest.mark.parametrize("what", ["save", "load"])
def test_an_interrupt_at_any_place_of_a_save_or_load_leaves_nothing_behind(model, interrupt, tmp_path, monkeypatch, what, nameless):
    """It left the loaded pages in memory or descriptors open, or closed a descriptor twice, which meanwhile may be another file's."""
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    pool, folder = tl.PrefixPool(), tmp_path / "files"
    folder.mkdir()
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    model.register_prefix(pool, list(range(1, 40)), 2)
    pool.save(folder / "pool")
    held, descriptors = model.kv_nbytes, len(os.listdir("/proc/self/fd"))
    call = (lambda: pool.save(folder / "pool")) if what == "save" else (lambda: model.load_pool(folder / "pool"))
    for n in every_interrupt(interrupt, call, ("tensor_file.py", "atomic_file.py")):
        gc.collect()
        assert model.kv_nbytes == held and model._engine.plan.store.reserved_nbytes == 0, n
        assert len(os.listdir("/proc/self/fd")) == descriptors, n
        assert os.listdir(folder) == ["pool"], n
    assert model.load_pool(folder / "pool").size() == 1


def test_an_interrupt_while_a_model_file_is_opened_leaves_no_descriptor(interrupt):
    path, descriptors = model_file("loop_bare"), len(os.listdir("/proc/self/fd"))
    for n in every_interrupt(interrupt, lambda: open_model_file(path).close(), ("model_file.py",)):
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == descriptors, n


# ---- calls from inside a step


@pytest.mark.parametrize("call", ["generate", "generate_batch", "beam_search", "logits", "build_prefix_cache"])
def test_a_call_from_inside_a_step_is_refused(model, call):
    """A finaliser or a handler that ran inside a step waited for that step's end, for ever."""
    prompt, raised = [[1, 2, 3]] if call == "generate_batch" else [1, 2, 3], []

    def call_again(part):
        store.fault = None
        try:
            getattr(model, call)(prompt)
        except RuntimeError as error:
            raised.append(str(error))

    def work():
        store.fault = call_again
        done.append(model.generate([4, 5], 3, **GREEDY))

    store, done, want = model._engine.plan.store, [], model.generate([4, 5], 3, **GREEDY)
    thread = threading.Thread(target=work, daemon=True)  # before it was mended, it never ended
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and done == [want]
    assert len(raised) == 1 and "inside one of its own steps" in raised[0]
    assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0


def test_closing_from_inside_a_step_ends_the_call_and_closing_again_frees(backend):
    model, pools, _ = opened(backend)
    raised = []

    def close(part):
        model._engine.plan.store.fault = None
        model.close()

    def work():
        model._engine.plan.store.fault = close
        try:
            model.generate([4, 5], 3, **GREEDY)
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and len(raised) == 1 and "closed" in raised[0]
    model.close()
    assert model.kv_nbytes == 0 and not any(pool.size() for pool in pools)


def test_the_collector_does_not_wake_under_the_lock_of_a_batch(model):
    """What it ran could not call the model: the step that it ran in held the lock."""

    class Caller:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            if not calling:
                calling.append(self)
                try:
                    results.append(model.generate([1, 2], 1, **GREEDY))
                except RuntimeError as error:
                    results.append(error)
                finally:
                    calling.clear()

    calling, results, threshold = [], [], gc.get_threshold()
    want = [model.generate(p, 2, **GREEDY) for p in ([1, 2, 3], [4, 5])]
    try:
        for n in range(80):  # the n-th container that the call makes wakes it, up to 3.11; later Pythons wait for a bytecode
            gc.disable()
            gc.collect()
            Caller()
            gc.set_threshold(gc.get_count()[0] + n, 1, 1)
            gc.enable()
            assert model.generate_batch([[1, 2, 3], [4, 5]], 2, **GREEDY) == want
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
    gc.collect()
    assert len(results) == 80 and not [r for r in results if isinstance(r, Exception)]


# ---- what a handler raises


@pytest.mark.parametrize("error", [TimeoutError("enough"), RuntimeError("enough"), MemoryError("enough"), tl.OutOfMemoryError("enough")], ids=repr)
def test_what_a_handler_raises_is_no_failure_of_a_hit_whatever_its_kind(backend, error):
    """An error of the kinds that a hit itself fails with was answered by running the whole prompt, or cost the pool its entries."""

    def limit(*_):
        raise error

    with open_model(backend, "shipped", "bf16", max_seq_len=40_000) as model:
        pool, prompt = tl.PrefixPool(eviction="lru"), random_tokens(model.config, 30_000)
        model.register_prefix(pool, prompt[:40])
        model.register_prefix(pool, [7, 8, 9])
        held, before = model.kv_nbytes, signal.signal(signal.SIGALRM, limit)
        try:
            for call in (
                model.generate_with_pool,
                lambda pool, p, n: model.generate_batch([p], n, pool=pool),
                lambda pool, p, n: model.build_resume_handle(p, pool=pool),
                lambda pool, p, n: model.register_prefix(pool, p),
                lambda pool, p, n: model.beam_search(p, 2, n, pool=pool),
            ):
                signal.setitimer(signal.ITIMER_REAL, 0.01)  # whatever runs 30,000 tokens has begun by then, and not ended
                with pytest.raises(type(error), match="enough"):
                    call(pool, prompt, 5)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        stats = pool.stats()
        assert stats.fallbacks == stats.queries == stats.evictions == 0 and pool.size() == 2 and model.kv_nbytes == held


@pytest.mark.parametrize("error", [BackendError("broken"), MemoryError(), tl.OutOfMemoryError("out of memory: injected")], ids=repr)
def test_a_failure_of_the_work_is_one_of_the_hit(model, error):
    pool, prompt = tl.PrefixPool(), random_tokens(model.config, 60)
    model.register_prefix(pool, prompt[:40])
    want, calls = model.generate(prompt, 4, **GREEDY), []

    def fail(part):
        calls.append(part)
        if len(calls) == 1:
            raise error

    model._engine.plan.store.fault = fail
    try:
        assert model.generate_with_pool(pool, prompt, 4, **GREEDY) == want
        calls.clear()
        with model.build_resume_handle(prompt, pool=pool) as handle:
            assert model.resume_generate(handle, max_tokens=4, **GREEDY) == want
    finally:
        model._engine.plan.store.fault = None
    assert (pool.stats().fallbacks, pool.stats().hits, pool.stats().misses) == (2, 0, 2)


# ---- prompts that wait


@pytest.mark.parametrize("eviction", ["shortest", "lru"])
def test_prompts_of_a_batch_that_wait_for_room_keep_their_hit(backend, eviction):
    """Each try counted a fallback; under lru it evicted the very entry that the prompt began with, and the rest of the batch missed."""
    with open_model(backend, "shipped", "bf16") as plain:
        page = page_nbytes(plain)
    with open_model(backend, "shipped", "bf16", kv_budget=9 * page) as model:
        pool, prefix = tl.PrefixPool(eviction=eviction), np.arange(1, 41)
        model.register_prefix(pool, prefix)
        prompts = [np.r_[prefix, [i + 50, 7]] for i in range(6)]
        want = [model.generate(p, 8, **GREEDY) for p in prompts]
        assert model.generate_batch(prompts, 8, pool=pool, **GREEDY) == want
        stats = pool.stats()
        assert (stats.queries, stats.hits, stats.fallbacks, stats.evictions) == (6, 6, 0, 0)


def test_a_fallback_is_counted_where_the_plain_run_answered(backend):
    with open_model(backend, "shipped", "bf16") as plain:
        page = page_nbytes(plain)
    with open_model(backend, "shipped", "bf16", kv_budget=4 * page) as model:
        pool = tl.PrefixPool()
        model.register_prefix(pool, list(range(1, 33)))
        for call in (model.generate_with_pool, lambda pool, p, n: model.generate_batch([p], n, pool=pool)):
            with pytest.raises(tl.OutOfMemoryError):
                call(pool, list(range(1, 41)), 60)
        assert (pool.stats().queries, pool.stats().fallbacks, pool.size()) == (0, 0, 1)
