"""What callers did that crashed, or changed an answer: each fault by name."""

import copy
import dataclasses
import gc
import os
import pickle
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest
from models import CONFIGS, random_model
from runtime import model_file

import tinyloop_py as tl

GREEDY = {"temperature": 0.0, "stop_tokens": ()}


@pytest.fixture
def model():
    with tl.Model(tl.demo_model(), 1600, device="cpu", threads=1) as model:
        yield model


@pytest.mark.parametrize("after", [9, 2**31 - 1])
def test_tokens_changed_while_they_are_registered(model, after):
    tokens = np.full(1500, 7, np.int32)
    pool = tl.PrefixPool()
    timer = threading.Timer(0.02, lambda: tokens.fill(after))
    timer.start()
    assert model.register_prefix(pool, tokens, loops=2) == 1500
    timer.join()
    assert pool.entries()[0].tokens.tolist() in ([7] * 1500, [after] * 1500)
    for token in (7, 9):
        prompt = np.full(1501, token, np.int32)
        assert model.generate_with_pool(pool, prompt, 3, loops=2, **GREEDY) == model.generate(prompt, 3, loops=2, **GREEDY)


@pytest.mark.parametrize("method", ["logits", "build_prefix_cache", "build_resume_handle"])
def test_tokens_changed_while_a_call_runs(model, method):
    tokens = np.full(1500, 7, np.int32)
    timer = threading.Timer(0.02, lambda: tokens.fill(2**31 - 1))
    timer.start()
    out = getattr(model, method)(tokens, 1)
    timer.join()
    if method == "logits":
        assert np.isfinite(out).all()
    else:
        out.close()


def test_a_prefix_cache_cannot_be_told_another_depth(model):
    with model.build_prefix_cache([1, 2, 3], loops=2) as cache:
        for name in ("loops", "cache_window", "tokens"):
            with pytest.raises(AttributeError):
                setattr(cache, name, 8)
        with pytest.raises(ValueError, match="read-only"):
            cache.tokens[0] = 5


@pytest.mark.parametrize("length", [10**7, 2])
@pytest.mark.parametrize("kind", [list, tuple])
def test_a_sequence_that_misstates_its_length(model, kind, length):
    class Lying(kind):
        def __len__(self):
            return length

    assert model.generate(Lying([1, 2, 3]), 2, loops=1, **GREEDY) == model.generate([1, 2, 3], 2, loops=1, **GREEDY)


def test_a_range_beyond_memory(model):
    assert model.register_prefix(tl.PrefixPool(), range(10**12)) == 0
    assert model.register_prefix(tl.PrefixPool(), range(10**30)) == 0


def test_stop_tokens_of_a_batch_from_an_iterator(model):
    prompt = model.tokenizer.encode("Once upon a time").ids
    stop = model.generate(prompt, 8, loops=2, temperature=0.0, stop_tokens=())[len(prompt) + 3]
    want = model.generate(prompt, 8, loops=2, temperature=0.0, stop_tokens=[stop])
    assert model.generate_batch([prompt, prompt], 8, loops=2, temperature=0.0, stop_tokens=iter([stop])) == [want, want]


@pytest.mark.filterwarnings("ignore:loops")
def test_more_loops_than_a_page_table_can_have(tmp_path):
    config = dataclasses.replace(CONFIGS["shipped"], max_loops=2**31 - 1)
    tl.save_model(tmp_path / "deep.tinyloop", config, random_model(config))
    with tl.Model(tmp_path / "deep.tinyloop", 1 << 16, device="cpu", kv_budget=10**7) as model:
        for loops in (10**5, 10**6, 2**30, 2**31 - 1):
            with pytest.raises(tl.OutOfMemoryError, match=r"loops|kv_budget"):
                model.generate([1], 1, loops=loops)


def test_a_model_that_failed_to_open_says_so():
    model = tl.Model.__new__(tl.Model)
    with pytest.raises(FileNotFoundError):
        model.__init__("nowhere.tinyloop")
    for name in ("kv_nbytes", "kv_budget", "kv_clamped", "threads", "numerics_id"):
        with pytest.raises(RuntimeError, match="failed"):
            getattr(model, name)
    with pytest.raises(RuntimeError, match="closed"):
        model.generate([1], 1)
    model.close()


def test_a_model_is_opened_once(model):
    pool = tl.PrefixPool()
    model.register_prefix(pool, [1, 2, 3])
    with pytest.raises(RuntimeError, match="make another Model"):
        model.__init__(tl.demo_model())
    assert model.generate_with_pool(pool, [1, 2, 3, 4], 3, **GREEDY) == model.generate([1, 2, 3, 4], 3, **GREEDY)


def test_a_dropped_model_leaves_no_entries_behind():
    pool = tl.PrefixPool()
    model = tl.Model(model_file("shipped"), 64, device="cpu")
    model.register_prefix(pool, list(range(1, 40)))
    assert pool.size() == 1
    del model
    gc.collect()
    assert pool.size() == 0 and pool.nbytes == 0


def test_a_model_is_not_copied(model):
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            duplicate(model)
    assert len(model.generate([1], 1)) == 2


def test_what_holds_pages_is_not_copied_and_says_what_to_do(model):
    with model.build_resume_handle([1, 2]) as handle, model.build_prefix_cache([1, 2]) as cache:
        for held, text in ((tl.PrefixPool(), "load_pool"), (handle, "build_resume_handle"), (cache, "open its file again")):
            for duplicate in (copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"can't be copied or pickled; .*{text}"):
                    duplicate(held)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"stop": 5}, TypeError, "stop is int, expected"), ({"stop": b"x"}, TypeError, "stop is bytes, expected"),
        ({"prompt": "a\ud800b"}, ValueError, "prompt has half a surrogate pair at character 1"),
    ],
)  # fmt: skip
def test_texts_that_are_none_are_named(model, arguments, error, text):
    with pytest.raises(error, match=text):
        model.stream_text(**{"prompt": "Once", **arguments})


def test_a_limit_on_address_space_leaves_room_for_a_small_model():
    limit = 3 << 30
    path = str(model_file("shipped"))
    code = f"import tinyloop_py as tl\nwith tl.Model({path!r}, 256, device='cpu', threads=1) as m: print(len(m.generate([1, 2], 5, stop_tokens=())))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert run.stdout == "7\n", run.stderr


@pytest.mark.parametrize("stops", [frozenset({-1}), frozenset({4096})])
def test_a_frozenset_of_stop_tokens_is_checked(model, stops):
    with pytest.raises(ValueError, match="stop_tokens"):
        model.generate([1], 1, stop_tokens=stops)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"temperature": 10**400}, ValueError), ({"logit_bias": {1: 10**400}}, ValueError), ({"top_p": True}, TypeError),
        ({"min_p": False}, TypeError), ({"top_p": np.array([1.0, 1.0])}, (TypeError, ValueError)),
    ],
)  # fmt: skip
def test_numbers_of_odd_kinds(model, arguments, error):
    with pytest.raises(error):
        model.generate([1], 1, **arguments)


def test_a_ban_may_be_a_numpy_number(model):
    banned = {i: np.float32("-inf") for i in range(4096) if i != 77}
    assert model.generate([1], 2, loops=1, stop_tokens=(), logit_bias=banned) == [1, 77, 77]


def test_batches_refuse_arrays_without_a_dimension(model):
    with pytest.raises(TypeError, match="prompts"):
        model.generate_batch(np.array(5), 1)
    assert model.generate_batch([[1]], 2, seed=np.array(1), loops=1) == [model.generate([1], 2, seed=1, loops=1)]


def test_kv_mode_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("TINYLOOP_KV_INT8", "banana")
    with tl.Model(model_file("shipped"), 32, device="cpu", kv_mode="bf16") as model:
        assert model.kv_mode == "bf16"


def test_a_resume_handle_is_not_extended_in_a_forked_child(model):
    handle = model.build_resume_handle([1, 2, 3, 4], 2)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            handle.extend(4)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    assert b"forked" in os.read(read, 1000)
    os.close(read)


def test_saving_again_keeps_a_files_permissions(model, tmp_path):
    with model.build_prefix_cache([1, 2, 3]) as cache:
        cache.save(tmp_path / "cache")
        (tmp_path / "cache").chmod(0o600)
        cache.save(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o600


class Text(str):
    """A str of another class, as numpy.str_ and the members of an enum are."""


def test_names_may_be_of_a_kind_of_str(tmp_path):
    with tl.Model(Text(model_file("shipped")), 64, device=Text("cpu"), kv_mode=Text("int8")) as model:
        assert (type(model.path), type(model.kv_mode), model.kv_mode) == (str, str, "int8")
        pool = tl.PrefixPool(eviction=Text("lru"))
        model.register_prefix(pool, [1, 2, 3], namespace=Text("a"))
        pool.save(Text(tmp_path / "pool"))
        assert model.load_pool(Text(tmp_path / "pool")).match(model, [1, 2, 3], namespace="a") == 3


@pytest.mark.parametrize("value", [np.array([3]), np.array([1, 2]), np.array([0.5]), np.array(["a"])], ids=repr)
@pytest.mark.parametrize("name", ["max_tokens", "loops", "cache_window", "top_k", "temperature", "top_p", "min_p", "repetition_penalty", "seed"])
def test_an_array_where_a_number_goes_is_named(model, name, value):
    with pytest.raises(TypeError, match=name):
        model.generate([1], **{"max_tokens": 1, name: value})


def test_a_bool_of_numpy_is_no_number(model):
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "top_k", "seed", "max_tokens", "loops"):
        with pytest.raises(TypeError, match=name):
            model.generate([1], **{"max_tokens": 1, name: np.True_})
    with pytest.raises(TypeError, match="length_penalty"):
        model.beam_search([1], 2, 1, length_penalty=np.True_)


def test_a_length_penalty_beyond_floating_point(model):
    with pytest.raises(ValueError, match="length_penalty"):
        model.beam_search([1], 2, 1, length_penalty=10**400)


def test_logits_name_their_argument(model):
    with pytest.raises(ValueError, match=r"^tokens is empty"):
        model.logits([])


def test_a_batch_refuses_prompts_and_seeds_without_an_order(model):
    with pytest.raises(TypeError, match="prompts"):
        model.generate_batch({(1, 2), (3, 4)}, 1)
    for seeds in ({1, 2}, {1: 2, 3: 4}, frozenset({1, 2})):
        with pytest.raises(TypeError, match="seed"):
            model.generate_batch([[1], [2]], 1, seed=seeds)


def test_a_handle_that_no_model_built_says_so():
    """It read an engine that was not there."""
    handle = tl.ResumeHandle.__new__(tl.ResumeHandle)
    for loops in (1, 3, -1):
        with pytest.raises(RuntimeError, match="closed"):
            handle.extend(loops)


def test_a_model_that_failed_to_open_says_so_whatever_is_asked_of_it():
    model = tl.Model.__new__(tl.Model)
    for method in (model.generate_from_prefix_cache, model.stream_from_prefix_cache):
        with pytest.raises(RuntimeError, match=r"^tinyloop\.Model is closed; cannot call"):
            method(None)
