"""Every backend against the float64 reference: logits, KV and hidden rows of every config, weight type and KV mode."""

import numpy as np
import pytest
from models import CONFIGS, random_model, random_tokens
from reference import Reference, Rounding
from runtime import as_float, entry_of, open_model
from tolerances import TOLERANCES, assert_close

import tinyloop_py as tl
from tinyloop_py.kv_export import export_kv

KV_DTYPES = {"fp16": "f16", "bf16": "bf16", "fp32": "f32", "int8": "int8", "int4": "int4"}
N = 80


def reference(name, dtype, kv_mode, group_size=None, *, rounded=True):
    rounding = Rounding.of(dtype, KV_DTYPES[kv_mode]) if rounded else None
    return Reference(CONFIGS[name], random_model(CONFIGS[name], 0, dtype, group_size), rounding)


@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_logits_of_every_config(backend, name):
    tokens = random_tokens(CONFIGS[name], N)
    with open_model(backend, name, kv_mode="fp32") as model:
        got = model.logits(tokens)
        assert_close(got, reference(name, "f32", "fp32").logits(tokens), "f32", "f32")
        want = reference(name, "f32", "fp32", rounded=False).logits(tokens)
        assert np.array_equal(got.argmax(1), want.argmax(1))


@pytest.mark.parametrize("kv_mode", ["int8", "int4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_kv_of_every_config(backend, name, kv_mode):
    """Every head size, group and norm: logits past the first chunk of keys, against the reference that quantises."""
    tokens = random_tokens(CONFIGS[name], 100)
    with open_model(backend, name, kv_mode=kv_mode) as model:
        got = model.logits(tokens)
    assert_close(got, reference(name, "f32", kv_mode).logits(tokens), "f32", kv_mode)
    assert_close(got, reference(name, "f32", kv_mode, rounded=False).logits(tokens), "f32", kv_mode, rounded=False)


@pytest.mark.parametrize("loops", [1, 2, 5, 8])
def test_fp32_logits_at_every_depth(backend, loops):
    tokens = random_tokens(CONFIGS["zero_init"], N)
    with open_model(backend, "zero_init", kv_mode="fp32") as model:
        assert_close(model.logits(tokens, loops), reference("zero_init", "f32", "fp32").logits(tokens, loops), "f32", "f32")


@pytest.mark.parametrize("window", [1, 7, 16, 33, 64, 79, 80, 500])
@pytest.mark.parametrize("name", ["shipped", "mixed_windows", "zero_init"])
def test_fp32_logits_under_every_window(backend, name, window):
    tokens = random_tokens(CONFIGS[name], N)
    with open_model(backend, name, kv_mode="fp32") as model:
        assert_close(model.logits(tokens, None, window), reference(name, "f32", "fp32").logits(tokens, None, window), "f32", "f32")


@pytest.mark.parametrize(("dtype", "kv_mode"), [(w, m) for w in ("f32", "bf16", "f16", "int8") for m in KV_DTYPES])
@pytest.mark.parametrize("name", ["llama", "shipped", "qwen3", "ouro", "huginn"])
def test_logits_of_every_weight_type_and_kv_mode(backend, name, dtype, kv_mode):
    if backend != "cpu" and dtype == "int8":
        pytest.skip("the CPU quantises activations too; the GPU's int8 has tests of its own")
    tokens = random_tokens(CONFIGS[name], N)
    with open_model(backend, name, dtype, kv_mode=kv_mode) as model:
        got = model.logits(tokens)
    assert_close(got, reference(name, dtype, kv_mode).logits(tokens), dtype, KV_DTYPES[kv_mode])
    assert_close(got, reference(name, dtype, kv_mode, rounded=False).logits(tokens), dtype, KV_DTYPES[kv_mode], rounded=False)


@pytest.mark.parametrize("name", CONFIGS)
def test_kv_and_hidden_rows_of_a_prefix(backend, name):
    config, tokens = CONFIGS[name], random_tokens(CONFIGS[name], 40)
    pool = tl.PrefixPool()
    with open_model(backend, name, kv_mode="fp32") as model:
        model.register_prefix(pool, tokens)
        prefix = entry_of(pool, model, tokens).payload
        stages = export_kv(model._engine, prefix)
    hidden = reference(name, "f32", "fp32").hidden(tokens)
    assert_close(prefix.final_x, hidden.final[-1], "f32", "f32")
    assert_close(prefix.boundary_x, hidden.boundaries[:, -1], "f32", "f32")
    assert sorted(stages) == [s for s in range(2 + config.default_loops) if s > 1 or (config.n_prelude, config.n_coda)[s]]
    for stage, (first, keys, values) in stages.items():
        at = {0: "prelude", 1: "coda"}.get(stage, stage - 2)
        assert_close(as_float(keys), hidden.k[at].transpose(0, 2, 1, 3)[:, :, first:], "f32", "f32")
        assert_close(as_float(values), hidden.v[at].transpose(0, 2, 1, 3)[:, :, first:], "f32", "f32")


def test_the_table_covers_every_weight_type_and_kv_mode():
    assert set(TOLERANCES) == {(w, m) for w in ("f32", "bf16", "f16", "int8") for m in KV_DTYPES.values()}
    assert TOLERANCES["f32", "f32"].rounded <= 1e-4


def test_values_beyond_float16_are_clamped_and_counted(backend, tmp_path):
    tensors = random_model(CONFIGS["loop_bare"])
    tensors["core.0.attn.v.weight"] *= 1e6
    tl.save_model(tmp_path / "large.tinyloop", CONFIGS["loop_bare"], tensors)
    for kv_mode, clamps in (("fp16", True), ("bf16", False)):
        with tl.Model(tmp_path / "large.tinyloop", 64, device=backend, kv_mode=kv_mode) as model:
            assert np.isfinite(model.logits(random_tokens(CONFIGS["loop_bare"], 20))).all()
            assert (model.kv_clamped > 0) == clamps
