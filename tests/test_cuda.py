"""What is CUDA's alone: decoding lanes, memory on the device, and errors. Skipped where the run has no CUDA backend.

Counters of allocations and graphs are the emulator's (TINYLOOP_TEST_BACKENDS=cuda-emulated); the rest holds on a GPU as well.
"""

import gc
import signal
import sys
import warnings
from pathlib import Path

import emulated_cuda
import numpy as np
import pytest
from models import CONFIGS, random_model, random_tokens, small
from runtime import backends, kv_of, open_model, same_bits, same_kv
from tolerances import TOLERANCES

import tinyloop_py as tl
from tinyloop_py import devices
from tinyloop_py.cuda_device import CudaDevice
from tinyloop_py.kv_export import export_kv
from tinyloop_py.lockstep import step_generations

pytestmark = pytest.mark.skipif("cuda" not in backends(), reason="no CUDA device, and TINYLOOP_TEST_BACKENDS does not name cuda-emulated")
PROMPT = random_tokens(CONFIGS["shipped"], 40)


def step_by_step(model, prompt, max_tokens, **how):
    """The tokens of a generation that asks for logits, and so never runs ahead."""
    generation = model._start(prompt, max_tokens, run_prompt=False, **how)
    generation.keep_logits()
    return generation.run()


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.2, "seed": 4, "repetition_penalty": 1.3},
        {"temperature": 0.0, "logit_bias": {5: 8.0, 9: -float("inf")}},
        {"temperature": 0.9, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "cache_window": 24},
    ],
    ids=["greedy", "drawn", "penalty", "bias", "filters and window"],
)
def test_steps_that_run_ahead_draw_what_single_steps_draw(how):
    with open_model("cuda", "shipped", "bf16") as model:
        ahead = model.generate(PROMPT, 37, loops=2, stop_tokens=(), **how)
        assert ahead == step_by_step(model, PROMPT, 37, loops=2, stop_tokens=(), **how)
        for stop in (ahead[43], ahead[60]):
            stopped = model.generate(PROMPT, 37, loops=2, stop_tokens=(stop,), **how)
            assert stopped == ahead[: ahead.index(stop, 40) + 1]
        assert model.kv_nbytes == 0


def test_what_a_handler_raises_in_the_device_s_code_is_no_failure_of_a_hit(monkeypatch):
    """A signal may come where Python runs between calls of CUDA, and not only where a step has ended."""

    def limit(*_):
        raise TimeoutError("enough")

    def interrupted(device, doing):
        signal.raise_signal(signal.SIGALRM)
        wait(device, doing)

    with open_model("cuda", "shipped", "bf16") as model:
        pool, wait = tl.PrefixPool(), CudaDevice.wait
        model.register_prefix(pool, PROMPT[:20])
        held, before = model.kv_nbytes, signal.signal(signal.SIGALRM, limit)
        try:
            for call in (
                model.generate_with_pool,
                lambda pool, prompt, n: model.generate_batch([prompt], n, pool=pool),
                lambda pool, prompt, n: model.build_resume_handle(prompt, pool=pool),
            ):
                monkeypatch.setattr(CudaDevice, "wait", interrupted)
                with pytest.raises(TimeoutError, match="enough"):
                    call(pool, PROMPT, 5)
                monkeypatch.undo()
        finally:
            signal.signal(signal.SIGALRM, before)
        assert pool.stats().fallbacks == pool.stats().queries == 0 and model.kv_nbytes == held
        assert model.generate_with_pool(pool, PROMPT, 5, temperature=0.0) == model.generate(PROMPT, 5, temperature=0.0)


@pytest.mark.parametrize(
    ("name", "dtype", "group_size", "kv_mode"),
    [
        ("shipped", "bf16", None, "fp16"),
        ("qwen2", "bf16", None, "bf16"),
        ("huginn", "int8", 64, "bf16"),
        ("ouro", "f16", None, "fp16"),
        ("shipped", "bf16", None, "int8"),
        ("qwen3", "bf16", None, "int8"),
        ("qwen2", "f16", None, "int4"),
        ("huginn", "bf16", None, "int4"),
    ],
)
def test_prompts_give_the_same_bits_however_they_run(name, dtype, group_size, kv_mode):
    """The matrix of test_exactness.py at one loop and few splits: what the emulator can do in seconds."""
    tokens = random_tokens(CONFIGS[name], 90)
    with open_model("cuda", name, dtype, group_size=group_size, kv_mode=kv_mode, max_seq_len=128) as model:
        cold = kv_of(model, tokens, loops=1)
        for splits in ((17,), (64,), (65,), (1, 15, 16, 17, 63, 64, 65, 89)):
            assert same_kv(cold, kv_of(model, tokens, loops=1, splits=splits)), f"split at {splits}"
        together = model.logits(tokens, 1)
        for n in (1, 2, 9, 17, 65):
            assert same_bits(together[n - 1], model.logits(tokens[:n], 1, last_only=True)[0]), f"row {n - 1}"
        narrow = kv_of(model, tokens, loops=1, window=20)
        assert same_kv(narrow, kv_of(model, tokens, loops=1, window=20, splits=(33, 81)))


@pytest.mark.parametrize(
    ("kv_mode", "head_dim", "n_kv_heads"),
    [
        ("fp16", 16, 8), ("bf16", 64, 8), ("fp16", 128, 16), ("bf16", 80, 8), ("int8", 16, 8), ("int8", 48, 16), ("int8", 160, 8),
        ("int4", 16, 8), ("int4", 80, 8), ("int4", 256, 8),
    ],
)  # fmt: skip
def test_many_rows_attend_with_the_bits_of_few(tmp_path, kv_mode, head_dim, n_kv_heads):
    """A prompt whose attention is 64 tiles of 64 queries or more has a kernel of its own; its parts, and single rows, don't."""
    config = small(dim=32, ffn_dim=48, n_heads=16, n_kv_heads=n_kv_heads, head_dim=head_dim, tied_embeddings=False)
    tl.save_model(tmp_path / "m.tinyloop", config, random_model(config, dtype="bf16"), dtype="bf16")
    tokens = random_tokens(config, 280)
    with tl.Model(tmp_path / "m.tinyloop", 512, device="cuda", kv_mode=kv_mode) as model:
        assert same_kv(kv_of(model, tokens, window=200), kv_of(model, tokens, window=200, splits=(130,)))
        pool, logits = tl.PrefixPool(), model.logits(tokens, last_only=True)
        model.register_prefix(pool, tokens[:-1])
        generation = model._start(tokens, 1, pool=pool, temperature=0.0, run_prompt=False)
        generation.keep_logits()
        generation.run()
        assert pool.stats().hits == 1 and same_bits(np.asarray(generation.logits), logits[0])


@pytest.mark.parametrize(
    ("dtype", "kv_mode", "head_dim", "changes"),
    [
        ("bf16", "bf16", 128, {}),
        ("bf16", "fp16", 64, {"attn_bias": "qkvo", "n_kv_heads": 1}),
        ("int8", "bf16", 64, {"n_heads": 5, "n_kv_heads": 5}),
        ("f16", "fp16", 128, {"activation": "gelu", "block_norm": "post"}),
        ("bf16", "bf16", 80, {"qk_norm": "head"}),
        ("bf16", "bf16", 64, {"n_heads": 1, "n_kv_heads": 1, "ffn_dim": 1344}),
    ],
    ids=["bf16", "biases", "int8", "f16", "by row", "two kernels"],
)
def test_many_rows_multiply_with_the_bits_of_few(tmp_path, dtype, kv_mode, head_dim, changes):
    """More than 128 rows multiply in tiles, several to a CTA, whose ends run under the products of the next; fewer rows do not.

    The last case is one that two kernels share where the device is as small as the emulator's.
    """
    sizes = {"dim": 288, "ffn_dim": 336, "n_heads": 3, "n_kv_heads": 3, "head_dim": head_dim, "n_core": 1}
    config = small(**{**sizes, "tied_embeddings": False, **changes})
    tl.save_model(tmp_path / "m.tinyloop", config, random_model(config, dtype=dtype), dtype=dtype)
    tokens = random_tokens(config, 300)
    with tl.Model(tmp_path / "m.tinyloop", 320, device="cuda", kv_mode=kv_mode) as model:
        whole = kv_of(model, tokens, loops=2)
        assert same_kv(whole, kv_of(model, tokens, loops=2, splits=(40, 100, 180, 250)))
        together = model.logits(tokens, 2)
        for n in (1, 20, 129, 300):
            assert same_bits(together[n - 1], model.logits(tokens[:n], 2, last_only=True)[0]), f"row {n - 1}"


@pytest.mark.parametrize(("kv_mode", "head_dim", "window"), [("bf16", 64, 0), ("fp16", 128, 1060)])
def test_some_rows_attend_with_the_bits_of_one(tmp_path, kv_mode, head_dim, window):
    """Rows of a prompt behind more keys than a group of chunks has: a cluster merges them, and a single row another kernel."""
    config = small(dim=32, ffn_dim=48, n_heads=2, n_kv_heads=1, head_dim=head_dim, n_core=1)
    tl.save_model(tmp_path / "m.tinyloop", config, random_model(config, dtype="bf16"), dtype="bf16")
    tokens = random_tokens(config, 1100)
    with tl.Model(tmp_path / "m.tinyloop", 1200, device="cuda", kv_mode=kv_mode) as model:
        pool = tl.PrefixPool()
        model.register_prefix(pool, tokens[:1060], cache_window=window)
        together = model.logits(tokens, last_only=True) if not window else None
        found = []
        for ends in ((1100,), (1061, 1070, 1099, 1100)):
            for end in ends:
                generation = model._start(tokens[:end], 1, pool=pool, temperature=0.0, cache_window=window, run_prompt=False)
                generation.keep_logits()
                generation.run()
                if end == 1100:
                    found.append(np.array(generation.logits))
                else:
                    model.register_prefix(pool, tokens[:end], cache_window=window)
        assert same_bits(found[0], found[1]) and (together is None or same_bits(found[0], together[0]))


def test_some_rows_attend_within_the_window_of_each_layer(tmp_path):
    """What attention of some rows is cut into is found once for each window that layers have, of a few; layers with others have another kernel."""
    config = small(dim=32, ffn_dim=48, n_heads=2, n_kv_heads=2, head_dim=64, n_core=6, layer_windows=(20, 0, 100, 70, 20, 33))
    tl.save_model(tmp_path / "m.tinyloop", config, random_model(config, dtype="bf16"), dtype="bf16")
    tokens = random_tokens(config, 150)
    with tl.Model(tmp_path / "m.tinyloop", 192, device="cuda", kv_mode="bf16") as model:
        ones = kv_of(model, tokens, loops=1, splits=(*range(100, 108), 148, 149))
        assert same_kv(ones, kv_of(model, tokens, loops=1, splits=(100, 108, 120)))
        assert same_kv(ones, kv_of(model, tokens, loops=1))


def test_a_tile_of_rows_of_several_sequences_has_the_bits_of_each(tmp_path):
    """Prompts of a batch run in the same steps: a tile of 64 queries has rows of several, each with keys of its own."""
    config = small(dim=32, ffn_dim=48, n_heads=2, n_kv_heads=1, head_dim=64, n_core=1, vocab_size=4096)
    tl.save_model(tmp_path / "m.tinyloop", config, random_model(config, dtype="bf16"), dtype="bf16")
    tokens = random_tokens(config, 100)
    prompts = [tokens[:9], tokens[3:80], tokens[:2], tokens[20:31], tokens[:97]]
    with tl.Model(tmp_path / "m.tinyloop", 128, device="cuda", kv_mode="bf16") as model:
        alone = [model.generate(p, 6, temperature=0.0, stop_tokens=()) for p in prompts]
        assert model.generate_batch(prompts, 6, temperature=0.0, stop_tokens=()) == alone


@pytest.mark.parametrize(("name", "dtype", "group_size"), [("ouro", "bf16", None), ("odd", "f32", None), ("huginn", "int8", 64)])
def test_h_mode_rebuilds_the_bits_of_fp16(name, dtype, group_size):
    tokens = random_tokens(CONFIGS[name], 90)
    with (
        open_model("cuda", name, dtype, group_size=group_size) as plain,
        open_model("cuda", name, dtype, group_size=group_size, kv_mode="h") as model,
    ):
        want = kv_of(plain, tokens, loops=1)
        for splits in ((), (1, 17), (64, 89)):
            assert same_kv(want, kv_of(model, tokens, loops=1, splits=splits)), f"split at {splits}"


def test_generations_that_take_turns_keep_their_own_rows():
    with open_model("cuda", "shipped", "bf16") as model:
        prompts = [random_tokens(CONFIGS["shipped"], n, seed=n) for n in (5, 31, 64)]
        alone = [model.generate(p, 20, loops=2, temperature=1.0, seed=n, stop_tokens=())[len(p) :] for n, p in enumerate(prompts)]
        running = [model._start(p, 20, loops=2, temperature=1.0, seed=n, stop_tokens=()) for n, p in enumerate(prompts)]
        together = [[] for _ in prompts]
        for _ in range(20):
            for generation, tokens in zip(running, together, strict=True):
                tokens.append(next(generation))
        assert together == alone


def test_what_a_closed_generation_had_launched_disturbs_nobody():
    with open_model("cuda", "shipped", "bf16") as model:
        want = model.generate(PROMPT, 30, loops=2, temperature=0.0, stop_tokens=())
        for n in (1, 2, 5, 17):
            cut = model._start(random_tokens(CONFIGS["shipped"], 50, seed=7), 60, loops=2, stop_tokens=())
            for _ in range(n):
                next(cut)
            cut.close()
            assert model.kv_nbytes == 0
            assert model.generate(PROMPT, 30, loops=2, temperature=0.0, stop_tokens=()) == want


def test_single_steps_may_follow_steps_that_ran_ahead():
    with open_model("cuda", "shipped", "bf16") as model:
        want = model.generate(PROMPT, 30, loops=2, temperature=0.0, stop_tokens=())
        generation = model._start(PROMPT, 30, loops=2, temperature=0.0, stop_tokens=())
        drawn = [next(generation) for _ in range(7)]
        drawn += [step_generations([generation])[0] for _ in range(6)]
        drawn += list(generation)
        assert [*PROMPT.tolist(), *drawn] == want


def test_an_output_that_is_kept_is_the_prefix_of_its_tokens():
    """Steps that ran ahead leave what a cold run of prompt and output leaves."""
    with open_model("cuda", "shipped", "bf16") as model:
        for n in (23, 7):
            generation = model._start(PROMPT, 23, loops=2, temperature=0.0, stop_tokens=())
            generation.hold = True
            tokens = [*PROMPT.tolist(), *(next(generation) for _ in range(n))]
            kept = generation.keep()
            want = model._engine.build_prefix(np.array(tokens, np.int32), 2, 0)
            assert same_kv(export_kv(model._engine, kept), export_kv(model._engine, want))
            assert same_bits(np.asarray(kept.final_x), np.asarray(want.final_x))
            generation.close()


def test_a_warm_request_allocates_nothing_and_makes_no_graph(emulated):
    with open_model("cuda", "shipped", "bf16") as model:
        pool = tl.PrefixPool()
        model.register_prefix(pool, PROMPT, loops=2)

        def request(seed):
            tokens = random_tokens(CONFIGS["shipped"], 60, seed=seed)
            model.generate(np.concatenate([PROMPT, tokens]), 30, loops=2, temperature=1.0, repetition_penalty=1.1)
            model.generate_with_pool(pool, np.concatenate([PROMPT, tokens]), 30, loops=2, logit_bias={1: 1.0})

        request(1)
        calls, graphs = emulated.n_calls, emulated.n_instantiated
        for seed in range(2, 6):
            request(seed)
        assert (emulated.n_calls, emulated.n_instantiated) == (calls, graphs)


def test_some_rows_of_a_sequence_repeat_a_graph_for_each_number_of_rows(emulated):
    with open_model("cuda", "shipped", "bf16") as model:
        pool, prefix = tl.PrefixPool(), random_tokens(CONFIGS["shipped"], 80)
        model.register_prefix(pool, prefix, loops=2)

        def behind(n):
            prompt = np.concatenate([prefix, random_tokens(CONFIGS["shipped"], n, seed=n)])
            launched = emulated.n_launched
            tokens = model.generate_with_pool(pool, prompt, 1, loops=2, temperature=0.0)
            launched = emulated.n_launched - launched
            assert tokens == model.generate(prompt, 1, loops=2, temperature=0.0)
            return launched

        behind(20)
        assert [behind(n) for n in (17, 25, 32)] == [1, 1, 1]  # all are filled up to 32 rows
        behind(128)
        assert behind(65) == 1


def test_closing_gives_everything_back(emulated):
    gc.collect()
    before = emulated.used(), dict(emulated.reserved), emulated.n_graphs
    for _ in range(2):
        model = open_model("cuda", "huginn", "int8")
        pool = tl.PrefixPool()
        model.register_prefix(pool, random_tokens(CONFIGS["huginn"], 70))
        stream = model._start(random_tokens(CONFIGS["huginn"], 10), 20)
        next(stream)
        model.close()
        with pytest.raises(RuntimeError, match="closed"):
            list(stream)
        del model, pool, stream
        gc.collect()
        assert (emulated.used(), dict(emulated.reserved), emulated.n_graphs) == before


def test_rounds_of_register_evict_and_generate_do_not_grow(emulated):
    with open_model("cuda", "loop_bare", "bf16", max_seq_len=128) as model:
        pool, used = tl.PrefixPool(3), []
        for i in range(40):
            tokens = random_tokens(CONFIGS["loop_bare"], 20 + i % 20, seed=i)
            model.register_prefix(pool, tokens)
            model.generate_with_pool(pool, tokens, 4)
            used.append(emulated.used())
        assert max(used[20:]) == max(used[:20])
        pool.clear()
        assert model.kv_nbytes == 0


def test_out_of_memory_says_what_was_asked_and_loses_nothing(emulated, monkeypatch):
    with open_model("cuda", "shipped", "bf16") as model:
        pool = tl.PrefixPool()
        model.register_prefix(pool, PROMPT)
        want = model.generate_with_pool(pool, PROMPT, 5, temperature=0.0)
        monkeypatch.setattr(emulated, "nbytes", emulated.used())
        with pytest.raises(tl.OutOfMemoryError, match=r"^out of memory: .*[\d,]+ bytes.* free"):
            model.generate(random_tokens(CONFIGS["shipped"], 400), 100, loops=1)
        assert model.generate_with_pool(pool, PROMPT, 5, temperature=0.0) == want
        monkeypatch.undo()
        model.generate(random_tokens(CONFIGS["shipped"], 60), 5, loops=1)
        monkeypatch.setattr(emulated, "nbytes", emulated.used() + (1 << 20))
        with pytest.raises(tl.OutOfMemoryError, match=r"^out of memory"):
            open_model("cuda", "ouro", "bf16")
        assert model.generate_with_pool(pool, PROMPT, 5, temperature=0.0) == want


def assert_same_choices(gpu, cpu, prompts, max_tokens, loops):
    """Greedy tokens agree; where they part, the CPU's own choice leads by less than the tolerance of logits, and that is printed."""
    for number, prompt in enumerate(prompts):
        ours, theirs = (m.generate(prompt, max_tokens, loops=loops, temperature=0.0, stop_tokens=()) for m in (gpu, cpu))
        if ours == theirs:
            continue
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        row = cpu.logits(theirs[:at], loops, last_only=True)[0]
        lead = (row[theirs[at]] - row[ours[at]]) / np.abs(row).max()
        print(f"prompt {number}: token {at} differs, the CPU's leads by {lead:.1e} of the largest logit")
        assert lead < TOLERANCES["bf16", "f16"].rounded


def test_greedy_tokens_are_those_of_the_cpu():
    with open_model("cuda", "shipped", "bf16") as gpu, open_model("cpu", "shipped", "bf16") as cpu:
        assert_same_choices(gpu, cpu, [random_tokens(CONFIGS["shipped"], 6 + n, seed=n) for n in range(20)], 6, 2)


def test_greedy_tokens_of_the_model_in_the_package_are_those_of_the_cpu():
    if emulated_cuda.installed():
        pytest.skip("takes the emulator an hour")
    text = (Path(__file__).parent / "data" / "heldout.txt").read_text()
    with tl.Model(tl.demo_model(), 512, device="cuda") as gpu, tl.Model(tl.demo_model(), 512, device="cpu") as cpu:
        tokens = np.array(gpu.tokenizer.encode(text).ids, np.int32)
        starts = np.linspace(0, len(tokens) - 128, 24).astype(int)
        assert_same_choices(gpu, cpu, [tokens[s : s + 20 + n] for n, s in enumerate(starts)], 64, None)


# ---- what is not there


# ---- errors of opening


NO_DRIVER, TOO_OLD, NO_DEVICE, NOT_STARTED = (35, 0), (35, 12040), (100, 13000), (3, 13000)


def answers(monkeypatch, status, version):
    """Has the driver be one that cannot be used."""
    runtime = sys.modules["cuda.bindings.runtime"]
    named = type("Named", (int,), {"name": "cudaError"})(status)
    monkeypatch.setattr(runtime, "cudaGetDeviceCount", lambda: (named, None))
    monkeypatch.setattr(runtime, "cudaDriverGetVersion", lambda: (0, version))
    monkeypatch.setattr(runtime, "cudaGetErrorString", lambda status: (0, b"initialization error"))
    devices._say_once.cache_clear()


@pytest.mark.parametrize(
    ("answer", "text"), [(NO_DRIVER, "no NVIDIA driver is installed"), (NO_DEVICE, "sees no device")], ids=["no driver", "no device"]
)
def test_where_no_gpu_is_auto_is_the_cpu_and_says_nothing(emulated, monkeypatch, answer, text):
    answers(monkeypatch, *answer)
    with pytest.raises(RuntimeError, match=text):
        open_model("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_model("auto") as model:
            assert model.device == "cpu"


@pytest.mark.parametrize(
    ("answer", "text"),
    [(TOO_OLD, r"driver is too old.*CUDA 12\.4"), (NOT_STARTED, "initialization error.* fork")],
    ids=["too old a driver", "a forked child"],
)
def test_a_driver_that_cannot_be_used_is_named_and_auto_takes_the_cpu(emulated, monkeypatch, answer, text):
    answers(monkeypatch, *answer)
    with pytest.raises(RuntimeError, match=text):
        open_model("cuda")
    with pytest.warns(RuntimeWarning, match=f"auto.*{text}"), open_model("auto") as model:
        assert model.device == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_model("auto").close()  # said once


def test_a_driver_that_is_not_there_is_named(emulated, monkeypatch):
    def absent():
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(sys.modules["cuda.bindings.runtime"], "cudaGetDeviceCount", absent)
    with pytest.raises(RuntimeError, match=r"no NVIDIA driver answers: Failed to dlopen libcuda\.so\.1"):
        open_model("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_model("auto") as model:
            assert model.device == "cpu"


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(RuntimeError, match="there is no CUDA device 99"):
        open_model("cuda:99")


def test_auto_is_the_first_device():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_model("auto") as model:
            assert model.device == "cuda:0"
            assert model.numerics_id.startswith("cuda-sm")


def test_an_error_that_sticks_says_so(emulated, monkeypatch):
    class Lost(int):
        name = "cudaErrorIllegalAddress"

    runtime = sys.modules["cuda.bindings.runtime"]
    with open_model("cuda", "shipped") as model:
        model.generate(PROMPT, 3)
        monkeypatch.setattr(runtime, "cudaStreamSynchronize", lambda stream: (Lost(700),))
        monkeypatch.setattr(runtime, "cudaGetErrorString", lambda status: (0, b"an illegal memory access was encountered"))
        with pytest.raises(RuntimeError, match=r"CUDA failed at running the model: cudaErrorIllegalAddress .*start a new one"):
            model.generate(PROMPT, 3)
        monkeypatch.undo()
