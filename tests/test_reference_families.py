"""The reference against a plain PyTorch module for each looped family, written from the family's own forward pass.

Their code is not on any registry, so each module here follows the published one step by step, in its own layout (fused
projections, complex RoPE, a KV cache by slot) and with its own tensor names, and shares nothing with the reference.
Sources: Ouro, arXiv 2510.25741; Nanbeige4.2, arXiv 2607.22083; Huginn, arXiv 2502.05171; retrofitted recurrence, 2511.07384.
"""

import dataclasses
import math

import numpy as np
import pytest
from models import CONFIGS, random_model, random_tokens
from philox import truncated_normal
from reference import Reference

from tinyloop_py.config import ModelConfig

torch = pytest.importorskip("torch")
F = torch.nn.functional
N_TOKENS = 40
TOLERANCE = 1e-13  # of max|ref|


def tensors_of(config: ModelConfig) -> tuple[dict[str, np.ndarray], dict]:
    tensors = random_model(config)
    return tensors, {name: torch.tensor(w, dtype=torch.float64) for name, w in tensors.items()}


def assert_close(got: np.ndarray, expected) -> None:
    expected = expected.numpy()
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()


def norm(x, weight, eps):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rotate_half(x, positions, theta):
    """x (n, heads, head_dim): RoPE in halves."""
    half = x.shape[-1] // 2
    angle = torch.outer(positions.double(), theta ** -(torch.arange(half, dtype=torch.float64) / half))
    cos, sin = torch.cat([angle, angle], -1).cos()[:, None], torch.cat([angle, angle], -1).sin()[:, None]
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def llama3_rotation(x, positions, theta, s):
    """As `rotate_half`, with Llama 3.1's frequencies, one by one as its reference code has them."""
    freqs = [theta ** (-2 * i / x.shape[-1]) for i in range(x.shape[-1] // 2)]
    scaled = []
    for freq in freqs:
        wavelength = 2 * math.pi / freq
        if wavelength < s["original_max_position"] / s["high_freq_factor"]:
            scaled.append(freq)
        elif wavelength > s["original_max_position"] / s["low_freq_factor"]:
            scaled.append(freq / s["factor"])
        else:
            smooth = (s["original_max_position"] / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
            scaled.append((1 - smooth) * freq / s["factor"] + smooth * freq)
    angle = torch.outer(positions.double(), torch.tensor(scaled, dtype=torch.float64))
    turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def attention(q, k, v):
    """q (n, heads, hd) at the last n of the positions of k and v (m, kv heads, hd)."""
    n, m = len(q), len(k)
    mask = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    heads_first = [t.transpose(0, 1)[None] for t in (q, k, v)]
    return F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1).reshape(n, -1)


class WholeStack:
    """Ouro and Nanbeige: the whole stack, looped; a KV cache with one slot per (loop, layer); the final norm after every loop."""

    def __init__(self, w: dict, c: ModelConfig, sandwich: bool, skip_loop_final_norm: bool = False, slot=None):
        self.w, self.c, self.sandwich, self.skip = w, c, sandwich, skip_loop_final_norm
        self.slot = slot or (lambda loop, layer: loop * c.n_core + layer)
        self.cache: dict[int, tuple] = {}

    def update_cache(self, slot, k, v):
        if slot in self.cache:
            k, v = (torch.cat(pair) for pair in zip(self.cache[slot], (k, v), strict=True))
        self.cache[slot] = k, v
        return k, v

    def layer(self, h, i, slot, positions):
        w, c = self.w, self.c
        linear = lambda x, name: F.linear(x, w[f"core.{i}.{name}.weight"])  # noqa: E731
        norm_ = lambda x, name: norm(x, w[f"core.{i}.{name}.weight"], c.norm_eps)  # noqa: E731
        a = norm_(h, "attn_norm")
        q, k, v = (linear(a, f"attn.{p}").view(len(h), -1, c.head_dim) for p in "qkv")
        q, k = rotate_half(q, positions, c.rope_theta), rotate_half(k, positions, c.rope_theta)
        a = linear(attention(q, *self.update_cache(slot, k, v)), "attn.o")
        h = h + (norm_(a, "attn_post_norm") if self.sandwich else a)
        m = norm_(h, "mlp_norm")
        m = linear(F.silu(linear(m, "mlp.gate")) * linear(m, "mlp.up"), "mlp.down")
        return h + (norm_(m, "mlp_post_norm") if self.sandwich else m)

    def __call__(self, tokens, loops, first_position=0):
        positions = first_position + torch.arange(len(tokens))
        h = self.w["embed.weight"][torch.tensor(tokens, dtype=torch.int64)]
        readouts = []
        for loop in range(loops):
            for i in range(self.c.n_core):
                h = self.layer(h, i, self.slot(loop, i), positions)
            if not self.skip or loop == loops - 1:
                h = norm(h, self.w["loop_norm.weight"], self.c.norm_eps)
            readouts.append(h)
        return F.linear(h, self.w["head.weight"]), torch.stack(readouts)


@pytest.mark.parametrize("loops", [1, 2, 4])
@pytest.mark.parametrize(("name", "options"), [("ouro", {"sandwich": True}), ("nanbeige", {"sandwich": False})])
def test_ouro_and_nanbeige(name, options, loops):
    config = CONFIGS[name]
    tensors, w = tensors_of(config)
    tokens = random_tokens(config, N_TOKENS)
    model = WholeStack(w, config, **options)
    logits, readouts = model(tokens, loops)
    hidden = Reference(config, tensors).hidden(tokens, loops)
    assert_close(hidden.logits, logits)
    assert_close(hidden.boundaries, readouts)
    for loop in range(loops):
        for layer in range(config.n_core):
            k, v = model.cache[loop * config.n_core + layer]
            assert_close(hidden.k[loop][layer], k)
            assert_close(hidden.v[loop][layer], v)


def test_nanbeige_that_skips_the_norm_between_loops():
    config = CONFIGS["nanbeige_skip"]
    tensors, w = tensors_of(config)
    tokens = random_tokens(config, N_TOKENS)
    logits, _ = WholeStack(w, config, sandwich=False, skip_loop_final_norm=True)(tokens, 3)
    assert_close(Reference(config, tensors).logits(tokens, 3), logits)


def step_by_step(model: WholeStack, tokens, loops, n_prefill):
    """Prefill, then one token at a time."""
    logits = [model(tokens[:n_prefill], loops)[0]]
    logits += [model(tokens[i : i + 1], loops, first_position=i)[0] for i in range(n_prefill, len(tokens))]
    return torch.cat(logits)


def test_prefill_then_steps_needs_a_slot_for_every_loop():
    """Cached decoding equals the reference with slot = loop * layers + layer, and not with one slot for each layer."""
    config = CONFIGS["ouro"]
    tensors, w = tensors_of(config)
    tokens = random_tokens(config, N_TOKENS)
    expected = Reference(config, tensors).logits(tokens, 4)
    assert_close(expected, step_by_step(WholeStack(w, config, sandwich=True), tokens, 4, n_prefill=10))
    one_slot = WholeStack(w, config, sandwich=True, slot=lambda loop, layer: layer)
    one_slot_logits = step_by_step(one_slot, tokens[:1], 4, n_prefill=1).numpy()
    assert np.abs(one_slot_logits - expected[:1]).max() > 1e-3 * np.abs(expected).max()


class Huginn:
    """Raven: prelude, (adapter on [state, e], core) x loops, ln_f, coda, ln_f again; norms on the sums; complex RoPE."""

    def __init__(self, w: dict, c: ModelConfig):
        self.c, self.w = c, {"wte": w["embed.weight"], "adapter": w["inject.weight"], "ln_f": w["loop_norm.weight"]}
        assert (w["loop_norm.weight"] == w["final_norm.weight"]).all()  # one weight in the checkpoint
        for part, n in (("prelude", c.n_prelude), ("core", c.n_core), ("coda", c.n_coda)):
            for i in range(n):
                ours, theirs = f"{part}.{i}.", f"{'core_block' if part == 'core' else part}.{i}."
                norms = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
                self.w |= {f"{theirs}norm_{j}": w[f"{ours}{name}.weight"] for j, name in enumerate(norms, 1)}
                self.w[theirs + "Wqkv"] = torch.cat([w[f"{ours}attn.{p}.weight"] for p in "qkv"])
                self.w[theirs + "qk_bias"] = torch.stack([w[f"{ours}attn.{p}.bias"].view(1, c.n_heads, c.head_dim) for p in "qk"])
                self.w[theirs + "proj"] = w[ours + "attn.o.weight"]
                self.w[theirs + "fc"] = torch.cat([w[ours + "mlp.gate.weight"], w[ours + "mlp.up.weight"]])
                self.w[theirs + "mlp.proj"] = w[ours + "mlp.down.weight"]

    def freqs_cis(self, n):
        dim = self.c.head_dim
        angle = torch.outer(torch.arange(n).double(), 1 / self.c.rope_theta ** (torch.arange(0, dim, 2).double() / dim))
        return torch.polar(torch.ones_like(angle), angle)[:, None]

    def block(self, x, name):
        w, n = self.w, len(x)
        norm_ = lambda y, j: norm(y, w[f"{name}.norm_{j}"], self.c.norm_eps)  # noqa: E731
        q, k, v = F.linear(norm_(x, 1), w[name + ".Wqkv"]).chunk(3, dim=-1)
        q, k, v = (t.view(n, self.c.n_heads, self.c.head_dim) for t in (q, k, v))
        q, k = q + w[name + ".qk_bias"][0], k + w[name + ".qk_bias"][1]
        q, k = (torch.view_as_real(torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * self.freqs_cis(n)).reshape(t.shape) for t in (q, k))
        x = norm_(F.linear(attention(q, k, v), w[name + ".proj"]) + x, 2)
        gate, up = F.linear(norm_(x, 3), w[name + ".fc"]).chunk(2, dim=-1)
        return norm_(F.linear(F.silu(gate) * up, w[name + ".mlp.proj"]) + x, 4)

    def __call__(self, tokens, state, loops):
        e = self.w["wte"][torch.tensor(tokens, dtype=torch.int64)] * math.sqrt(self.c.dim)
        for i in range(self.c.n_prelude):
            e = self.block(e, f"prelude.{i}")
        states = []
        for _ in range(loops):
            state = F.linear(torch.cat([state, e], dim=-1), self.w["adapter"])
            for i in range(self.c.n_core):
                state = self.block(state, f"core_block.{i}")
            states.append(state)
        x = norm(state, self.w["ln_f"], self.c.norm_eps)
        for i in range(self.c.n_coda):
            x = self.block(x, f"coda.{i}")
        return F.linear(norm(x, self.w["ln_f"], self.c.norm_eps), self.w["wte"]), torch.stack(states)


@pytest.mark.parametrize("state_init", ["normal", "zero"])
@pytest.mark.parametrize("loops", [1, 4])
def test_huginn(loops, state_init):
    config = dataclasses.replace(CONFIGS["huginn"], state_init=state_init)
    tensors, w = tensors_of(config)
    tensors["final_norm.weight"], w["final_norm.weight"] = tensors["loop_norm.weight"], w["loop_norm.weight"]
    tokens = random_tokens(config, N_TOKENS)
    state = torch.zeros(N_TOKENS, config.dim, dtype=torch.float64)
    if state_init == "normal":
        rows = [truncated_normal(config.state_init_seed, p, config.dim, config.state_init_std) for p in range(N_TOKENS)]
        state = torch.tensor(np.stack(rows))
    logits, states = Huginn(w, config)(tokens, state, loops)
    hidden = Reference(config, tensors).hidden(tokens, loops)
    assert_close(hidden.logits, logits)
    assert_close(hidden.boundaries, states)


class Retrofit:
    """Llama or OLMo 2 blocks in Huginn's scheme: no embedding scale, no norm before the coda."""

    def __init__(self, w: dict, c: ModelConfig, olmo: bool):
        self.w, self.c, self.olmo = w, c, olmo

    def turn(self, x):
        positions, scaling = torch.arange(len(x)), self.c.rope_scaling
        if scaling:
            return llama3_rotation(x, positions, self.c.rope_theta, scaling)
        return rotate_half(x, positions, self.c.rope_theta)

    def mix(self, x, name):
        w, c = self.w, self.c
        q, k, v = (F.linear(x, w[f"{name}.attn.{p}.weight"]) for p in "qkv")
        if self.olmo:
            q, k = norm(q, w[name + ".attn.q_norm.weight"], c.norm_eps), norm(k, w[name + ".attn.k_norm.weight"], c.norm_eps)
        q, k, v = (t.view(len(x), -1, c.head_dim) for t in (q, k, v))
        return F.linear(attention(self.turn(q), self.turn(k), v), w[name + ".attn.o.weight"])

    def mlp(self, x, name):
        gate, up, down = (self.w[f"{name}.mlp.{p}.weight"] for p in ("gate", "up", "down"))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def block(self, x, name):
        norm_ = lambda y, which: norm(y, self.w[f"{name}.{which}.weight"], self.c.norm_eps)  # noqa: E731
        if self.olmo:  # the norms are on the branches' outputs
            x = x + norm_(self.mix(x, name), "attn_post_norm")
            return x + norm_(self.mlp(x, name), "mlp_post_norm")
        x = x + self.mix(norm_(x, "attn_norm"), name)
        return x + self.mlp(norm_(x, "mlp_norm"), name)

    def __call__(self, tokens, state, loops):
        e = self.w["embed.weight"][torch.tensor(tokens, dtype=torch.int64)]
        for i in range(self.c.n_prelude):
            e = self.block(e, f"prelude.{i}")
        for _ in range(loops):
            state = F.linear(torch.cat([state, e], dim=-1), self.w["inject.weight"])
            for i in range(self.c.n_core):
                state = self.block(state, f"core.{i}")
        for i in range(self.c.n_coda):
            state = self.block(state, f"coda.{i}")
        return F.linear(norm(state, self.w["final_norm.weight"], self.c.norm_eps), self.w["head.weight"])


@pytest.mark.parametrize("loops", [1, 4])
@pytest.mark.parametrize("name", ["retrofit_llama", "retrofit_olmo"])
def test_retrofitted_recurrence(name, loops):
    config = CONFIGS[name]
    tensors, w = tensors_of(config)
    tokens = random_tokens(config, N_TOKENS)
    rows = [truncated_normal(config.state_init_seed, p, config.dim, config.state_init_std) for p in range(N_TOKENS)]
    logits = Retrofit(w, config, olmo=name.endswith("olmo"))(tokens, torch.tensor(np.stack(rows)), loops)
    assert_close(Reference(config, tensors).logits(tokens, loops), logits)
