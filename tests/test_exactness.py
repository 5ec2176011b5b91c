"""Chunk, batch and run invariance (E1, E2, E3): KV and logits are equal to the last bit however they were computed."""

import dataclasses

import numpy as np
import pytest
from models import CONFIGS, random_model, random_tokens
from runtime import EDGES, ISAS, entry_of, kv_of, open_model, same_bits, same_kv, splits_before

import tinyloop_py as tl

N = 300  # past the last edge
DTYPES = (("f32", None), ("bf16", None), ("f16", None), ("int8", None), ("int8", 64))
KV_MODES = ("fp16", "bf16", "fp32", "int8", "int4")
QUANTISED = ("int8", "int4")
FAMILIES = ("shipped", "huginn", "ouro", "qwen2", "mixed_windows", "olmo2")  # every phase and norm between them


def last_logits(model, tokens, **how):
    """Logits after a prompt that goes through a pool hit at `split`, or cold."""
    return model.logits(tokens, last_only=True, **how)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_all_rows_equal_those_of_each_prefix_alone(backend, name):
    tokens = random_tokens(CONFIGS[name], 70)
    with open_model(backend, name, max_seq_len=80) as model:
        together = model.logits(tokens)
        for n in (1, 2, 16, 17, 63, 64, 65, 70):
            assert same_bits(together[n - 1], last_logits(model, tokens[:n])), f"row {n - 1}"


@pytest.mark.parametrize("kv_mode", KV_MODES)
@pytest.mark.parametrize(("dtype", "group_size"), DTYPES)
@pytest.mark.parametrize("name", FAMILIES[:3])
def test_kv_is_the_same_at_every_split(backend, name, dtype, group_size, kv_mode):
    tokens = random_tokens(CONFIGS[name], N)
    with open_model(backend, name, dtype, group_size=group_size, kv_mode=kv_mode) as model:
        cold = kv_of(model, tokens, loops=2)
        for split in splits_before(N):
            assert same_kv(cold, kv_of(model, tokens, loops=2, splits=(split,))), f"split at {split}"
        assert same_kv(cold, kv_of(model, tokens, loops=2, splits=EDGES)), "split at every edge"


@pytest.mark.parametrize("kv_mode", QUANTISED)
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in FAMILIES[:3]])
def test_quantised_kv_of_every_config_is_the_same_at_every_split(backend, name, kv_mode):
    tokens, loops = random_tokens(CONFIGS[name], 140), min(2, CONFIGS[name].trained_loops)
    with open_model(backend, name, kv_mode=kv_mode) as model:
        cold, together = kv_of(model, tokens, loops), model.logits(tokens, loops)
        assert same_kv(cold, kv_of(model, tokens, loops, splits=(1, 15, 33, 64, 100)))
        for n in (1, 17, 65, 140):
            assert same_bits(together[n - 1], last_logits(model, tokens[:n], loops=loops)), f"row {n - 1}"


@pytest.mark.parametrize("kv_mode", QUANTISED)
@pytest.mark.parametrize("window", [1, 15, 64, 100])
def test_quantised_kv_is_the_same_at_every_split_under_a_window(backend, window, kv_mode):
    tokens = random_tokens(CONFIGS["mixed_windows"], N)
    with open_model(backend, "mixed_windows", "bf16", kv_mode=kv_mode) as model:
        cold = kv_of(model, tokens, loops=2, window=window)
        for split in (17, 65, 257):
            assert same_kv(cold, kv_of(model, tokens, loops=2, window=window, splits=(split,))), f"split at {split}"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("window", [0, 1, 15, 17, 64, 100])
def test_kv_is_the_same_at_every_split_under_a_window(backend, name, window):
    tokens = random_tokens(CONFIGS[name], N)
    with open_model(backend, name, "bf16") as model:
        cold = kv_of(model, tokens, loops=2, window=window)
        for split in (16, 17, 65, 257):
            assert same_kv(cold, kv_of(model, tokens, loops=2, window=window, splits=(split,))), f"split at {split}"


@pytest.mark.parametrize(("dtype", "group_size"), DTYPES)
@pytest.mark.parametrize("kv_mode", KV_MODES)
def test_a_hit_at_any_split_gives_the_tokens_and_logits_of_a_cold_run(backend, dtype, group_size, kv_mode):
    tokens = random_tokens(CONFIGS["shipped"], N)
    with open_model(backend, "shipped", dtype, group_size=group_size, kv_mode=kv_mode) as model:
        cold = model.generate(tokens, 8, loops=3, temperature=0.0, stop_tokens=())
        drawn = model.generate(tokens, 8, loops=3, temperature=1.3, seed=11, stop_tokens=())
        for split in (*splits_before(N), N):
            pool = tl.PrefixPool()
            model.register_prefix(pool, tokens[:split], loops=3)
            assert model.generate_with_pool(pool, tokens, 8, loops=3, temperature=0.0, stop_tokens=()) == cold, f"split at {split}"
            assert model.generate_with_pool(pool, tokens, 8, loops=3, temperature=1.3, seed=11, stop_tokens=()) == drawn, f"split at {split}"
            stats = pool.stats()
            assert (stats.hits, stats.matched_tokens, stats.prefilled_tokens) == (2, 2 * split, 2 * (N - split))


def test_decoded_tokens_leave_the_kv_of_a_prompt_with_them(backend):
    prompt = random_tokens(CONFIGS["shipped"], 60)
    with open_model(backend, "shipped", "bf16") as model:
        whole = np.array(model.generate(prompt, 40, temperature=0.0, stop_tokens=()), np.int32)
        logits = model.logits(whole)
        # Each drawn token is the argmax of the logits that the whole text has there.
        assert [int(row.argmax()) for row in logits[59:-1]] == whole[60:].tolist()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "group_size", "kv_mode"), [*((*d, "fp16") for d in DTYPES), ("bf16", None, "int8"), ("f32", None, "int4")])
def test_threads_never_change_a_bit(dtype, group_size, kv_mode, threads):
    tokens = random_tokens(CONFIGS["huginn"], 130)
    with (
        open_model("cpu", "huginn", dtype, group_size=group_size, kv_mode=kv_mode, threads=1) as one,
        open_model("cpu", "huginn", dtype, group_size=group_size, kv_mode=kv_mode, threads=threads) as many,
    ):
        assert many.threads == threads
        assert same_bits(one.logits(tokens), many.logits(tokens))
        assert same_kv(kv_of(one, tokens), kv_of(many, tokens))
        assert one.generate(tokens, 6, temperature=0.0) == many.generate(tokens, 6, temperature=0.0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "group_size", "kv_mode"), [*((*d, "fp16") for d in DTYPES), ("bf16", None, "int8"), ("bf16", None, "int4")])
def test_every_code_path_is_invariant_within_itself(monkeypatch, isa, dtype, group_size, kv_mode):
    monkeypatch.setenv("TINYLOOP_CPU_ISA", isa)
    tokens = random_tokens(CONFIGS["qwen2"], N)
    try:
        model = open_model("cpu", "qwen2", dtype, group_size=group_size, kv_mode=kv_mode)
    except RuntimeError as error:
        pytest.skip(f"{isa}: {error}")
    with model:
        assert isa in model.numerics_id
        cold = kv_of(model, tokens)
        for split in splits_before(N):
            assert same_kv(cold, kv_of(model, tokens, splits=(split,))), f"split at {split}"
        together = model.logits(tokens)
        for n in EDGES:
            assert same_bits(together[n - 1], last_logits(model, tokens[:n])), f"row {n - 1}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_mode", ["fp32", "bf16", "int8", "int4"])
def test_scores_that_are_no_numbers_show_in_every_row(monkeypatch, tmp_path, isa, kv_mode):
    """Queries overflow, and with them every score is NaN: the output must be too, and no plausible numbers. float16's clamp keeps them finite."""
    monkeypatch.setenv("TINYLOOP_CPU_ISA", isa)
    config = dataclasses.replace(CONFIGS["llama"], rotary_dim=0)
    tensors = random_model(config)
    for name in tensors:
        if name.endswith("attn.q.weight"):
            tensors[name] = np.sign(tensors[name]) * np.float32(3e38)
    tl.save_model(tmp_path / "m.tinyloop", config, tensors)
    try:
        model = tl.Model(tmp_path / "m.tinyloop", N, device="cpu", kv_mode=kv_mode)
    except RuntimeError as error:
        pytest.skip(f"{isa}: {error}")
    with model:
        assert np.isnan(model.logits(random_tokens(config, N))).all()


def test_the_same_call_twice_gives_the_same_bits(backend):
    tokens = random_tokens(CONFIGS["ouro"], 100)
    with open_model(backend, "ouro", "bf16") as model:
        assert same_bits(model.logits(tokens), model.logits(tokens))
        first = model.generate(tokens, 20, temperature=1.0, seed=5, stop_tokens=())
        assert model.generate(tokens, 20, temperature=1.0, seed=5, stop_tokens=()) == first
        assert model.generate(tokens, 20, temperature=1.0, seed=6, stop_tokens=()) != first
    with open_model(backend, "ouro", "bf16") as again:
        assert again.generate(tokens, 20, temperature=1.0, seed=5, stop_tokens=()) == first


@pytest.mark.parametrize("kv_mode", KV_MODES)
def test_unused_kv_is_never_read(backend, kv_mode):
    """Pages come back from calls with other content; what they held never shows."""
    tokens, other = random_tokens(CONFIGS["shipped"], 90), random_tokens(CONFIGS["shipped"], 200, seed=9)
    with open_model(backend, "shipped", "bf16", kv_mode=kv_mode) as model:
        cold = model.logits(tokens)
        for n in (200, 33, 150):
            model.logits(other[:n])
            assert same_bits(model.logits(tokens), cold)


def test_a_full_hit_runs_no_prompt_row(backend):
    tokens = random_tokens(CONFIGS["retrofit_llama"], 77)
    with open_model(backend, "retrofit_llama", "bf16") as model:
        pool = tl.PrefixPool()
        model.register_prefix(pool, tokens)
        cold = model.generate(tokens, 12, temperature=0.0)
        assert model.generate_with_pool(pool, tokens, 12, temperature=0.0) == cold
        assert model.generate_with_pool(pool, tokens, 12, temperature=0.0) == cold  # the entry is as it was
        stats = pool.stats()
        assert (stats.full_hits, stats.prefilled_tokens) == (2, 0)
        payload = entry_of(pool, model, tokens).payload
        assert payload.boundary_x.shape == (CONFIGS["retrofit_llama"].default_loops, CONFIGS["retrofit_llama"].dim)
