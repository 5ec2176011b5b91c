"""A one-row step as one CUDA kernel (cuda/step.cu): the bits of the kernels one by one, and nobody who waits in vain.

Skipped where the run has no CUDA backend; what counts kernels, or has CTAs run unfairly, takes the emulator (TINYLOOP_TEST_BACKENDS=cuda-emulated).
"""

import emulated_cuda
import pytest
from models import CONFIGS, random_model, random_tokens, small
from runtime import backends, kv_of, open_model, same_kv

import tinyloop_py as tl

pytestmark = pytest.mark.skipif("cuda" not in backends(), reason="no CUDA device, and TINYLOOP_TEST_BACKENDS does not name cuda-emulated")


@pytest.mark.parametrize(
    ("name", "dtype", "kv_mode", "loops", "window"),
    [
        ("shipped", "bf16", "fp16", 1, 0), ("shipped", "int8", "bf16", 5, 24), ("ouro", "f16", "fp16", 4, 0), ("qwen2", "bf16", "bf16", 2, 0),
        ("huginn", "int8", "bf16", 3, 0), ("zero_init", "bf16", "fp16", 3, 0), ("ouro", "bf16", "bf16", 6, 0),
        ("shipped", "bf16", "int8", 5, 24), ("nanbeige", "int8", "int8", 2, 0), ("qwen3", "f16", "int8", 1, 0), ("zero_init", "bf16", "int8", 3, 0),
        ("ouro", "bf16", "int4", 4, 24), ("nanbeige", "bf16", "int4", 2, 0), ("qwen3", "f16", "int4", 1, 0), ("huginn", "int8", "int4", 3, 17),
        ("linear", "bf16", "int4", 1, 0),
    ],
)  # fmt: skip
def test_a_step_as_one_kernel_has_the_same_bits(name, dtype, kv_mode, loops, window, monkeypatch):
    prompt, found, n_kernels = random_tokens(CONFIGS[name], 60), [], []
    device = emulated_cuda.installed()
    for steps in ("0", "1"):
        monkeypatch.setenv("TINYLOOP_CUDA_STEP", steps)
        with open_model("cuda", name, dtype, kv_mode=kv_mode, max_seq_len=128) as model:
            before = device.kernels.emulator_n_kernels() if device else 0
            cache = model.build_prefix_cache(prompt[:59], loops, window)
            with cache, model.generate_stream(prompt, 8, loops=loops, temperature=0.0, stop_tokens=(), cache_window=window, logprobs=3) as stream:
                drawn = [(token, stream.logprobs) for token in stream]
            ahead = model.generate(prompt, 8, loops=loops, temperature=0.0, stop_tokens=(), cache_window=window)
            found.append((drawn, ahead, kv_of(model, prompt, loops=loops, window=window, splits=(57, 58, 59))))
            n_kernels.append(device.kernels.emulator_n_kernels() - before if device else 2 - len(found))
    assert found[0][:2] == found[1][:2] and same_kv(found[0][2], found[1][2])
    assert n_kernels[1] < n_kernels[0]


@pytest.mark.parametrize(("dtype", "group_size"), [("bf16", None), ("int8", None), ("int8", 64)])
def test_a_step_as_one_kernel_sums_whole_chunks_and_what_is_left(dtype, group_size, tmp_path, monkeypatch):
    """Rows of 544 and 1,056 values are chunks of 256 columns, one or two an item, and a rest."""
    config = small(dim=544, ffn_dim=1056, n_heads=34, n_kv_heads=2, head_dim=16, n_core=2, default_loops=2, trained_loops=2)
    weights = random_model(config, dtype=dtype, group_size=group_size)
    tl.save_model(tmp_path / "m.tinyloop", config, weights, dtype=dtype, group_size=group_size)
    prompt, found = random_tokens(config, 70), []
    for steps in ("0", "1"):
        monkeypatch.setenv("TINYLOOP_CUDA_STEP", steps)
        with tl.Model(tmp_path / "m.tinyloop", 96, device="cuda") as model, model.generate_stream(prompt, 4, temperature=0.0, logprobs=3) as stream:
            found.append([(token, stream.logprobs) for token in stream])
    assert found[0] == found[1]


@pytest.mark.parametrize("kv_mode", ["fp16", "int8", "int4"])
def test_a_step_as_one_kernel_has_the_same_bits_behind_long_contexts(kv_mode, tmp_path, monkeypatch):
    """States of key chunks are merged in spans of 32, 2,048 tokens, and their places are used again behind four of them."""
    if emulated_cuda.installed():
        pytest.skip("thousands of tokens take the emulator minutes")
    config = small(dim=64, ffn_dim=64, n_heads=6, n_kv_heads=2, head_dim=48, n_core=2, default_loops=2, trained_loops=2)
    tl.save_model(tmp_path / "m.tinyloop", config, random_model(config, dtype="bf16"), dtype="bf16")
    prompt, found = random_tokens(config, 20000), []
    for steps in ("0", "1"):
        monkeypatch.setenv("TINYLOOP_CUDA_STEP", steps)
        with tl.Model(tmp_path / "m.tinyloop", 20100, device="cuda", kv_mode=kv_mode) as model:
            found.append([])
            for n, window in ((2000, 0), (4090, 0), (6200, 0), (20000, 0), (20000, 9000)):
                with model.generate_stream(prompt[:n], 70, temperature=0.0, stop_tokens=(), cache_window=window, logprobs=3) as stream:
                    found[-1].append([(token, stream.logprobs) for token in stream])
    assert found[0] == found[1]


def test_rows_share_the_tasks_of_a_step_as_one_kernel(emulated, tmp_path, monkeypatch):
    """Tasks are kept for a kind of step, not for each of the rows that take turns at it: memory for them does not run out."""
    monkeypatch.setenv("TINYLOOP_CUDA_STEP", "1")
    config = small(dim=32, ffn_dim=48, n_heads=2, n_kv_heads=1, head_dim=16, n_core=24, default_loops=2, trained_loops=2)
    tl.save_model(tmp_path / "m.tinyloop", config, random_model(config, dtype="bf16"), dtype="bf16")
    with tl.Model(tmp_path / "m.tinyloop", 64, device="cuda") as model:
        prompt = random_tokens(config, 5)
        want, running, n_kernels = model.generate(prompt, 2, temperature=0.0, stop_tokens=()), [], []
        for _ in range(7):
            before = emulated.kernels.emulator_n_kernels()
            running.append(model._start(prompt, 8, temperature=0.0, stop_tokens=()))
            assert [next(running[-1]), next(running[-1])] == want[5:]
            n_kernels.append(emulated.kernels.emulator_n_kernels() - before)
        assert len(set(n_kernels[1:])) == 1  # the first one takes the lane that was there


@pytest.mark.parametrize("kv_mode", ["fp16", "int8", "int4"])
@pytest.mark.parametrize(
    "changes",
    [
        {"n_core": 3},  # a CTA has no chunk, and merges nothing
        {"head_dim": 4, "n_core": 3},  # heads are mostly padding
        {"dim": 36, "loop_norm": "every", "default_loops": 3},  # a row that is stored has padding that is added to
        {"dim": 100, "n_heads": 20, "n_kv_heads": 5, "inject": "add", "default_loops": 4},  # more units than CTAs
        {"n_heads": 20, "n_core": 3, "block_norm": "sum_sandwich"},
        # Products begin behind the CTAs that the task before keeps, and attention is merged by few of its CTAs.
        {"dim": 80, "ffn_dim": 112, "n_heads": 4, "n_kv_heads": 2, "n_core": 3, "block_norm": "sandwich", "default_loops": 4, "multiprocessors": 14},
    ],
    ids=["idle", "padded heads", "padded rows", "units", "queries", "many CTAs"],
)
def test_a_step_as_one_kernel_waits_for_nobody_who_went_on(changes, kv_mode, emulated, tmp_path, monkeypatch):
    """Words that CTAs hand to each other are written again: not before all who wait for them have read them, however slow one CTA is."""
    changes = {"multiprocessors": 3, **changes}
    monkeypatch.setenv("TINYLOOP_EMULATOR_MULTIPROCESSORS", str(changes.pop("multiprocessors")))
    config = small(**{"dim": 16, "ffn_dim": 16, "n_heads": 1, "n_kv_heads": 1, "head_dim": 16, **changes})
    tl.save_model(tmp_path / "m.tinyloop", config, random_model(config, dtype="bf16"), dtype="bf16")
    prompt, found, n_kernels = random_tokens(config, 70), [], []
    monkeypatch.setenv("TINYLOOP_EMULATOR_UNFAIR", "1")
    for steps in ("0", "1"):
        monkeypatch.setenv("TINYLOOP_CUDA_STEP", steps)
        with tl.Model(tmp_path / "m.tinyloop", 96, device="cuda", kv_mode=kv_mode) as model:
            before = emulated.kernels.emulator_n_kernels()
            found.append([model.generate(prompt[:n], n_more, temperature=0.0, stop_tokens=()) for n, n_more in ((3, 9), (70, 11))])
            found[-1].append(model.generate(prompt[:3], 9, temperature=0.0, stop_tokens=(found[-1][0][5],)))  # steps ahead do nothing
            n_kernels.append(emulated.kernels.emulator_n_kernels() - before)
    assert found[0] == found[1] and n_kernels[1] < n_kernels[0]
