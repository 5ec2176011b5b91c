"""Prefix caches and pools in files: the bits that were saved, in any process; whatever is wrong with a file is named and changes nothing."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import emulated_cuda
import numpy as np
import pytest
from faults import PageFault
from models import CONFIGS, random_model, random_tokens, stored
from runtime import entry_of, model_file, open_model, same_bits, same_kv

import tinyloop_py as tl
from tinyloop_py.kv_export import export_kv
from tinyloop_py.saved_contents import FORMAT, VERSION
from tinyloop_py.tensor_file import TensorFile, TensorFileWriter

GREEDY = {"temperature": 0.0, "stop_tokens": ()}
TOKENS = random_tokens(CONFIGS["huginn"], 120)  # ids that every model here has
pytestmark = pytest.mark.filterwarnings("ignore:loops = .* is deeper")

KV_MODES = ("fp16", "bf16", "fp32", "int8", "int4")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved.kv"


@pytest.fixture
def model(backend):
    with open_model(backend, "shipped", "bf16", max_seq_len=256) as model:
        yield model


def assert_same_prefix(model, got, other, want):
    assert (got.n_tokens, got.loops, got.window, got.nbytes) == (want.n_tokens, want.loops, want.window, want.nbytes)
    assert same_bits(np.asarray(got.final_x), np.asarray(want.final_x))
    assert same_bits(np.asarray(got.boundary_x), np.asarray(want.boundary_x))
    assert same_kv(export_kv(model._engine, got), export_kv(other._engine, want))


# ---- bits


@pytest.mark.parametrize("kv_mode", KV_MODES)
@pytest.mark.parametrize("name", ["shipped", "huginn", "olmo2", "zero_init"])
def test_a_cache_comes_back_with_its_bits(backend, path, name, kv_mode):
    tokens = TOKENS[:70]
    with open_model(backend, name, "bf16", kv_mode=kv_mode) as model, open_model(backend, name, "bf16", kv_mode=kv_mode) as other:
        cache = model.build_prefix_cache(tokens[:60], 2)
        cache.save(path)
        loaded = other.load_prefix_cache(path)
        assert (loaded.tokens.tolist(), loaded.loops, loaded.cache_window) == (tokens[:60].tolist(), 2, 0)
        assert loaded.nbytes == cache.nbytes and other.kv_nbytes == model.kv_nbytes
        assert_same_prefix(other, loaded._prefix, model, cache._prefix)
        want = model.generate(tokens, 8, 2, **GREEDY)
        assert other.generate_from_prefix_cache(loaded, 8, suffix=tokens[60:], **GREEDY) == want
        loaded.close()
        assert other.kv_nbytes == 0 and other._engine.plan.store.reserved_nbytes == 0


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dtype", ["bf16", "int8", "f32"])
@pytest.mark.parametrize("name", ["ouro", "huginn", "zero_init"])
def test_operands_of_h_mode_come_back(backend, path, name, dtype, window):
    """A file of h mode holds operands, and none of what other calls left behind a prefix's tokens."""
    with open_model(backend, name, dtype, kv_mode="h") as model:
        model.register_prefix(tl.PrefixPool(), random_tokens(model.config, 64, seed=9), 2, window)
        cache = model.build_prefix_cache(TOKENS[:35], 2, window)
        cache.save(path)
        again = model.build_prefix_cache(TOKENS[:35], 2, window)
        again.save(path.with_name("again"))
        assert path.read_bytes() == path.with_name("again").read_bytes()
        loaded = model.load_prefix_cache(path)
        assert_same_prefix(model, loaded._prefix, model, cache._prefix)
        want = model.generate(TOKENS[:60], 6, 2, cache_window=window, **GREEDY)
        assert model.generate_from_prefix_cache(loaded, 6, suffix=TOKENS[35:60], **GREEDY) == want
    with open_model(backend, name, dtype) as fp16:
        assert_refused(fp16, path, ValueError, "kv_mode 'h', not 'fp16'", load="load_prefix_cache")
        rebuilt = fp16.load_prefix_cache(path, rebuild=True)
        assert fp16.generate_from_prefix_cache(rebuilt, 6, suffix=TOKENS[35:60], **GREEDY) == want


@pytest.mark.parametrize("n", [1, 15, 16, 17, 64, 119])
@pytest.mark.parametrize("window", [0, 1, 20, 100])
def test_sizes_around_pages_and_windows(backend, path, n, window):
    with open_model(backend, "mixed_windows") as model:
        cache = model.build_prefix_cache(TOKENS[:n], 2, window)
        cache.save(path)
        loaded = model.load_prefix_cache(path)
        assert_same_prefix(model, loaded._prefix, model, cache._prefix)
        want = model.generate(TOKENS, 8, 2, cache_window=window, **GREEDY)
        assert model.generate_from_prefix_cache(loaded, 8, suffix=TOKENS[n:], **GREEDY) == want


def test_a_windowed_prefix_takes_its_window_only(model, path):
    whole, windowed = path.with_name("whole"), path
    model.build_prefix_cache(TOKENS).save(whole)
    model.build_prefix_cache(TOKENS, cache_window=16).save(windowed)
    assert windowed.stat().st_size < whole.stat().st_size / 3


LOAD = """
import json, sys
import tinyloop_py as tl
model = tl.Model(sys.argv[1], 256, device=sys.argv[2], kv_mode=sys.argv[3])
pool = model.load_pool(sys.argv[4])
draws = {"temperature": 1.0, "seed": 5, "stop_tokens": ()}
answers = [model.generate_with_pool(pool, prompt, 12, namespace=space, **draws) for prompt, space in json.loads(sys.argv[5])]
print(json.dumps([answers, pool.stats().hits, pool.stats().matched_tokens]))
"""
EMULATE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import emulated_cuda; emulated_cuda.install()\n"


@pytest.mark.parametrize("kv_mode", ["fp16", "int8"])
def test_a_pool_answers_the_same_in_another_process(backend, path, kv_mode):
    queries = [(TOKENS[:50].tolist(), None), (TOKENS.tolist(), None), (TOKENS[:70].tolist(), "a"), (TOKENS[1:60].tolist(), None)]
    with open_model(backend, "shipped", "bf16", max_seq_len=256, kv_mode=kv_mode) as model:
        pool = tl.PrefixPool()
        for n, space in ((40, None), (100, None), (70, "a")):
            model.register_prefix(pool, TOKENS[:n], namespace=space)
        pool.save(path)
        want = [model.generate(prompt, 12, temperature=1.0, seed=5, stop_tokens=()) for prompt, _ in queries]
    arguments = [str(model_file("shipped", "bf16")), backend, kv_mode, str(path), json.dumps(queries)]
    code = EMULATE + LOAD if emulated_cuda.installed() else LOAD
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [want, 3, 40 + 100 + 70]


# ---- pools


def listed(pool):
    return [(e.tokens.tolist(), e.loops, e.cache_window, e.namespace, e.pinned, e.hits, e.nbytes) for e in pool.entries()]


@pytest.mark.parametrize("eviction", ["shortest", "lru"])
def test_a_pool_comes_back_as_it_was(model, path, eviction):
    pool = tl.PrefixPool(6, max_cached_tokens=900, max_bytes=1 << 22, eviction=eviction)
    model.register_prefix(pool, TOKENS[:64], pin=True)
    model.register_prefix(pool, TOKENS[:112])
    model.register_prefix(pool, TOKENS[5:37], 3, 20, namespace="tenant")
    model.register_prefix(pool, TOKENS[6:38], 3)
    model.register_prefix(pool, TOKENS[7:39], 3)
    model.generate_with_pool(pool, TOKENS[:70], 1)
    model.generate_with_pool(pool, TOKENS[6:40], 1, 3)
    pool.save(path)
    held = model.kv_nbytes
    loaded = model.load_pool(path)
    loaded._check()
    assert repr(loaded) == repr(pool) and listed(loaded) == listed(pool)
    assert (loaded.max_cached_tokens, loaded.max_bytes, loaded.nbytes) == (900, 1 << 22, pool.nbytes)
    assert model.kv_nbytes == 2 * held  # shared pages are shared again
    assert loaded.stats().hits == 0
    # Evicted in the same order from here on.
    for i in range(6):
        for p in (pool, loaded):
            model.register_prefix(p, random_tokens(model.config, 40 + i, seed=i))
        assert [e.tokens.tolist() for e in loaded.entries()] == [e.tokens.tolist() for e in pool.entries()]
    pool.clear()
    assert model.generate_with_pool(loaded, TOKENS[:70], 8, **GREEDY) == model.generate(TOKENS[:70], 8, **GREEDY)
    assert loaded.stats().matched_tokens == 64
    loaded.clear()
    assert model.kv_nbytes == 0


def test_shared_pages_are_written_once(model, path):
    pool = tl.PrefixPool()
    model.register_prefix(pool, TOKENS[:96])
    pool.save(path)
    one = path.stat().st_size
    model.register_prefix(pool, TOKENS[:112])
    pool.save(path)
    page = sum(s.page_nbytes for s in model._engine.plan.store.spaces if s) * model.config.default_loops
    assert page <= path.stat().st_size - one < 2 * page + 8192


def test_an_empty_pool(model, path):
    tl.PrefixPool(3, eviction="lru").save(path)
    assert repr(model.load_pool(path)) == repr(tl.PrefixPool(3, eviction="lru"))


def test_a_pool_of_two_models_is_refused(backend, model, path):
    pool = tl.PrefixPool()
    with open_model(backend) as other:
        model.register_prefix(pool, TOKENS[:10])
        other.register_prefix(pool, TOKENS[:10])
        with pytest.raises(ValueError, match="prefixes of 2 models"):
            pool.save(path)
    assert not path.exists()
    pool.save(path)  # the other's left with it
    assert model.load_pool(path).size() == 1


def test_a_closed_model_takes_its_loaded_pools_entries_along(backend, path):
    model = open_model(backend)
    pool = tl.PrefixPool()
    model.register_prefix(pool, TOKENS[:20])
    pool.save(path)
    loaded = model.load_pool(path)
    model.close()
    assert loaded.size() == 0
    for load in (model.load_pool, model.load_prefix_cache):
        with pytest.raises(RuntimeError, match=r"tinyloop\.Model is closed; cannot call load_"):
            load(path)


def test_what_other_prompts_left_in_a_page_is_not_written(model, path):
    """A page comes back from another tenant's call; the file holds the prefix's own tokens and zeros."""
    model.generate(random_tokens(model.config, 16, seed=9), 1)
    cache = model.build_prefix_cache(TOKENS[:3])
    cache.save(path)
    with TensorFile(path, FORMAT, VERSION) as file:
        names = [name for name in file.entries if name.startswith("span.")]
        assert len(names) == 2 * model.config.default_loops
        for name in names:
            entry = file.entries[name]
            pages = file.read(name, entry.dtype, entry.shape)
            assert pages[..., :3, :].any() and not pages[..., 3:, :].any()


# ---- files that are refused


@pytest.fixture
def saved(model, path):
    """A pool's file, and the model that wrote it."""
    pool = tl.PrefixPool()
    model.register_prefix(pool, TOKENS[:40])
    model.register_prefix(pool, TOKENS[:70])
    pool.save(path)
    pool.clear()
    return path


def assert_refused(model, path, error=tl.FormatError, text=None, load="load_pool", **how):
    with pytest.raises(error, match=text) as caught:
        getattr(model, load)(path, **how)
    if error is not FileNotFoundError:
        assert str(path) in str(caught.value)
    assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0


def test_every_damaged_byte_is_noticed(model, saved):
    data = saved.read_bytes()
    n_header = 8 + int.from_bytes(data[:8], "little")
    places = [*range(0, n_header, 97), n_header - 1, *range(n_header, len(data), 911), len(data) - 1]
    for place in places:
        if n_header > place >= 8 and data[place : place + 1] == b" ":
            continue  # padding behind the header's text
        saved.write_bytes(data[:place] + bytes([data[place] ^ 0x11]) + data[place + 1 :])
        assert_refused(model, saved)
    saved.write_bytes(data)
    assert model.load_pool(saved).size() == 2


def test_truncated_and_foreign_files(model, saved, tmp_path):
    data = saved.read_bytes()
    for n in (0, 7, 100, len(data) // 2, len(data) - 1):
        saved.write_bytes(data[:n])
        assert_refused(model, saved)
    saved.write_bytes(data + b"x")
    assert_refused(model, saved)
    (tmp_path / "text").write_text("hello, this is not a file of prefixes")
    assert_refused(model, tmp_path / "text")
    assert_refused(model, model_file("shipped", "bf16"), text="format is 'tinyloop', expected 'tinyloop-kv'")
    assert_refused(model, tmp_path / "absent", FileNotFoundError)


def test_a_saved_file_cut_while_it_is_read_is_a_format_error(model, saved, monkeypatch):
    def cut_then_read(file, *args, read=TensorFile.read):
        os.truncate(saved, 16)
        return read(file, *args)

    monkeypatch.setattr(TensorFile, "read", cut_then_read)
    assert_refused(model, saved, text=r"tensor \S+ ends early")


def test_a_fifo_is_neither_read_nor_replaced(model, path, tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    assert_refused(model, path, text="a FIFO, expected a file that save wrote")
    pool = tl.PrefixPool(2)
    model.register_prefix(pool, TOKENS[:20])
    for held in (pool, model.build_prefix_cache(TOKENS[:20])):
        with pytest.raises(OSError, match="cannot write a file over a FIFO"):
            held.save(path)
    assert path.is_fifo() and os.listdir(tmp_path) == ["fifo"]


def test_a_path_may_be_bytes(model, tmp_path):
    path = os.fsencode(tmp_path / "pool")
    pool = tl.PrefixPool(2)
    model.register_prefix(pool, TOKENS[:20])
    pool.save(path)
    assert model.load_pool(path).size() == 1
    with tl.Model(os.fsencode(model.path), 64) as again:
        assert again.path == model.path


def test_a_pool_and_a_cache_are_two_things(model, saved, tmp_path):
    cache = model.build_prefix_cache(TOKENS[:20])
    cache.save(tmp_path / "cache")
    cache.close()
    assert_refused(model, saved, text="it holds a 'pool', expected a 'prefix cache'", load="load_prefix_cache")
    assert_refused(model, tmp_path / "cache", text="it holds a 'prefix cache', expected a 'pool'")


@pytest.mark.parametrize(
    ("name", "dtype", "how", "text"),
    [
        ("shipped", "bf16", {"seed": 1}, "other weights"),
        ("shipped", "f32", {}, "other weights"),
        ("loop_bare", "bf16", {}, "config field"),
        ("shipped", "bf16", {"kv_mode": "fp32"}, "kv_mode 'fp16', not 'fp32'.*rebuild=True"),
        ("shipped", "bf16", {"max_seq_len": 64}, "70 tokens at loops = 8; this model has max_seq_len = 64"),
    ],
)
def test_another_models_file_is_refused(backend, saved, name, dtype, how, text):
    with open_model(backend, name, dtype, **how) as other:
        assert_refused(other, saved, ValueError, text)
        if "rebuild" not in (text or ""):
            assert_refused(other, saved, ValueError, text, rebuild=True)


def test_another_kv_mode_is_rebuilt_where_asked(backend, model, saved):
    with open_model(backend, "shipped", "bf16", kv_mode="fp32") as other:
        pool = other.load_pool(saved, rebuild=True)
        assert [e.n_tokens for e in pool.entries()] == [70, 40]
        want = other.generate(TOKENS, 10, **GREEDY)
        assert other.generate_with_pool(pool, TOKENS, 10, **GREEDY) == want
        assert pool.stats().matched_tokens == 70
        page = sum(s.page_nbytes for s in other._engine.plan.store.spaces if s) * other.config.default_loops
        assert other.kv_nbytes == (5 + 1) * page  # five pages of 70 tokens, of which two are shared by 40, and its last


def test_another_code_path_is_refused_or_rebuilt(monkeypatch, tmp_path):
    path = tmp_path / "saved.kv"
    with open_model("cpu", "shipped", "bf16") as model:
        own = model.numerics_id
        model.build_prefix_cache(TOKENS[:40]).save(path)
    monkeypatch.setenv("TINYLOOP_CPU_ISA", "generic")
    with open_model("cpu", "shipped", "bf16") as other:
        if other.numerics_id == own:
            pytest.skip("this processor has one code path")
        assert_refused(other, path, ValueError, f"numerics_id '{own}', not '{other.numerics_id}'.*rebuild=True", load="load_prefix_cache")
        cache = other.load_prefix_cache(path, rebuild=True)
        assert_same_prefix(other, cache._prefix, other, other.build_prefix_cache(TOKENS[:40])._prefix)


def test_rebuild_reads_a_file_that_needs_none(model, saved):
    assert model.load_pool(saved, rebuild=True).size() == 2


def with_contents(path, change):
    """The same file with sound checksums and other contents."""
    with TensorFile(path, FORMAT, VERSION) as file:
        contents = json.loads(file.text["contents"])
        change(contents)
        arrays = {name: np.array(file.read(name, e.dtype, e.shape)) for name, e in file.entries.items()}
        tensors = {name: (e.dtype, e.shape) for name, e in file.entries.items()}
    text = {"format": FORMAT, "version": VERSION, "contents": json.dumps(contents)}
    with TensorFileWriter(path, tensors, text) as writer:
        for name, array in arrays.items():
            writer.append(name, array)


def pop_stage(contents):
    contents["spans"][0]["first_held"].pop("3")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c["entries"][1].update(spans=c["entries"][1]["spans"][:1]), "end with its full pages"),
        (lambda c: c["entries"][0].update(spans=[]), "lacks pages"),
        (lambda c: c["entries"][1].update(spans=c["entries"][1]["spans"][1:]), "lacks pages"),
        (lambda c: c["entries"][1].update(spans=c["entries"][1]["spans"][::-1]), "follow each other"),
        (lambda c: c["entries"][0].update(tail=None), "partly filled"),
        (lambda c: c["entries"][0].update(spans=[99]), "a span of an entry is 99"),
        (lambda c: c["entries"][0].update(loops=7), "follow each other|another shape"),
        (lambda c: c["entries"][0].update(n_tokens=39), "tokens"),
        (lambda c: c["entries"][0].update(cache_window=-1), "cache_window"),
        (lambda c: c["entries"][0].update(namespace=3), "namespace"),
        (lambda c: c["entries"][0].pop("hits"), "hits"),
        (pop_stage, "lacks pages of stage 3"),
        (lambda c: c["spans"][0]["first_held"].update({"3": 1}), "lacks pages of stage 3|shape"),
        (lambda c: c["spans"][0]["first_held"].update({"0": 0}), "a stage that the model lacks"),
        (lambda c: c["spans"].append({"first_page": 0, "n_pages": 2**31 - 1, "n_stages": 2**31 - 1, "first_held": {}}), "belongs to no entry"),
        (lambda c: c["spans"][0].update(n_stages=2), "n_stages"),
        (lambda c: c["spans"][0]["first_held"].update({"9" * 5000: 0}), "first_held"),
        (lambda c: c["spans"][0].update(first_page=1), "lacks pages|follow|end with"),
        (lambda c: c["pool"].update(capacity=-1), "capacity"),
        (lambda c: c["pool"].update(capacity=1), "do not fit it: one was evicted"),
        (lambda c: (c["pool"].update(capacity=1), [e.update(pinned=True) for e in c["entries"]]), "do not fit it: .*pinned"),
        (lambda c: c["pool"].update(max_cached_tokens=1), "do not fit it: .*max_cached_tokens"),
        (lambda c: c["pool"].pop("eviction"), "eviction"),
        (lambda c: c.update(fingerprint=None), "fingerprint"),
        (lambda c: c.update(more=1), "fields"),
    ],
)  # fmt: skip
def test_contents_that_do_not_fit_are_refused(model, saved, change, text):
    """A file whose checksums are right and whose contents would have a kernel read pages that are not there."""
    with_contents(saved, change)
    assert_refused(model, saved, text=text)


def test_a_prefix_cache_file_without_its_entry_is_refused(model, tmp_path):
    model.build_prefix_cache(TOKENS[:20]).save(tmp_path / "cache")
    with_contents(tmp_path / "cache", lambda c: c.update(entries=[], spans=[]))
    with pytest.raises(tl.FormatError, match="has one entry, this one has 0"):
        model.load_prefix_cache(tmp_path / "cache")
    assert model.kv_nbytes == 0


def test_tokens_outside_the_vocabulary_are_refused(model, saved):
    with TensorFile(saved, FORMAT, VERSION) as file:
        arrays = {name: np.array(file.read(name, e.dtype, e.shape)) for name, e in file.entries.items()}
        tensors, text = {name: (e.dtype, e.shape) for name, e in file.entries.items()}, file.text
    arrays["entry.0.tokens"][3] = 10**6
    with TensorFileWriter(saved, tensors, text) as writer:
        for name, array in arrays.items():
            writer.append(name, array)
    assert_refused(model, saved, text="outside the vocabulary")


# ---- the weights' fingerprint


def test_the_fingerprint_is_of_the_weights_not_of_the_file(backend, path, tmp_path):
    """Another file of the same weights, with another tokenizer and without checksums, takes the cache; a changed weight does not."""
    from safetensors.numpy import save_file

    config = CONFIGS["loop_bare"]
    with open_model(backend, "loop_bare") as model:
        model.build_prefix_cache(TOKENS[:20], 2).save(path)
    tensors = random_model(config)
    free = dataclasses.replace(config, extra={"from": "elsewhere"}, max_loops=3, default_loops=2, trained_loops=2)
    bare = tmp_path / "bare.tinyloop"
    text = {"format": "tinyloop", "version": "1", "config": free.to_json(), "stop_ids": "[3]"}
    arrays = {name: array for name, (_, array) in stored(config, tensors, "f32").items()}
    save_file(arrays, bare, text)
    with tl.Model(bare, 64, device=backend) as other:
        cache = other.load_prefix_cache(path)
        assert other.generate_from_prefix_cache(cache, 5, **GREEDY) == other.generate(TOKENS[:20], 5, 2, **GREEDY)
    arrays["core.0.attn.q.weight"] = arrays["core.0.attn.q.weight"].copy()
    arrays["core.0.attn.q.weight"][0, 0] += 1
    save_file(arrays, bare, text)
    with tl.Model(bare, 64, device=backend) as other:
        assert_refused(other, path, ValueError, "other weights", load="load_prefix_cache")
    with tl.Model(bare, 64, device=backend) as other:
        os.utime(bare, ns=(1, 1))
        with pytest.raises(RuntimeError, match="has changed since"):
            other.load_prefix_cache(path)


# ---- memory and time


def test_a_failure_at_every_page_of_a_load_changes_nothing(model, saved):
    kept = model.build_prefix_cache(TOKENS[:20])
    held, store = model.kv_nbytes, model._engine.plan.store
    with PageFault(model) as count:
        model.load_pool(saved)
    assert count.taken > 10
    for nth in range(1, count.taken + 1):
        with PageFault(model, nth), pytest.raises(tl.OutOfMemoryError):
            model.load_pool(saved)
        assert model.kv_nbytes == held and store.reserved_nbytes == 0
    assert model.load_pool(saved).size() == 2 and not kept.closed


def test_a_load_beyond_the_budget_is_refused_before_it_works(backend, model, saved):
    loaded = model.load_pool(saved)
    nbytes = model.kv_nbytes
    del loaded
    with open_model(backend, "shipped", "bf16", max_seq_len=256, kv_budget=nbytes) as other:
        assert other.load_pool(saved).size() == 2
    with open_model(backend, "shipped", "bf16", max_seq_len=256, kv_budget=nbytes - 1) as other, PageFault(other) as count:
        with pytest.raises(tl.OutOfMemoryError, match=r"^out of memory: .* kv_budget"):
            other.load_pool(saved)
        assert count.taken == 0 and other.kv_nbytes == 0


def test_a_failed_save_leaves_the_old_file(model, path, monkeypatch):
    cache = model.build_prefix_cache(TOKENS[:40])
    cache.save(path)
    before = path.read_bytes()
    for nth in range(6):
        calls = iter(range(100))
        append = TensorFileWriter.append

        def fails(self, name, values, calls=calls, nth=nth, append=append):
            if next(calls) == nth:
                raise OSError("the disk is gone")
            append(self, name, values)

        with monkeypatch.context() as patch:
            patch.setattr(TensorFileWriter, "append", fails)
            with pytest.raises(OSError, match="the disk is gone"):
                model.build_prefix_cache(TOKENS[:50]).save(path)
        assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]
    with pytest.raises(FileNotFoundError):
        cache.save(path.parent / "absent" / "x")


def test_a_closed_cache_does_not_save(backend, path):
    model = open_model(backend)
    cache, other = model.build_prefix_cache(TOKENS[:10]), model.build_prefix_cache(TOKENS[:10])
    cache.close()
    with pytest.raises(RuntimeError, match="closed"):
        cache.save(path)
    model.close()
    with pytest.raises(RuntimeError, match="closed"):
        other.save(path)
    assert not path.exists()


def test_saving_and_loading_while_others_work(model, tmp_path):
    """Threads register, evict, generate, save and load at once; every file that is written is whole."""
    pool = tl.PrefixPool(3)
    want = {seed: model.generate(random_tokens(model.config, 40, seed=seed), 6, **GREEDY) for seed in range(5)}
    errors, done = [], threading.Event()

    def register():
        for round_ in range(40):
            tokens = random_tokens(model.config, 40, seed=round_ % 5)
            model.register_prefix(pool, tokens)
            if model.generate_with_pool(pool, tokens, 6, **GREEDY) != want[round_ % 5]:
                errors.append(f"wrong answer in round {round_}")

    def save(i):
        path = tmp_path / str(i)
        n_loaded = 0
        while not done.is_set() or not n_loaded:
            pool.save(path)
            loaded = model.load_pool(path)
            for entry in loaded.entries():
                seed = next(s for s in range(5) if np.array_equal(entry.tokens, random_tokens(model.config, 40, seed=s)))
                if model.generate_with_pool(loaded, entry.tokens, 6, **GREEDY) != want[seed]:
                    errors.append("wrong answer from a file")
                n_loaded += 1

    def run(call, *arguments):
        try:
            call(*arguments)
        except Exception as error:
            errors.append(error)

    savers = [threading.Thread(target=run, args=(save, i)) for i in range(2)]
    workers = [threading.Thread(target=run, args=(register,)) for _ in range(2)]
    for t in savers + workers:
        t.start()
    for t in workers:
        t.join()
    done.set()
    for t in savers:
        t.join()
    assert not errors
    pool.clear()
    assert model.kv_nbytes == 0 and model._engine.plan.store.reserved_nbytes == 0


def test_a_model_closed_in_mid_save_leaves_no_file(backend, tmp_path, monkeypatch):
    model = open_model(backend)
    cache = model.build_prefix_cache(TOKENS)
    append = TensorFileWriter.append

    def closes(self, name, values):
        append(self, name, values)
        model.close()

    monkeypatch.setattr(TensorFileWriter, "append", closes)
    with pytest.raises(RuntimeError, match="closed"):
        cache.save(tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_entries_are_what_the_pool_holds(model, path):
    """The payload that a loaded pool holds is the one that was saved."""
    pool = tl.PrefixPool()
    for n in (30, 64, 100):
        model.register_prefix(pool, TOKENS[:n])
    pool.save(Path(path))
    loaded = model.load_pool(str(path))
    for n in (30, 64, 100):
        assert_same_prefix(model, entry_of(loaded, model, TOKENS[:n]).payload, model, entry_of(pool, model, TOKENS[:n]).payload)


def test_a_save_that_fails_as_it_ends_leaves_no_file(model, path, monkeypatch, tmp_path):
    """What had its temporary name by then kept it."""
    pool = tl.PrefixPool()
    model.register_prefix(pool, TOKENS[:20])
    monkeypatch.setattr("tinyloop_py.atomic_file.os.replace", lambda *_: (_ for _ in ()).throw(OSError(5, "broken")))
    with pytest.raises(OSError, match="broken"):
        pool.save(path)
    assert os.listdir(path.parent) == []
