"""The tolerance table covers every combination, and it is tight enough: what it is there to catch exceeds it."""

import dataclasses
import itertools

import numpy as np
import pytest
import quantised_kv
import reference
from models import CONFIGS, DTYPES, random_model, random_tokens, small
from reference import Reference, Rounding, exactly, to_bf16
from tolerances import LAYER, TOLERANCES, assert_close, assert_layer_close, row_errors

KV = ("f32", "f16", "bf16")
QUANTISED = ("int8", "int4")
ONE_LAYER = small(n_core=1, n_kv_heads=2, tied_embeddings=False)
FAULTS = {
    "operands not rounded": {"operand": exactly},
    "K and V not rounded": {"kv": exactly, "attn": "kv"},
    "q and P not rounded": {"attn": exactly},
    "residual stream in bf16": {"residual": to_bf16},
}


def test_every_combination_has_its_bounds():
    assert set(TOLERANCES) == set(itertools.product(DTYPES, KV + QUANTISED))
    assert all(t.rounded <= t.plain and t.reason for t in TOLERANCES.values())
    assert TOLERANCES["f32", "f32"].plain == 1e-4


def shows(fault: str, weights: str, kv: str) -> bool:
    """Float32 points hide nothing that rounds; behind int8 operands a step of 2**-11 is lost, but for a few."""
    if fault == "operands not rounded":
        return weights != "f32"
    return fault == "residual stream in bf16" or (kv != "f32" and (weights, kv) != ("int8", "f16"))


@pytest.mark.parametrize(("fault", "weights", "kv"), [case for case in itertools.product(FAULTS, DTYPES, KV) if shows(*case)])
def test_a_wrong_rounding_point_exceeds_the_layer_bound(fault, weights, kv):
    right = Rounding.of(weights, kv)
    changes = {name: right.kv if value == "kv" else value for name, value in FAULTS[fault].items()}
    tensors, tokens = random_model(ONE_LAYER, dtype=weights), random_tokens(ONE_LAYER, 80)
    expected = Reference(ONE_LAYER, tensors, right).logits(tokens)
    wrong = Reference(ONE_LAYER, tensors, dataclasses.replace(right, **changes)).logits(tokens)
    assert np.quantile(row_errors(wrong, expected), 0.25) > LAYER
    with pytest.raises(AssertionError, match="of the largest value"):
        assert_layer_close(wrong, expected, weights, kv)


def test_another_chunk_size_exceeds_the_layer_bound(monkeypatch):
    """P is relative to the maximum of its chunk of 64: taking it over other chunks shows behind the first, in bf16."""
    tensors, tokens = random_model(ONE_LAYER), random_tokens(ONE_LAYER, 200)
    model = Reference(ONE_LAYER, tensors, Rounding.of("f32", "bf16"))
    expected = model.logits(tokens)
    monkeypatch.setattr(reference, "CHUNK", 128)
    wrong = model.logits(tokens)
    assert np.quantile(row_errors(wrong[:64], expected[:64]), 0.9) < LAYER
    with pytest.raises(AssertionError, match="rounding point differs"):
        assert_layer_close(wrong[64:], expected[64:], "f32", "bf16")


QUANTISED_FAULTS = {
    "not rotated": ("rotate", exactly),
    "scales not rounded": ("to_bf16", exactly),
    "operands of eight bits": ("OPERAND_MAX", 127),
}


@pytest.mark.parametrize("fault", QUANTISED_FAULTS)
@pytest.mark.parametrize("kv", QUANTISED)
def test_a_wrong_rounding_point_of_codes_exceeds_the_layer_bound(monkeypatch, fault, kv):
    tensors, tokens = random_model(ONE_LAYER), random_tokens(ONE_LAYER, 80)
    expected = Reference(ONE_LAYER, tensors, Rounding.of("f32", kv)).logits(tokens)
    name, replacement = QUANTISED_FAULTS[fault]
    for module in (reference, quantised_kv):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, replacement)
    wrong = Reference(ONE_LAYER, tensors, Rounding.of("f32", kv)).logits(tokens)
    assert np.quantile(row_errors(wrong, expected), 0.25) > LAYER


@pytest.mark.parametrize("kv", KV + QUANTISED)
@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("name", ["llama", "ouro", "huginn"])
def test_rounding_itself_is_within_the_plain_bound(name, weights, kv):
    config = CONFIGS[name]
    tensors, tokens = random_model(config, dtype=weights), random_tokens(config, 80)
    rounded, plain = (Reference(config, tensors, r).logits(tokens) for r in (Rounding.of(weights, kv), None))
    assert_close(rounded, plain, weights, kv, rounded=False)
    assert (rounded != plain).any()


@pytest.mark.parametrize(("weights", "kv"), [key for key in TOLERANCES if key[0] != "int8" and key[1] != "int4"])
@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        ("llama", {}, {"cache_window": 40}),  # keys missing
        ("ouro", {}, {"loops": 3}),
        ("ouro", {"block_norm": "sum_sandwich"}, {}),
        ("nanbeige", {"loop_norm": "last"}, {}),
        ("huginn", {"rope_style": "half"}, {}),
        ("huginn", {"embed_scale": 1.0}, {}),
        ("mistral", {"layer_windows": (4, 4, 4)}, {}),
        ("smollm3", {"nope_layers": ()}, {}),
    ],
)
def test_a_fault_in_meaning_exceeds_the_plain_bound(name, changes, options, weights, kv):
    """Not for int8 weights and int4 KV, whose bounds over many layers are as large as the smaller ones of these."""
    config = CONFIGS[name]
    tensors, tokens = random_model(config, dtype=weights), random_tokens(config, 80)
    expected = Reference(config, tensors).logits(tokens)
    wrong = Reference(dataclasses.replace(config, **changes), tensors, Rounding.of(weights, kv)).logits(tokens, **options)
    with pytest.raises(AssertionError, match="of the largest value"):
        assert_close(wrong, expected, weights, kv, rounded=False)


def test_shapes_and_values_that_are_not_numbers():
    ref = np.ones((3, 4))
    with pytest.raises(AssertionError, match="shape"):
        assert_close(ref[:2], ref, "f32", "f32")
    for bad in (np.nan, np.inf):
        got = ref.copy()
        got[1, 2] = bad
        with pytest.raises(AssertionError, match="error inf"):
            assert_close(got, ref, "int8", "bf16")
