"""Model.generate and Model.logits: results, arguments, errors, and that nothing is left behind."""

import math
import os
import signal
import threading
import time

import numpy as np
import pytest
from models import CONFIGS, random_tokens
from runtime import model_file, open_model
from sampling_reference import sample

import tinyloop_py as tl

PROMPT = random_tokens(CONFIGS["shipped"], 20)


@pytest.fixture
def model(backend):
    with open_model(backend, "shipped", max_seq_len=128) as model:
        yield model


def test_result_is_prompt_and_drawn_tokens(model):
    out = model.generate(PROMPT, 10, temperature=0.0, stop_tokens=())
    assert isinstance(out, list) and all(type(t) is int for t in out)
    assert out[:20] == PROMPT.tolist() and len(out) == 30


def test_greedy_tokens_are_the_argmax_of_the_logits(model):
    out = model.generate(PROMPT, 15, temperature=0.0, stop_tokens=())
    for n in range(20, 35):
        assert out[n] == int(model.logits(out[:n], last_only=True).argmax())


def test_drawn_tokens_follow_the_reference_pipeline(model):
    settings = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "logit_bias": {3: 2.0, 5: -math.inf}}
    out = model.generate(PROMPT, 25, seed=123, stop_tokens=(), **settings)
    for n in range(20, 45):
        logits = model.logits(out[:n], last_only=True)[0]
        assert sample(logits, 123, n, context=out[:n], **settings).token == out[n]


@pytest.mark.parametrize("kind", [list, tuple, np.int64, np.uint8, np.int32, "strided", "readonly"])
def test_prompts_of_every_integer_kind_are_taken(model, kind):
    prompt = {list: PROMPT.tolist(), tuple: tuple(PROMPT.tolist()), "strided": np.repeat(PROMPT, 2)[::2]}.get(kind)
    if kind == "readonly":
        prompt = PROMPT.copy()
        prompt.flags.writeable = False
    elif prompt is None:
        prompt = (PROMPT % 200).astype(kind)
    want = model.generate(np.ascontiguousarray(prompt, np.int32), 5, temperature=0.0)
    assert model.generate(prompt, 5, temperature=0.0) == want


def test_the_stop_token_is_the_last_one_and_counts(model):
    free = model.generate(PROMPT, 10, temperature=0.0, stop_tokens=())
    stop = free[24]
    first = free.index(stop, 20)
    assert model.generate(PROMPT, 10, temperature=0.0, stop_tokens=[stop]) == free[: first + 1]
    assert model.generate(PROMPT, first - 19, temperature=0.0, stop_tokens={stop}) == free[: first + 1]


def test_the_files_stop_ids_are_the_default(backend, tmp_path):
    from models import random_model

    with open_model(backend, "shipped") as model:
        free = model.generate(PROMPT, 10, temperature=0.0, stop_tokens=())
    tl.save_model(tmp_path / "m.tinyloop", CONFIGS["shipped"], random_model(CONFIGS["shipped"]), stop_ids=(free[23],))
    with tl.Model(tmp_path / "m.tinyloop", 64, device=backend) as model:
        assert model.stop_ids == (free[23],)
        assert model.generate(PROMPT, 10, temperature=0.0) == free[: free.index(free[23], 20) + 1]
        assert model.generate(PROMPT, 10, temperature=0.0, stop_tokens=()) == free


def test_no_tokens_asked_runs_the_prompt_and_returns_it(model):
    assert model.generate(PROMPT, 0) == PROMPT.tolist()


def test_the_whole_length_can_be_used(model):
    assert len(model.generate(PROMPT, 108, temperature=0.0, stop_tokens=())) == 128
    assert model.generate(random_tokens(CONFIGS["shipped"], 128), 0)[-1] >= 0
    with pytest.raises(RuntimeError, match=r"20 tokens and max_tokens = 109 exceed max_seq_len = 128"):
        model.generate(PROMPT, 109)


def test_depth_is_an_argument(model):
    shallow, deep = (model.generate(PROMPT, 12, loops=n, temperature=0.0, stop_tokens=()) for n in (1, 8))
    assert shallow != deep
    assert model.generate(PROMPT, 12, temperature=0.0, stop_tokens=()) == deep  # the file's default_loops
    with pytest.raises(ValueError, match="loops must be at least 1, got 0"):
        model.generate(PROMPT, loops=0)
    with pytest.raises(ValueError, match="loops must be at most 8, got 9; the model file's max_loops is 8"):
        model.generate(PROMPT, loops=9)


def test_deeper_than_trained_warns_once(backend):
    with open_model(backend, "zero_init", max_seq_len=64) as model:
        with pytest.warns(UserWarning, match="loops = 5 is deeper than the 3"):
            model.generate([1, 2], 1, loops=5)
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.generate([1, 2], 1, loops=5)


def test_a_window_changes_the_result_once_it_is_full(model):
    long = random_tokens(CONFIGS["shipped"], 60)
    assert np.array_equal(model.logits(long, cache_window=60), model.logits(long))
    assert not np.array_equal(model.logits(long, cache_window=20)[-1], model.logits(long)[-1])
    assert np.array_equal(model.logits(long, cache_window=20)[:20], model.logits(long)[:20])


@pytest.mark.parametrize(
    ("argument", "value", "error", "text"),
    [
        ("prompt", [], ValueError, "prompt is empty"),
        ("prompt", [1, 259], ValueError, r"prompt\[1\] is 259, expected a token id from 0 to 258"),
        ("prompt", [-1], ValueError, r"prompt\[0\] is -1"),
        ("prompt", [[1, 2]], (TypeError, ValueError), "prompt"),
        ("prompt", np.zeros((2, 2), np.int32), ValueError, "one-dimensional"),
        ("prompt", np.zeros(3), TypeError, "float64"),
        ("prompt", "hello", TypeError, "str"),
        ("prompt", None, TypeError, "got None"),
        ("prompt", [2**40], ValueError, "prompt"),
        ("max_tokens", -1, ValueError, "max_tokens must be at least 0, got -1"),
        ("max_tokens", 1.5, TypeError, "max_tokens must be an integer, got float"),
        ("max_tokens", True, TypeError, "bool"),
        ("loops", "8", TypeError, "loops"),
        ("cache_window", -1, ValueError, "cache_window"),
        ("temperature", -0.1, ValueError, "temperature is -0.1"),
        ("temperature", math.nan, ValueError, "temperature"),
        ("temperature", math.inf, ValueError, "temperature"),
        ("temperature", "warm", TypeError, "temperature"),
        ("top_k", -1, ValueError, "top_k"),
        ("top_k", 2.0, TypeError, "top_k"),
        ("top_p", 0.0, ValueError, "top_p"),
        ("top_p", 1.1, ValueError, "top_p"),
        ("min_p", -0.1, ValueError, "min_p"),
        ("repetition_penalty", 0.0, ValueError, "repetition_penalty"),
        ("logit_bias", [1], TypeError, "logit_bias"),
        ("logit_bias", {999: 1.0}, ValueError, "logit_bias"),
        ("logit_bias", {1: math.nan}, ValueError, "logit_bias"),
        ("seed", -1, ValueError, "seed"),
        ("seed", 2**64, ValueError, "seed"),
        ("seed", "x", TypeError, "seed"),
        ("stop_tokens", 5, TypeError, "stop_tokens"),
        ("stop_tokens", "ab", TypeError, "stop_tokens"),
        ("stop_tokens", [300], ValueError, "stop_tokens"),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(model, argument, value, error, text):
    before = model.generate(PROMPT, 3, temperature=0.0)
    with pytest.raises(error, match=text):
        model.generate(**{"prompt": PROMPT, "max_tokens": 3, argument: value})
    assert model.kv_nbytes == 0
    assert model.generate(PROMPT, 3, temperature=0.0) == before


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e30])
def test_extreme_temperatures_draw_valid_tokens(model, temperature):
    out = model.generate(PROMPT, 5, temperature=temperature, top_k=0, seed=1, stop_tokens=())
    assert all(0 <= t < 259 for t in out)
    if temperature < 1:
        assert out == model.generate(PROMPT, 5, temperature=0.0, stop_tokens=())


def test_seed_none_takes_a_fresh_seed(model):
    outs = {tuple(model.generate(PROMPT, 10, temperature=5.0, top_k=0, stop_tokens=())) for _ in range(4)}
    assert len(outs) == 4


def test_a_call_frees_its_pages(model):
    assert model.kv_nbytes == 0
    for _ in range(3):
        model.generate(PROMPT, 30, temperature=0.0)
        model.logits(PROMPT)
        assert model.kv_nbytes == 0


def test_closing_is_final_and_idempotent(backend):
    model = open_model(backend)
    model.close()
    model.close()
    assert model.closed
    for call, arguments in (
        ("generate", ([1],)),
        ("logits", ([1],)),
        ("generate_with_pool", (tl.PrefixPool(), [1])),
        ("register_prefix", (None, [1])),
    ):
        with pytest.raises(RuntimeError, match=f"^tinyloop.Model is closed; cannot call {call}$"):
            getattr(model, call)(*arguments)


def test_construction_errors(tmp_path, monkeypatch):
    path = model_file("shipped")
    with pytest.raises(FileNotFoundError):
        tl.Model(tmp_path / "none.tinyloop")
    (tmp_path / "text").write_text("not a model")
    with pytest.raises(tl.FormatError):
        tl.Model(tmp_path / "text")
    for arguments, error, text in (
        ({"max_seq_len": 0}, ValueError, "max_seq_len"),
        ({"max_seq_len": 1.0}, TypeError, "max_seq_len"),
        ({"device": "tpu"}, ValueError, "'tpu'"),
        ({"device": "cuda:x"}, ValueError, "cuda:x"),
        ({"device": 3}, TypeError, "device"),
        ({"threads": 0}, ValueError, "threads"),
        ({"threads": 2000}, ValueError, "threads"),
        ({"kv_budget": 0}, ValueError, "kv_budget"),
        ({"kv_mode": "fp8"}, ValueError, "fp8"),
        ({"kv_mode": 16}, TypeError, "kv_mode"),
    ):
        with pytest.raises(error, match=text):
            tl.Model(path, **{"device": "cpu", **arguments})
    monkeypatch.setenv("TINYLOOP_CPU_ISA", "mmx")
    with pytest.raises(ValueError, match="TINYLOOP_CPU_ISA"):
        tl.Model(path, device="cpu")


@pytest.mark.parametrize("variable", ["TINYLOOP_KV_H_MODE", "TINYLOOP_KV_INT8", "TINYLOOP_KV_INT4"])
def test_kv_mode_variables(monkeypatch, variable):
    for off in ("", "0", "false", "off", "OFF"):
        monkeypatch.setenv(variable, off)
        open_model("cpu").close()
    for on in ("1", "true", "on"):
        monkeypatch.setenv(variable, on)
        with open_model("cpu", "nanbeige") as model:
            assert model.kv_mode == {"TINYLOOP_KV_H_MODE": "h", "TINYLOOP_KV_INT8": "int8", "TINYLOOP_KV_INT4": "int4"}[variable]
        with open_model("cpu", kv_mode="fp16") as model:  # the argument wins
            assert model.kv_mode == "fp16"
    monkeypatch.setenv(variable, "maybe")
    with pytest.raises(ValueError, match=variable):
        open_model("cpu")


def test_two_kv_mode_variables_at_once_are_both_named(monkeypatch):
    monkeypatch.setenv("TINYLOOP_KV_INT8", "1")
    monkeypatch.setenv("TINYLOOP_KV_H_MODE", "1")
    with pytest.raises(ValueError, match="TINYLOOP_KV_H_MODE and TINYLOOP_KV_INT8"):
        open_model("cpu")


def test_keyboard_interrupt_stops_a_call_and_frees_it(backend):
    with open_model(backend, "shipped", max_seq_len=100_000) as model:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            model.generate(PROMPT, 90_000, stop_tokens=())
            pytest.fail("the call ended before the interrupt")
        assert time.monotonic() - begin < 20
        assert model.kv_nbytes == 0
        assert len(model.generate(PROMPT, 3, stop_tokens=())) == 23


def test_a_forked_child_is_told_to_make_its_own_model(backend):
    with open_model(backend) as model:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                model.generate(PROMPT, 1)
                text = "no error"
            except RuntimeError as error:
                text = str(error)
            model.close()
            os.write(write, text.encode())
            os._exit(0)
        os.waitpid(pid, 0)
        assert b"forked" in os.read(read, 1000)
        assert len(model.generate(PROMPT, 2, stop_tokens=())) == 22


def test_eight_threads_on_one_model_get_their_serial_answers(backend):
    prompts = [random_tokens(CONFIGS["shipped"], n, seed=n) for n in (3, 17, 40, 64)]
    with open_model(backend, "shipped", "bf16") as model:
        want = [model.generate(p, 20, temperature=0.8, seed=7, stop_tokens=()) for p in prompts]
        got, errors = {}, []

        def work(i):
            try:
                for round_ in range(4):
                    got[i, round_] = model.generate(prompts[i % 4], 20, temperature=0.8, seed=7, stop_tokens=()) == want[i % 4]
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not errors and len(got) == 32 and all(got.values())
        assert model.kv_nbytes == 0


def test_closing_while_another_thread_generates_ends_that_call(backend):
    model = open_model(backend, "shipped", max_seq_len=100_000)
    caught = []

    def work():
        try:
            model.generate(PROMPT, 90_000, stop_tokens=())
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)
    model.close()
    thread.join(30)
    assert not thread.is_alive() and "closed" in caught[0]


def test_many_more_threads_than_cores_change_no_answer():
    """Threads that the system sets aside have fewer of them run, and more again: a barrier's partners change from step to step."""
    prompt = list(range(1, 40))
    with tl.Model(model_file("shipped"), 256, device="cpu", threads=1) as model:
        want = [model.generate(prompt, 60, loops, temperature=0.0, stop_tokens=()) for loops in (1, 2, 3)]
    models = [tl.Model(model_file("shipped"), 256, device="cpu", threads=n) for n in (8, 13)]

    def work(model):
        for _ in range(4):
            for loops in (1, 2, 3):
                got.append(model.generate(prompt, 60, loops, temperature=0.0, stop_tokens=()) == want[loops - 1])

    got = []
    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model in models:
        model.close()
    assert len(got) == 24 and all(got)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores, and Linux")
def test_a_worker_leaves_its_callers_core_and_keeps_all_others():
    """Two threads of a step on one core take turns at every barrier, while another core may be idle."""
    cores, others = os.sched_getaffinity(0), set(os.listdir("/proc/self/task"))
    core = min(cores)
    with tl.Model(model_file("shipped"), 64, device="cpu", threads=2) as model:
        (worker,) = (int(task) for task in set(os.listdir("/proc/self/task")) - others)
        want = model.generate([1, 2, 3], 20, temperature=0.0, stop_tokens=())

        def work():
            os.sched_setaffinity(0, {core})
            os.sched_setaffinity(worker, {core})
            end = time.monotonic() + 60  # where the machine is busy, the first steps may run without the worker
            while os.sched_getaffinity(worker) != cores and time.monotonic() < end:
                got.append(model.generate([1, 2, 3], 20, temperature=0.0, stop_tokens=()))
            masks.append(os.sched_getaffinity(worker))

        got, masks = [], []
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert masks == [cores] and got and all(tokens == want for tokens in got)
