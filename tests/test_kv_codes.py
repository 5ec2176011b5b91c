"""What int8 and int4 store: the codes and scales of docs/kv-modes.md, and what becomes of values that are large, tiny or no numbers."""

import math

import numpy as np
import pytest
from models import CONFIGS, random_model, random_tokens, small
from quantised_kv import int4_codes, int8_codes, to_bf16
from reference import Reference, Rounding
from runtime import kv_of, open_model
from tolerances import assert_layer_close

import tinyloop_py as tl

HEADS = {64: "yarn", 80: "qwen3", 96: "huginn", 128: "nanbeige", 48: "qwen2", 8: "odd"}


def rotated(x):
    """The rotation in float32, stage by stage, so that it has the library's bits."""
    x, n = x.astype(np.float32), x.shape[-1]
    block, half = n & -n, 1
    while half < block:
        pairs = x.reshape(*x.shape[:-1], -1, 2, half)
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).reshape(x.shape)
        half *= 2
    return x * np.float32(1 / np.float32(math.sqrt(block)))


def bf16_of(rows, first, n):
    """(n,) bfloat16 numbers of byte rows from byte `first` on."""
    halves = np.ascontiguousarray(rows[..., first : first + 2 * n]).view(np.uint16)
    return (halves.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("kv_mode", ["int8", "int4"])
def test_the_first_layer_holds_the_codes_of_the_definition(backend, kv_mode, head_dim):
    name = HEADS[head_dim]
    tokens = random_tokens(CONFIGS[name], 40)
    with open_model(backend, name, kv_mode="fp32") as exact, open_model(backend, name, kv_mode=kv_mode) as model:
        stage = 0 if CONFIGS[name].n_prelude else 2
        keys, values = (rotated(a[0]) for a in kv_of(exact, tokens)[stage][1:])
        k_rows, v_rows = (a[0] for a in kv_of(model, tokens)[stage][1:])
    want = int8_codes(keys)
    assert k_rows.shape[-1] == head_dim + 2
    assert np.array_equal(bf16_of(k_rows, head_dim, 1), want.scale[..., :1].astype(np.float32))
    differing = k_rows[..., :head_dim].view(np.int8) != want.code
    assert differing.mean() < 1e-3  # float32 x * (1 / s) against float64 x / s, at an edge
    if kv_mode == "int8":
        want = int8_codes(values)
        assert np.array_equal(bf16_of(v_rows, head_dim, 1), want.scale[..., :1].astype(np.float32))
        assert (v_rows[..., :head_dim].view(np.int8) != want.code).mean() < 1e-3
        return
    want, groups = int4_codes(values), -(-head_dim // 32)
    assert v_rows.shape[-1] == head_dim // 2 + 4 * groups
    assert np.array_equal(bf16_of(v_rows, head_dim // 2, groups), want.scale[..., ::32].astype(np.float32))
    assert np.array_equal(bf16_of(v_rows, head_dim // 2 + 2 * groups, groups), want.zero[..., ::32].astype(np.float32))
    codes = np.stack([v_rows[..., : head_dim // 2] & 15, v_rows[..., : head_dim // 2] >> 4], -1).reshape(want.code.shape)
    assert (codes != want.code).mean() < 1e-3


@pytest.mark.parametrize("kv_mode", ["int8", "int4"])
@pytest.mark.parametrize(("head_dim", "n_kv_heads"), [(64, 1), (64, 4), (80, 2), (96, 1), (128, 2), (16, 4), (8, 1)])
def test_one_layer_rounds_where_the_reference_does(backend, tmp_path, kv_mode, head_dim, n_kv_heads):
    config = small(n_core=1, head_dim=head_dim, n_kv_heads=n_kv_heads, tied_embeddings=False)
    tensors, tokens = random_model(config), random_tokens(config, 200)
    tl.save_model(tmp_path / "m.tinyloop", config, tensors)
    with tl.Model(tmp_path / "m.tinyloop", 256, device=backend, kv_mode=kv_mode) as model:
        got = model.logits(tokens)
    assert_layer_close(got, Reference(config, tensors, Rounding.of("f32", kv_mode)).logits(tokens), "f32", kv_mode)


@pytest.mark.parametrize("kv_mode", ["int8", "int4"])
def test_large_small_and_zero_values(backend, tmp_path, kv_mode):
    """Nothing is clamped: a scale reaches as far as bfloat16 does."""
    config = small(n_core=1, n_kv_heads=2)
    tokens = random_tokens(config, 80)
    for factor in (0.0, 1e-30, 1e-6, 1e6):
        tensors = random_model(config)
        tensors["core.0.attn.v.weight"] = (tensors["core.0.attn.v.weight"] * np.float32(factor)).astype(np.float32)
        tensors["core.0.attn.o.weight"] = (tensors["core.0.attn.o.weight"] / np.float32(max(factor, 1e-20))).astype(np.float32)
        tl.save_model(tmp_path / "m.tinyloop", config, tensors)
        with tl.Model(tmp_path / "m.tinyloop", 96, device=backend, kv_mode=kv_mode) as model:
            got = model.logits(tokens)
            assert model.kv_clamped == 0
        assert np.isfinite(got).all()
        plain = Reference(config, tensors).logits(tokens)
        assert np.abs(got - plain).max() < 0.1 * np.abs(plain).max(), factor


def test_a_value_that_is_no_number_shows(backend, tmp_path):
    """Keys or values beyond float32 in some dimensions: the row has no finite answer, rather than a wrong one."""
    config = small(n_core=1, n_kv_heads=1, n_heads=1)
    for which in "kv":
        tensors = random_model(config)
        tensors["embed.weight"][5] *= 0
        tensors["embed.weight"][5, 0] = 1.0
        tensors[f"core.0.attn.{which}.weight"] = (tensors[f"core.0.attn.{which}.weight"] * np.float32(3e38)).astype(np.float32)
        tensors[f"core.0.attn.{which}.weight"][np.isinf(tensors[f"core.0.attn.{which}.weight"])] = 3e38
        tl.save_model(tmp_path / "m.tinyloop", config, tensors)
        for kv_mode in ("int8", "int4"):
            with tl.Model(tmp_path / "m.tinyloop", 96, device=backend, kv_mode=kv_mode) as model:
                assert not np.isfinite(model.logits(np.full(20, 5, np.int32))[-1]).all()


def test_scales_survive_their_type():
    """The largest code of a group stays in range when its scale is rounded down: bfloat16 is half a step wrong at most."""
    x = np.random.default_rng(0).standard_normal((1000, 1, 64))
    for codes, steps in ((int8_codes(x), 127), (int4_codes(x), 15)):
        assert np.abs(codes.values - x).max() <= 0.51 * np.maximum(codes.scale, 0).max() + 2.0**-8 * np.abs(x).max() / steps
    assert np.array_equal(to_bf16(to_bf16(x)), to_bf16(x))
