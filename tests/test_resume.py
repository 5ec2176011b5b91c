"""Resume handles: any depth from any other equals a run from scratch to the last bit, and no use changes the handle."""

import gc
import threading
import warnings

import numpy as np
import pytest
from faults import PageFault
from models import CONFIGS, random_tokens
from runtime import open_model, same_bits, same_kv

import tinyloop_py as tl
from tinyloop_py.kv_export import export_kv

GREEDY = {"temperature": 0.0, "stop_tokens": ()}
WITHOUT_CODA, WITH_CODA = "shipped", "huginn"
TOKENS = random_tokens(CONFIGS[WITH_CODA], 90)  # ids that every model here has

pytestmark = pytest.mark.filterwarnings("ignore:loops = .* is deeper")


@pytest.fixture(params=[WITHOUT_CODA, WITH_CODA])
def model(backend, request):
    with open_model(backend, request.param, max_seq_len=256) as model:
        yield model


def assert_same_prefix(model, got, want):
    """KV and hidden rows agree to the last bit."""
    assert (got.n_tokens, got.loops, got.window) == (want.n_tokens, want.loops, want.window)
    assert same_bits(np.asarray(got.final_x), np.asarray(want.final_x))
    assert same_bits(np.asarray(got.boundary_x), np.asarray(want.boundary_x))
    assert same_kv(select(export_kv(model._engine, got), got.loops), export_kv(model._engine, want))


def select(kv, loops):
    """Without the stages beyond a depth, which a shallower prefix shares and does not use."""
    return {stage: held for stage, held in kv.items() if stage < 2 + loops}


def assert_every_depth(model, tokens, built, depths, window=0):
    with model.build_resume_handle(tokens, built, window) as handle:
        for loops in depths:
            assert_same_prefix(model, handle._prefix_at(loops), model._engine.build_prefix(tokens, loops, window))
            want = model.generate(tokens, 6, loops, cache_window=window, **GREEDY)
            assert model.resume_generate(handle, loops, 6, **GREEDY) == want, f"from {built} to {loops}"
    assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0


# ---- bits


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_at_every_depth(backend, name):
    with open_model(backend, name, max_seq_len=100) as model:
        assert_every_depth(model, random_tokens(CONFIGS[name], 70), 2, (1, 2, 3, 4))


@pytest.mark.parametrize("name", ["ouro", WITH_CODA, "zero_init"])
@pytest.mark.parametrize("window", [0, 20])
def test_what_h_mode_holds_serves_every_depth(backend, name, window):
    """A handle holds operands; calls rebuild keys and values from them, and `extend` runs the prompt to hold those of the further loops."""
    with open_model(backend, name, "bf16", kv_mode="h", max_seq_len=100) as model, open_model(backend, name, "bf16", max_seq_len=100) as fp16:
        assert_every_depth(model, TOKENS[:70], 2, (1, 2, 4), window)
        handle = model.build_resume_handle(TOKENS[:70], 2, window)
        handle.extend(3)
        for loops in (1, 3, 4):
            want = fp16.generate(TOKENS[:70], 6, loops, cache_window=window, **GREEDY)
            assert model.resume_generate(handle, loops, 6, **GREEDY) == want


@pytest.mark.parametrize("kv_mode", ["fp16", "bf16", "fp32", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("name", [WITHOUT_CODA, WITH_CODA, "nanbeige_skip"])
def test_every_kv_mode(backend, name, dtype, kv_mode):
    with open_model(backend, name, dtype, kv_mode=kv_mode, max_seq_len=100) as model:
        assert_every_depth(model, random_tokens(CONFIGS[name], 50), 2, (1, 3))


@pytest.mark.parametrize("window", [1, 15, 17, 40, 100])
@pytest.mark.parametrize("name", [WITHOUT_CODA, WITH_CODA, "mixed_windows", "zero_init"])
def test_every_window(backend, name, window):
    with open_model(backend, name, "bf16", max_seq_len=150) as model:
        assert_every_depth(model, random_tokens(CONFIGS[name], 120), 2, (1, 2, 4), window)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("name", [WITHOUT_CODA, WITH_CODA, "retrofit_olmo"])
def test_prompts_of_several_steps(backend, name, window):
    """More tokens than one step runs."""
    with open_model(backend, name, "bf16", max_seq_len=1200) as model:
        assert_every_depth(model, random_tokens(CONFIGS[name], 1100), 1, (3,), window)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 32, 64, 65])
def test_prompts_around_pages(model, n):
    assert_every_depth(model, TOKENS[:n], 2, (1, 2, 3))


def test_draws_are_those_of_generate(model):
    settings = {"temperature": 1.2, "top_k": 20, "seed": 7, "repetition_penalty": 1.2, "stop_tokens": ()}
    handle = model.build_resume_handle(TOKENS, 2)
    for loops in (1, 2, 4):
        assert model.resume_generate(handle, loops, 20, **settings) == model.generate(TOKENS, 20, loops, **settings)


def test_depth_none_is_the_models_default(model):
    assert model.build_resume_handle(TOKENS).loops == model.config.default_loops
    handle = model.build_resume_handle(TOKENS, 1)
    assert model.resume_generate(handle, None, 5, **GREEDY) == model.generate(TOKENS, 5, **GREEDY)


# ---- what runs, and what is held


def test_deeper_runs_further_loops_only(model):
    handle = model.build_resume_handle(TOKENS, 2)
    model.resume_generate(handle, 4, 3, **GREEDY)
    assert handle.stats() == tl.ResumeStats(resumes=1, prefilled_tokens=0, extended_tokens=90, token_loops=180)


def test_the_same_depth_and_shallower_without_a_coda_run_nothing(backend):
    with open_model(backend, WITHOUT_CODA) as model:
        handle = model.build_resume_handle(TOKENS, 4)
        for loops in (4, 1, 3):
            model.resume_generate(handle, loops, 3, **GREEDY)
        assert handle.stats() == tl.ResumeStats(resumes=3)


def test_shallower_with_a_coda_runs_the_prompt_again_and_says_so(backend):
    with open_model(backend, WITH_CODA) as model:
        handle = model.build_resume_handle(TOKENS, 4)
        model.resume_generate(handle, 2, 3, **GREEDY)
        assert handle.stats() == tl.ResumeStats(resumes=1, prefilled_tokens=90, extended_tokens=0, token_loops=180)


@pytest.mark.parametrize(("name", "n_rows"), [(WITHOUT_CODA, 1), (WITH_CODA, 2), ("ouro", 1), ("zero_init", 2)])
def test_hidden_rows_are_counted(backend, name, n_rows):
    """x of every token, and e where loops inject what a prelude with layers gives."""
    with open_model(backend, name) as model:
        handle = model.build_resume_handle(TOKENS, 2)
        pages = handle._prefix_at(2)
        hidden = n_rows * 90 * model.config.dim * 4
        assert handle.nbytes == pages.nbytes + hidden
        last = (2 + 1) * model.config.dim * 4  # the last token's rows, which every prefix keeps in Python's memory
        assert model.kv_nbytes == handle.nbytes - last
        del pages
        handle.close()
        assert (handle.nbytes, model.kv_nbytes) == (0, 0)


def test_no_use_changes_the_handle(model):
    handle = model.build_resume_handle(TOKENS, 2)
    before = handle.nbytes, handle.loops, model.kv_nbytes, handle.tokens.tolist()
    want = [model.generate(TOKENS, 10, loops, **GREEDY) for loops in (1, 2, 3, 4)]
    for _ in range(3):
        assert [model.resume_generate(handle, loops, 10, **GREEDY) for loops in (1, 2, 3, 4)] == want
        assert (handle.nbytes, handle.loops, model.kv_nbytes, handle.tokens.tolist()) == before
    assert not handle.tokens.flags.writeable


def test_the_callers_array_is_copied(model):
    own = TOKENS.copy()
    handle = model.build_resume_handle(own, 1)
    own[:] = 0
    assert model.resume_generate(handle, 2, 5, **GREEDY) == model.generate(TOKENS, 5, 2, **GREEDY)


def test_a_deeper_use_shares_the_handles_pages(backend):
    with open_model(backend, "ouro") as model:
        handle = model.build_resume_handle(TOKENS[:64], 2)
        store, held = model._engine.plan.store, model.kv_nbytes
        store.reset_peak()
        model.resume_generate(handle, 3, 0, **GREEDY)
        assert store.peak_nbytes - held == 4 * store.spaces[2].page_nbytes  # four pages of one further loop
        assert model.kv_nbytes == held


def test_memory_is_bounded_by_the_window_while_loops_run_over_a_long_prompt(backend):
    with open_model(backend, WITHOUT_CODA, "bf16", max_seq_len=2048) as model:
        tokens = random_tokens(model.config, 2000)
        handle = model.build_resume_handle(tokens, 1, cache_window=32)
        store, held = model._engine.plan.store, model.kv_nbytes
        store.reset_peak()
        got = model.resume_generate(handle, 2, 4, **GREEDY)
        assert store.peak_nbytes - held < (model._engine.max_rows + 5 * 32) // 16 * store.spaces[2].page_nbytes * 2
        assert got == model.generate(tokens, 4, 2, cache_window=32, **GREEDY)


def test_a_pools_hit_serves_and_keeps_no_rows(model):
    pool = tl.PrefixPool()
    model.register_prefix(pool, TOKENS[:70], 2)
    handle = model.build_resume_handle(TOKENS, 2, pool=pool)
    stats = pool.stats()
    assert (stats.hits, stats.matched_tokens, stats.prefilled_tokens) == (1, 70, 20)
    for loops in (2, 4):
        assert model.resume_generate(handle, loops, 5, **GREEDY) == model.generate(TOKENS, 5, loops, **GREEDY)
    assert handle.stats() == tl.ResumeStats(resumes=2, prefilled_tokens=90, extended_tokens=0, token_loops=360)
    assert model.build_resume_handle(TOKENS, 2, pool=pool, namespace="other").nbytes > handle.nbytes  # a miss: with rows
    handle.extend(3)
    model.resume_generate(handle, 4, 5, **GREEDY)
    assert handle.stats().extended_tokens == 90


def test_extend_keeps_the_further_loops(model):
    handle = model.build_resume_handle(TOKENS, 1)
    handle.extend(3)
    assert handle.loops == 3
    handle.extend(2)  # no less than it holds
    assert handle.loops == 3
    ran = handle.stats()
    assert (ran.resumes, ran.extended_tokens, ran.token_loops) == (0, 90, 180)
    for loops in (1, 2, 3, 4):
        assert_same_prefix(model, handle._prefix_at(loops), model._engine.build_prefix(TOKENS, loops, 0))
        assert model.resume_generate(handle, loops, 5, **GREEDY) == model.generate(TOKENS, 5, loops, **GREEDY)
    handle.extend(4)
    assert model.resume_generate(handle, 4, 5, **GREEDY) == model.generate(TOKENS, 5, 4, **GREEDY)
    del handle
    gc.collect()
    assert model.kv_nbytes == 0


# ---- errors and ends


def test_arguments_are_checked(model):
    handle = model.build_resume_handle(TOKENS, 2)
    held = model.kv_nbytes
    for error, text, arguments in (
        (TypeError, "handle must be a ResumeHandle, got list", ([1, 2],)),
        (ValueError, "loops must be at most 8, got 9", (handle, 9)),
        (ValueError, "max_tokens", (handle, 2, -1)),
        (ValueError, "temperature", (handle, 2, 1, -1.0)),
        (RuntimeError, "max_seq_len", (handle, 2, 1000)),
    ):
        with pytest.raises(error, match=text):
            model.resume_generate(*arguments)
    for error, text, arguments in (
        (ValueError, "empty", ([],)),
        (ValueError, "token id", ([model.config.vocab_size],)),
        (ValueError, "loops", (TOKENS, 0)),
        (ValueError, "cache_window", (TOKENS, 1, -1)),
        (RuntimeError, "max_seq_len", (np.zeros(257, np.int32),)),
    ):
        with pytest.raises(error, match=text):
            model.build_resume_handle(*arguments)
    with pytest.raises(TypeError, match="pool must be a PrefixPool or None, got int"):
        model.build_resume_handle(TOKENS, pool=3)
    with pytest.raises(ValueError, match="loops must be at most 8, got 9"):
        handle.extend(9)
    with pytest.raises(TypeError, match="build_resume_handle"):
        tl.ResumeHandle()
    assert model.kv_nbytes == held and handle.stats() == tl.ResumeStats()


def test_a_handle_of_another_model_is_refused(backend):
    with open_model(backend) as model, open_model(backend) as twin:
        handle = model.build_resume_handle(TOKENS, 1)
        with pytest.raises(ValueError, match="belongs to another model"):
            twin.resume_generate(handle, 2)


def test_a_closed_handle_raises_and_holds_nothing(model):
    handle = model.build_resume_handle(TOKENS, 2)
    prefix = handle._prefix_at(3)  # a call under way
    handle.close()
    handle.close()
    assert handle.closed and model.kv_nbytes > 0
    for call in (lambda: model.resume_generate(handle, 2), lambda: handle.extend(3), handle.__enter__):
        with pytest.raises(RuntimeError, match="the resume handle is closed"):
            call()
    del prefix
    assert model.kv_nbytes == 0


def test_a_closed_models_handles_raise(backend):
    model = open_model(backend, WITH_CODA)
    handle = model.build_resume_handle(TOKENS, 2)
    model.close()
    assert handle.closed and handle.nbytes == 0
    with pytest.raises(RuntimeError, match="closed"):
        model.resume_generate(handle, 2)
    with pytest.raises(RuntimeError, match="closed"):
        handle.extend(3)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("action", ["build", "deeper", "shallower", "extend"])
def test_a_failure_at_every_page_loses_nothing(model, action, window):
    handle = model.build_resume_handle(TOKENS, 2, window)
    want = {loops: model.generate(TOKENS, 5, loops, cache_window=window, **GREEDY) for loops in (1, 2, 4)}
    held, store = model.kv_nbytes, model._engine.plan.store
    calls = {
        "build": lambda: model.build_resume_handle(TOKENS, 2, window).close(),
        "deeper": lambda: model.resume_generate(handle, 4, 5, **GREEDY),
        "shallower": lambda: model.resume_generate(handle, 1, 5, **GREEDY),
        "extend": lambda: model.build_resume_handle(TOKENS, 1, window).extend(2),
    }
    with PageFault(model) as count:
        calls[action]()
    assert count.taken > 0
    for nth in range(1, count.taken + 1):
        with PageFault(model, nth), pytest.raises(tl.OutOfMemoryError):
            calls[action]()
        assert model.kv_nbytes == held and store.reserved_nbytes == 0
    calls[action]()
    for loops, tokens_ in want.items():
        assert model.resume_generate(handle, loops, 5, **GREEDY) == tokens_


def test_a_failed_extension_leaves_the_handle_as_it_was(model):
    handle = model.build_resume_handle(TOKENS, 1)
    held = model.kv_nbytes
    for nth in (1, 2, 5):
        with PageFault(model, nth), pytest.raises(tl.OutOfMemoryError):
            handle.extend(3)
        assert (handle.loops, model.kv_nbytes) == (1, held)
    handle.extend(3)
    assert model.resume_generate(handle, 3, 5, **GREEDY) == model.generate(TOKENS, 5, 3, **GREEDY)


def test_what_exceeds_the_budget_is_refused_before_it_works(backend):
    with open_model(backend, WITHOUT_CODA, max_seq_len=256) as plain:
        handle = plain.build_resume_handle(TOKENS, 2)
        budget = plain.kv_nbytes + 3 * 2 * plain._engine.plan.store.spaces[2].page_nbytes
    with open_model(backend, WITHOUT_CODA, max_seq_len=256, kv_budget=budget) as model:
        handle = model.build_resume_handle(TOKENS, 2)
        assert len(model.resume_generate(handle, 2, 5, **GREEDY)) == 95
        held = model.kv_nbytes
        for call in (
            lambda: model.resume_generate(handle, 2, 100),
            lambda: model.resume_generate(handle, 8, 5),
            lambda: handle.extend(8),
            lambda: model.build_resume_handle(TOKENS, 1),
        ):
            with PageFault(model) as count, pytest.raises(tl.OutOfMemoryError, match=r"^out of memory: .* kv_budget"):
                call()
            assert count.pages == 0 and model.kv_nbytes == held and model._engine.plan.store.reserved_nbytes == 0
        assert len(model.resume_generate(handle, 2, 5, **GREEDY)) == 95


def test_threads_resume_one_handle_at_different_depths(model):
    want = {loops: model.generate(TOKENS, 12, loops, **GREEDY) for loops in (1, 2, 3, 4)}
    handle = model.build_resume_handle(TOKENS, 2)
    wrong, errors = [], []

    def work(i):
        try:
            for round_ in range(4):
                loops = 1 + (i + round_) % 4
                if model.resume_generate(handle, loops, 12, **GREEDY) != want[loops]:
                    wrong.append(loops)
                if i == 0 and round_ == 1:
                    handle.extend(3)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and not errors
    handle.close()
    assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0


def test_a_handle_closed_in_mid_call_serves_that_call(model):
    want = model.generate(TOKENS, 60, 3, **GREEDY)
    handle = model.build_resume_handle(TOKENS, 2)
    got, started = [], threading.Event()

    def work():
        started.set()
        got.append(model.resume_generate(handle, 3, 60, **GREEDY))

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    while handle.stats().resumes == 0 and thread.is_alive():
        pass
    handle.close()
    thread.join()
    assert got == [want] and model.kv_nbytes == 0


def test_deeper_than_trained_warns_once(backend):
    with open_model(backend, "nanbeige") as model, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = model.build_resume_handle(TOKENS[:20], 1)
        assert not caught
        model.resume_generate(handle, 4, 1)
        model.resume_generate(handle, 4, 1)
        assert len(caught) == 1 and "deeper than the 2" in str(caught[0].message)
