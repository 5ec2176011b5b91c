"""The models that all other tests run on: they cover every field, are not degenerate, and are exact in their type."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from models import CONFIGS, DTYPES, configs, dequantize_int8, random_model, random_tokens, stored
from reference import ROUND, Reference

from tinyloop_py.config import CHOICES, ROPE_SCALING, ModelConfig
from tinyloop_py.layout import matrix_shapes, scale_shapes, tensor_shapes

ALL = list(CONFIGS.values())


@pytest.mark.parametrize("field", CHOICES)
def test_every_choice_is_covered(field):
    assert {getattr(c, field) for c in ALL} == set(CHOICES[field])


def test_every_other_value_is_covered():
    assert {c.rope_scaling["type"] for c in ALL if c.rope_scaling} == set(ROPE_SCALING)
    assert {c.head_dim for c in ALL} >= {8, 16, 48, 64, 80, 96, 128}
    assert {c.n_heads // c.n_kv_heads for c in ALL} >= {1, 2, 3, 8}
    assert {c.dim for c in ALL} >= {36, 100}
    assert {c.ffn_dim for c in ALL} >= {44, 172}
    assert {c.vocab_size for c in ALL} >= {97, 259}
    assert set("".join(c.attn_bias for c in ALL)) == set("qkvo")
    assert {(c.final_norm, c.tied_embeddings) for c in ALL} == set(itertools.product([True, False], repeat=2)) - {(False, True)}
    assert {bool(c.n_prelude) for c in ALL} == {bool(c.n_coda) for c in ALL} == {True, False}
    for field in ("nope_layers", "layer_windows", "logit_softcap", "state_init_std", "state_init_seed"):
        assert {bool(getattr(c, field)) for c in ALL} == {True, False}
    assert {0 < c.rotary_dim < c.head_dim for c in ALL} == {True, False}
    assert 0 in {c.rotary_dim for c in ALL}
    assert {c.embed_scale == 1 for c in ALL} == {c.logit_scale == 1 for c in ALL} == {True, False}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_activations_neither_explode_nor_vanish(config):
    """Over 8 loops; and at the default depth the logits tell positions apart."""
    reference, tokens = Reference(config, random_model(config)), random_tokens(config, 24)
    hidden = reference.hidden(tokens, loops=8)
    rms = np.sqrt((hidden.boundaries**2).mean((1, 2)))
    assert ((rms > 0.1) & (rms < 30)).all()
    assert all(0.3 < np.sqrt((k**2).mean()) < 10 for k in hidden.k.values() if k.size)
    logits = reference.logits(tokens)
    assert 1 < logits.std() < 15
    assert logits.std(0).min() > 0.1
    assert len(set(logits.argmax(-1))) > 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [None, 32])
def test_weights_are_exact_in_their_type(dtype, group_size):
    config = CONFIGS["huginn"]
    tensors = random_model(config, 3, dtype, group_size)
    files = stored(config, tensors, dtype, group_size)
    assert {name: w.shape for name, w in tensors.items()} == tensor_shapes(config)
    assert all(w.dtype == np.float32 for w in tensors.values())
    for name, w in tensors.items():
        kind, array = files.pop(name)
        if name not in matrix_shapes(config):
            assert kind == "F32"
            assert array is w
            continue
        assert kind == {"f32": "F32", "bf16": "BF16", "f16": "F16", "int8": "I8"}[dtype]
        assert array.shape == w.shape
        if dtype == "int8":
            scale_name, scale_shape = scale_shapes(name, w.shape, group_size)
            scale = files.pop(scale_name)[1]
            assert scale.shape == scale_shape
            assert scale.dtype == np.float32
            assert np.abs(array.astype(int)).max() == 127
            assert (dequantize_int8(array.astype(np.float64), scale.astype(np.float64), group_size) == w).all()
            array = dequantize_int8(array, scale, group_size)
        elif dtype == "bf16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        assert (array == w).all()
    assert not files
    if dtype in ROUND and dtype != "int8":
        assert all((ROUND[dtype](w) == w).all() for w in tensors.values())


def test_a_tensor_depends_on_seed_name_and_shape_alone():
    a, b = random_model(CONFIGS["llama"]), random_model(CONFIGS["mistral"])
    assert (a["core.1.mlp.up.weight"] == b["core.1.mlp.up.weight"]).all()
    assert (a["core.0.mlp.up.weight"] != a["core.1.mlp.up.weight"]).all()
    assert (random_model(CONFIGS["llama"], 1)["embed.weight"] != a["embed.weight"]).all()


@settings(max_examples=60, deadline=None)
@given(configs())
def test_drawn_configs_are_valid_and_run(config):
    assert ModelConfig.from_json(config.to_json()) == config
    logits = Reference(config, random_model(config)).logits(random_tokens(config, 9))
    assert logits.shape == (9, config.vocab_size)
    assert np.isfinite(logits).all()
    assert logits.std() > 0.05
