"""What must hold of the reference by itself: causality, windows, loops as unrolled layers, and the rounding points."""

import dataclasses
import math

import numpy as np
import pytest
from models import CONFIGS, random_model, random_tokens, small
from reference import ROUND, Reference, Rounding, attend, exactly, to_bf16, to_f16, to_f32, to_int8

from tinyloop_py.config import ModelConfig

EXACT = 1e-12  # of max|ref|: the same sums in another order


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.abs(a - b).max() <= EXACT * np.abs(b).max()


def change(config: ModelConfig, **changes) -> ModelConfig:
    return dataclasses.replace(config, **changes)


every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


# Causality and windows


@every_config
def test_a_token_changes_no_earlier_position(config):
    reference, tokens = Reference(config, random_model(config)), random_tokens(config, 70)
    j = 40
    changed = tokens.copy()
    changed[j] = (tokens[j] + 1) % config.vocab_size
    a, b = reference.hidden(tokens), reference.hidden(changed)
    for x, y in ((a.logits, b.logits), (a.final, b.final), *((a.k[s].swapaxes(0, 1), b.k[s].swapaxes(0, 1)) for s in a.k)):
        assert (x[:j] == y[:j]).all()
    assert (a.logits[j] != b.logits[j]).any()
    assert (a.logits[j + 1] != b.logits[j + 1]).any()


@every_config
def test_a_prefix_gives_the_same_numbers(config):
    reference, tokens = Reference(config, random_model(config)), random_tokens(config, 70)
    whole, prefix = reference.hidden(tokens, cache_window=20), reference.hidden(tokens[:30], cache_window=20)
    assert close(prefix.logits, whole.logits[:30])
    assert close(prefix.boundaries, whole.boundaries[:, :30])
    assert close(prefix.k[0], whole.k[0][:, :30])
    assert close(prefix.v[0], whole.v[0][:, :30])


@pytest.mark.parametrize(("name", "loops", "window"), [("llama", 1, 3), ("no_rope", 1, 2), ("ouro", 3, 3), ("huginn", 2, 4)])
def test_receptive_field_of_a_window(name, loops, window):
    """Through n attentions of window W a token is seen n * (W - 1) positions later, and no further."""
    config = CONFIGS[name]
    reference, tokens = Reference(config, random_model(config)), random_tokens(config, 60)
    changed = tokens.copy()
    changed[5] = (tokens[5] + 1) % config.vocab_size
    a, b = (reference.logits(t, loops, window) for t in (tokens, changed))
    differs = (a != b).any(-1)
    reach = (config.n_prelude + loops * config.n_core + config.n_coda) * (window - 1)
    assert differs.tolist() == [5 <= p <= 5 + reach for p in range(60)]


def test_the_smaller_window_wins():
    tensors, tokens = random_model(CONFIGS["mixed_windows"]), random_tokens(CONFIGS["mixed_windows"], 90)

    def logits(layer_windows, cache_window):
        return Reference(change(CONFIGS["mixed_windows"], layer_windows=layer_windows), tensors).logits(tokens, 1, cache_window)

    assert (logits((3, 0, 70), 5) == logits((3, 5, 5), 0)).all()
    assert (logits((3, 0, 70), 75) == logits((3, 75, 70), 0)).all()
    assert (logits((), 75) == logits((75, 75, 75), 0)).all()
    assert (logits((), 90) == logits((), 0)).all()
    assert (logits((), 89) != logits((), 0)).any()


def test_a_window_of_one_sees_nothing_else():
    config = CONFIGS["llama"]
    reference, tokens = Reference(config, random_model(config)), random_tokens(config, 70)
    alone = np.concatenate([reference.logits([token]) for token in tokens])
    assert close(reference.logits(tokens, cache_window=1), alone)


# Loops, stages, and what a config is equal to


@pytest.mark.parametrize("name", ["ouro", "huginn", "shipped"])
def test_depth_can_grow(name):
    """A stage does not depend on how many loops follow; the coda does."""
    config = CONFIGS[name]
    reference, tokens = Reference(config, random_model(config)), random_tokens(config, 12)
    two, four = reference.hidden(tokens, 2), reference.hidden(tokens, 4)
    assert set(four.k) == {"prelude", 0, 1, 2, 3, "coda"}
    assert (four.boundaries[:2] == two.boundaries).all()
    for stage in ("prelude", 0, 1):
        assert (four.k[stage] == two.k[stage]).all()
        assert (four.v[stage] == two.v[stage]).all()
    assert (four.k[2] != four.k[1]).any()
    if config.n_coda:
        assert (four.k["coda"] != two.k["coda"]).any()
    assert (four.logits != two.logits).any()
    assert reference.hidden(tokens).boundaries.shape == (config.default_loops, 12, config.dim)


@pytest.mark.parametrize("name", ["ouro", "nanbeige"])
def test_one_loop_with_loop_norm_every_is_the_plain_model_with_final_norm(name):
    looped, tensors = CONFIGS[name], random_model(CONFIGS[name])
    plain = change(looped, loop_norm="none", final_norm=True)
    renamed = {name.replace("loop_norm", "final_norm"): w for name, w in tensors.items()}
    tokens = random_tokens(looped, 20)
    assert (Reference(looped, tensors).logits(tokens, 1) == Reference(plain, renamed).logits(tokens, 1)).all()
    last = change(looped, loop_norm="last")
    assert (Reference(looped, tensors).logits(tokens, 1) == Reference(last, tensors).logits(tokens, 1)).all()
    assert (Reference(looped, tensors).logits(tokens, 2) != Reference(last, tensors).logits(tokens, 2)).any()


def test_loops_are_unrolled_layers():
    looped = small(n_core=2, nope_layers=(1,), layer_windows=(0, 6))
    unrolled = small(n_core=6, nope_layers=(1, 3, 5), layer_windows=(0, 6) * 3)
    tensors, tokens = random_model(looped), random_tokens(looped, 30)
    layers = {name: w for name, w in tensors.items() if name.startswith("core.")}
    copies = {f"core.{i}.{name[7:]}": layers[f"core.{i % 2}.{name[7:]}"] for i in range(6) for name in layers}
    copies |= {name: w for name, w in tensors.items() if name not in layers}
    assert (Reference(looped, tensors).logits(tokens, 3) == Reference(unrolled, copies).logits(tokens, 1)).all()


def test_prelude_core_and_coda_are_layers_in_order():
    plain = small(n_core=4, nope_layers=(2,), layer_windows=(0, 4, 9, 2))
    split = change(plain, n_prelude=1, n_core=2, n_coda=1)
    tensors, tokens = random_model(plain), random_tokens(plain, 30)
    names = {"core.0": "prelude.0", "core.1": "core.0", "core.2": "core.1", "core.3": "coda.0"}
    renamed = {names.get(name[:6], name[:6]) + name[6:]: w for name, w in tensors.items()}
    assert (Reference(plain, tensors).logits(tokens, 1) == Reference(split, renamed).logits(tokens, 1)).all()


def test_injection():
    none = small(n_prelude=1, loop_norm="every")
    add, concat = change(none, inject="add"), change(none, inject="concat_linear")
    tensors, tokens, eye = random_model(none), random_tokens(none, 20), np.eye(64)

    def logits(config, loops, **more):
        return Reference(config, {**tensors, **more}).logits(tokens, loops)

    assert close(logits(concat, 3, **{"inject.weight": np.hstack([eye, 0 * eye])}), logits(none, 3))
    assert close(logits(concat, 3, **{"inject.weight": np.hstack([eye, eye])}), logits(add, 3))
    assert close(logits(change(add, state_init="zero"), 1), logits(none, 1))
    assert not close(logits(change(add, state_init="zero"), 2), logits(none, 2))
    assert close(logits(change(add, state_init="normal"), 2), logits(change(add, state_init="zero"), 2))  # std 0


def test_seeded_state_depends_on_position_and_seed():
    config = CONFIGS["retrofit_llama"]
    tensors, tokens = random_model(config), np.full(10, 5)
    reference = Reference(config, tensors)
    x = reference.hidden(tokens, 1).boundaries[0]
    assert len({row.tobytes() for row in x}) == 10
    assert (Reference(change(config, state_init_seed=1), tensors).logits(tokens) != reference.logits(tokens)).any()


def test_sandwich_and_sum_sandwich_differ():
    config = CONFIGS["ouro"]
    tensors, tokens = random_model(config), random_tokens(config, 10)
    a, b = (Reference(change(config, block_norm=kind), tensors).logits(tokens) for kind in ("sandwich", "sum_sandwich"))
    assert np.abs(a - b).max() > 0.1 * np.abs(a).max()


def test_grouped_heads_share_keys_in_order():
    grouped = small(n_heads=6, n_kv_heads=2, qk_norm="head", attn_bias="kv")
    full = change(grouped, n_kv_heads=6)
    tensors, tokens = random_model(grouped), random_tokens(grouped, 20)
    repeated = dict(tensors)
    for name, w in tensors.items():
        if ".attn.k." in name or ".attn.v." in name:
            repeated[name] = np.repeat(w.reshape(2, 16, -1), 3, axis=0).reshape(96, *w.shape[1:])
    assert close(Reference(grouped, tensors).logits(tokens), Reference(full, repeated).logits(tokens))


@pytest.mark.parametrize("rotary_dim", [16, 6])
def test_interleaved_rope_is_half_rope_with_permuted_weights(rotary_dim):
    interleaved = small(rope_style="interleaved", rotary_dim=rotary_dim, attn_bias="qk")
    half = change(interleaved, rope_style="half")
    tensors, tokens = random_model(interleaved), random_tokens(interleaved, 20)
    order = np.concatenate([np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2), np.arange(rotary_dim, 16)])
    permuted = dict(tensors)
    for name, w in tensors.items():
        if ".attn.q." in name or ".attn.k." in name:
            permuted[name] = w.reshape(4, 16, -1)[:, order].reshape(w.shape)
    assert close(Reference(half, permuted).logits(tokens), Reference(interleaved, tensors).logits(tokens))


def test_no_rotary_dims_is_no_rope_on_any_layer():
    config = CONFIGS["no_rope"]
    tensors, tokens = random_model(config), random_tokens(config, 20)
    assert (Reference(config, tensors).logits(tokens) == Reference(change(config, rotary_dim=16, nope_layers=(0, 1)), tensors).logits(tokens)).all()


def test_the_ends_of_the_model():
    plain = small()
    tensors, tokens = random_model(plain), random_tokens(plain, 20)
    logits = Reference(plain, tensors).logits(tokens)
    untied = change(plain, tied_embeddings=False)
    assert (Reference(untied, {**tensors, "head.weight": tensors["embed.weight"]}).logits(tokens) == logits).all()
    scaled = {**tensors, "head.weight": tensors["embed.weight"], "embed.weight": tensors["embed.weight"] / np.float32(4)}
    assert close(Reference(change(untied, embed_scale=4.0), scaled).logits(tokens), logits)
    assert close(Reference(change(plain, logit_scale=0.3), tensors).logits(tokens), 0.3 * logits)
    assert close(Reference(change(plain, logit_softcap=4.0, logit_scale=0.3), tensors).logits(tokens), 4 * np.tanh(0.3 * logits / 4))


def test_the_exit_gate_does_not_touch_the_logits():
    config = CONFIGS["ouro"]
    tensors, tokens = random_model(config), random_tokens(config, 10)
    other = {**tensors, "exit_gate.weight": 9 * tensors["exit_gate.weight"]}
    assert (Reference(config, tensors).logits(tokens) == Reference(config, other).logits(tokens)).all()


# Rounding points


def test_rounding_to_types():
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).normal(size=10_000) * np.exp(np.random.default_rng(1).normal(size=10_000) * 8)
    x = np.concatenate([x, [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 2**-24, 65519.0, 1e-45]])
    for round_to, dtype in ((to_f32, torch.float32), (to_bf16, torch.bfloat16), (to_f16, torch.float16)):
        expected = torch.tensor(x).float().clamp(-65504, 65504) if round_to is to_f16 else torch.tensor(x).float()
        assert (round_to(x) == expected.to(dtype).double().numpy()).all()
        assert (round_to(round_to(x)) == round_to(x)).all()
    assert to_f16(np.array([1e6, -7e4])).tolist() == [65504, -65504]


def test_int8_groups():
    x = np.random.default_rng(0).normal(size=(5, 70))
    x[0] = 0
    got = to_int8(x, 32)
    for row, rounded in zip(x, got, strict=True):
        for start in (0, 32, 64):
            group, result = row[start : start + 32], rounded[start : start + 32]
            scale = np.abs(group).max() / 127
            assert np.abs(result - group).max() <= scale * 0.5001
            assert len(set(np.rint(result / (scale or 1)).tolist())) <= 255
    assert (got[0] == 0).all()


def test_attention_by_its_definition():
    """One query at a time, in plain Python: chunks of 64 keys at absolute positions, P relative to the chunk's maximum."""
    rng = np.random.default_rng(3)
    n, window = 150, 90
    q, k, v = rng.normal(size=(n, 2, 8)) * 2, rng.normal(size=(n, 1, 8)), rng.normal(size=(n, 1, 8))
    got = attend(q, k, v, window, to_bf16)
    for p in (0, 1, 63, 64, 89, 90, 127, 128, 149):
        for head in range(2):
            chunks = []
            for start in range(0, n, 64):
                keys = [j for j in range(start, min(start + 64, n)) if p - window < j <= p]
                if keys:
                    s = [float(q[p, head] @ k[j, 0]) / math.sqrt(8) for j in keys]
                    m = max(s)
                    weights = to_bf16(np.exp(np.array(s) - m))
                    chunks.append((m, weights.sum(), weights @ v[keys, 0]))
            top = max(m for m, _, _ in chunks)
            out = sum(math.exp(m - top) * o for m, _, o in chunks) / sum(math.exp(m - top) * norm for m, norm, _ in chunks)
            assert got[p, head] == pytest.approx(out, rel=1e-12, abs=1e-14)


def test_attention_without_rounding_is_softmax():
    rng = np.random.default_rng(4)
    q, k, v = (rng.normal(size=(150, 1, 8)) for _ in range(3))
    scores = q[:, 0] @ k[:, 0].T / math.sqrt(8)
    weights = np.where(np.tri(150, dtype=bool), np.exp(scores - scores.max()), 0)
    assert close(attend(q, k, v, 0, exactly)[:, 0], weights / weights.sum(-1, keepdims=True) @ v[:, 0])


def test_nothing_is_invalid_where_whole_chunks_are_masked():
    config = CONFIGS["mistral"]
    with np.errstate(all="raise", under="ignore"):
        logits = Reference(config, random_model(config), Rounding.of("bf16", "f16")).logits(random_tokens(config, 200))
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("kv", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("weights", ["f32", "f16", "bf16", "int8"])
def test_what_is_rounded_where(weights, kv):
    config = CONFIGS["retrofit_olmo"]
    tensors, tokens = random_model(config, dtype=weights), random_tokens(config, 80)
    hidden = Reference(config, tensors, Rounding.of(weights, kv)).hidden(tokens)
    for stage in hidden.k:
        assert (ROUND[kv](hidden.k[stage]) == hidden.k[stage]).all()
        assert (ROUND[kv](hidden.v[stage]) == hidden.v[stage]).all()
    for x in (hidden.e, hidden.boundaries, hidden.final):  # fp32 at every boundary, not the operands' type
        assert (to_f32(x) == x).all()
        assert weights == "f32" or (ROUND[weights](x) != x).any()
