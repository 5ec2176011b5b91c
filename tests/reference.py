"""The forward pass of every ModelConfig in float64 NumPy: the truth that all backends are tested against.

Plain and slow on purpose; read it as documentation. One sequence, positions 0..n-1, no cache: every position is computed
from all it may read. With `rounding` it also rounds where the runtime rounds (and nowhere else), so that what is left
between the two is the order of float32 sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from philox import truncated_normal
from quantised_kv import Codes, int4_codes, int8_codes, operands, rotate, to_bf16

from tinyloop_py.config import ModelConfig
from tinyloop_py.layout import iter_layers

CHUNK = 64  # keys per attention chunk, at absolute positions
F16_MAX = 65504.0


def to_f32(x: np.ndarray) -> np.ndarray:
    """Nearest float32, as float64."""
    return x.astype(np.float32).astype(np.float64)


def to_f16(x: np.ndarray) -> np.ndarray:
    """Nearest float16 of the float32, clamped to the finite range, as float64."""
    return np.clip(x.astype(np.float32), -F16_MAX, F16_MAX).astype(np.float16).astype(np.float64)


def to_int8(x: np.ndarray, group: int = 32) -> np.ndarray:
    """Rounded to int8 in groups along the last axis, scale = max|x| / 127 in float32, ties to even; as float64."""
    n = x.shape[-1]
    padded = np.pad(x.astype(np.float32), [(0, 0)] * (x.ndim - 1) + [(0, -n % group)])
    padded = padded.reshape(*x.shape[:-1], -1, group)
    scale = np.abs(padded).max(-1, keepdims=True) / np.float32(127)
    steps = np.rint(padded / np.where(scale == 0, np.float32(1), scale)).astype(np.float64)
    return (steps * scale).reshape(*x.shape[:-1], -1)[..., :n]


CODES = {"int8": (int8_codes, int8_codes), "int4": (int8_codes, int4_codes)}
ROUND: dict[str, Callable[[np.ndarray], np.ndarray]] = {"f32": to_f32, "f16": to_f16, "bf16": to_bf16, "int8": to_int8}


def exactly(x: np.ndarray) -> np.ndarray:
    """No rounding at all."""
    return x


@dataclass(frozen=True)
class Rounding:
    """The runtime's rounding points, each a function from float64 to float64.

    Attributes
    ----------
    operand : of the left operand of every matrix product: the weights' arithmetic type.
    kv : of K and V when they are stored.
    attn : of q (after RoPE) and of the attention weights P; by default as `kv`.
    residual : of accumulators and of the residual stream.
    codes : of quantised keys and values: (of K, of V), each to their codes; heads are rotated first, q is made an operand.
    """

    operand: Callable[[np.ndarray], np.ndarray] = exactly
    kv: Callable[[np.ndarray], np.ndarray] = exactly
    attn: Callable[[np.ndarray], np.ndarray] | None = None
    residual: Callable[[np.ndarray], np.ndarray] = exactly
    codes: tuple[Callable[[np.ndarray], Codes], Callable[[np.ndarray], Codes]] | None = None

    @classmethod
    def of(cls, weights: str, kv: str) -> Rounding:
        """Of a model whose weights are `weights` (f32, bf16, f16, int8) and whose KV cache is `kv` (f32, bf16, f16, int8, int4)."""
        if kv in CODES:
            return cls(operand=ROUND[weights], residual=to_f32, codes=CODES[kv])
        return cls(operand=ROUND[weights], kv=ROUND[kv], residual=to_f32)


@dataclass
class Hidden:
    """What a forward pass computed, for all n positions. A stage is "prelude", a loop index 0..loops-1, or "coda".

    Attributes
    ----------
    e : (n, dim), what the prelude hands to the loops.
    boundaries : (loops, n, dim), x after every loop, behind loop_norm where that is "every" (but never where "last").
    final : (n, dim), x before final_norm.
    logits : (n, vocab_size).
    k, v : stage -> (layers of the stage, n, n_kv_heads, head_dim), K after qk_norm and RoPE; as stored, so rotated where codes are.
    """

    e: np.ndarray
    boundaries: np.ndarray
    final: np.ndarray
    logits: np.ndarray
    k: dict[str | int, np.ndarray] = field(default_factory=dict)
    v: dict[str | int, np.ndarray] = field(default_factory=dict)


@dataclass
class _StageKV:
    """The K and V that the layers of one stage have written, and the call's window on them."""

    cache_window: int
    k: list[np.ndarray] = field(default_factory=list)
    v: list[np.ndarray] = field(default_factory=list)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm over the last axis (Zhang and Sennrich, 2019)."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def activation(name: str, x: np.ndarray) -> np.ndarray:
    if name == "silu":
        return x * 0.5 * (1 + np.tanh(x / 2))  # x * sigmoid(x), without overflow
    if name == "gelu":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return np.maximum(x, 0) ** 2  # relu2


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Radians per position (rotary_dim / 2,), and the factor on cos and sin. Scaling as transformers 5 does it."""
    dim, theta, scaling = config.rotary_dim, config.rope_theta, config.rope_scaling
    freq = theta ** (-np.arange(0, dim, 2) / dim) if dim else np.empty(0)
    if scaling is None:
        return freq, 1.0
    factor = scaling["factor"]
    if scaling["type"] == "linear":
        return freq / factor, 1.0
    if scaling["type"] == "llama3":  # long waves are stretched by `factor`, short ones kept, between them a blend
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position"] * freq / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return freq * (keep + (1 - keep) / factor), 1.0
    # yarn (Peng et al., 2023): a ramp over the dims between those that turn beta_fast and beta_slow times

    def dim_that_turns(n_times: float) -> float:
        return dim * math.log(scaling["original_max_position"] / (n_times * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(dim_that_turns(scaling["beta_fast"])), 0)
    last = min(math.ceil(dim_that_turns(scaling["beta_slow"])), dim - 1)
    stretch = np.clip((np.arange(dim // 2) - first) / ((last - first) or 0.001), 0, 1)
    return freq * (1 - stretch + stretch / factor), scaling["attention_factor"]


def rope(config: ModelConfig, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Turn the leading rotary_dim dims of every head of x (n, heads, head_dim)."""
    freq, factor = rope_frequencies(config)
    angle = positions[:, None, None] * freq
    cos, sin = factor * np.cos(angle), factor * np.sin(angle)
    dim = config.rotary_dim
    first, second = (slice(0, dim // 2), slice(dim // 2, dim)) if config.rope_style == "half" else (slice(0, dim, 2), slice(1, dim, 2))
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray | Codes, window: int, round_p: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Causal attention of q (n, n_heads, head_dim) to k, v (n, n_kv_heads, head_dim); position p reads p-window+1..p.

    In chunks of 64 keys: m = max of the unmasked scores, p = exp(s - m) rounded, l = sum of the rounded p, out = p v; the
    chunks are then merged relative to the largest m, which is exact here. Codes of v weigh themselves.
    """
    n, n_heads, head_dim = q.shape
    group = n_heads // k.shape[1]
    k = np.repeat(k, group, axis=1)  # head h reads kv head h // group
    v = v.repeat(group) if isinstance(v, Codes) else np.repeat(v, group, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(head_dim)
    distance = np.arange(n)[:, None] - np.arange(n)
    scores[:, (distance < 0) | (distance >= (window or n))] = -np.inf

    top = scores.max(-1, keepdims=True)
    out, norm = np.zeros((n_heads, n, head_dim)), np.zeros((n_heads, n, 1))
    for start in range(0, n, CHUNK):
        s = scores[:, :, start : start + CHUNK]
        m = s.max(-1, keepdims=True)
        p = round_p(np.exp(s - np.where(m == -np.inf, 0, m)))  # masked keys, and chunks of nothing else: 0
        weight = np.exp(m - top)
        part = v.weigh(p, start, p.shape[-1]) if isinstance(v, Codes) else np.einsum("hij,jhd->hid", p, v[start : start + CHUNK])
        out += weight * part
        norm += weight * p.sum(-1, keepdims=True)
    return (out / norm).transpose(1, 0, 2)


class Reference:
    """A model of `config` with `tensors` (name -> array, as `tinyloop_py.layout` names them; int8 ones dequantised)."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, np.ndarray], rounding: Rounding | None = None) -> None:
        self.config = config
        self.rounding = rounding or Rounding()
        self.tensors = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}

    def logits(self, tokens: np.ndarray, loops: int | None = None, cache_window: int = 0) -> np.ndarray:
        """Logits (n, vocab_size) at every position."""
        return self.hidden(tokens, loops, cache_window).logits

    def hidden(self, tokens: np.ndarray, loops: int | None = None, cache_window: int = 0) -> Hidden:
        """The whole forward pass. The exit gate is not part of it: every loop runs."""
        c, n_loops = self.config, self.config.default_loops if loops is None else loops
        k: dict[str | int, np.ndarray] = {}
        v: dict[str | int, np.ndarray] = {}

        def run(x: np.ndarray, part: str, stage: str | int) -> np.ndarray:
            kv = _StageKV(cache_window)
            for layer, name, its_part, _ in iter_layers(c):
                if its_part == part:
                    x = self._block(x, name, layer, kv)
            shape = (-1, len(x), c.n_kv_heads, c.head_dim)
            k[stage], v[stage] = np.reshape(kv.k, shape), np.reshape(kv.v, shape)
            return x

        e = run(self._residual(self.tensors["embed.weight"][np.asarray(tokens)] * c.embed_scale), "prelude", "prelude")
        x = self._state_init(e)
        boundaries = []
        for loop in range(n_loops):
            x = run(self._inject(x, e), "core", loop)
            if c.loop_norm == "every":
                x = self._residual(self._norm(x, "loop_norm"))
            boundaries.append(x)
        if c.loop_norm == "last":
            x = self._residual(self._norm(x, "loop_norm"))
        final = run(x, "coda", "coda")
        return Hidden(e, np.stack(boundaries), final, self._head(final), k, v)

    def _residual(self, x: np.ndarray) -> np.ndarray:
        return self.rounding.residual(x)

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        """W x, and the bias where the model has one."""
        y = self._residual(self.rounding.operand(x) @ self.tensors[name + ".weight"].T)
        bias = self.tensors.get(name + ".bias")
        return y if bias is None else self._residual(y + bias)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.tensors[name + ".weight"], self.config.norm_eps)

    def _state_init(self, e: np.ndarray) -> np.ndarray:
        c = self.config
        if c.state_init == "input":
            return e
        if c.state_init == "zero":
            return np.zeros_like(e)
        rows = [truncated_normal(c.state_init_seed, position, c.dim, c.state_init_std) for position in range(len(e))]
        return self._residual(np.stack(rows))

    def _inject(self, x: np.ndarray, e: np.ndarray) -> np.ndarray:
        if self.config.inject == "concat_linear":
            return self._linear(np.concatenate([x, e], -1), "inject")
        return self._residual(x + e) if self.config.inject == "add" else x

    def _block(self, x: np.ndarray, name: str, layer: int, kv: _StageKV) -> np.ndarray:
        """Attention, then the MLP, each inside the residual step that block_norm names."""
        steps = {
            "attn": lambda h: self._attention(h, f"{name}.attn", layer, kv),
            "mlp": lambda h: self._mlp(h, f"{name}.mlp"),
        }
        for step, f in steps.items():
            before, after = f"{name}.{step}_norm", f"{name}.{step}_post_norm"
            match self.config.block_norm:
                case "pre":
                    x = x + f(self._norm(x, before))
                case "sandwich":
                    x = x + self._norm(f(self._norm(x, before)), after)
                case "sum_sandwich":
                    x = self._norm(x + f(self._norm(x, before)), after)
                case "post":
                    x = x + self._norm(f(x), after)
            x = self._residual(x)
        return x

    def _attention(self, x: np.ndarray, name: str, layer: int, kv: _StageKV) -> np.ndarray:
        c, positions = self.config, np.arange(len(x))
        q, k, v = (self._linear(x, f"{name}.{p}") for p in "qkv")
        if c.qk_norm == "full":
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k, v = (t.reshape(len(x), -1, c.head_dim) for t in (q, k, v))
        if c.qk_norm == "head":
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        if layer not in c.nope_layers:
            q, k = rope(c, q, positions), rope(c, k, positions)
        window = min((w for w in (c.window(layer), kv.cache_window) if w), default=0)  # the smaller of the two
        if self.rounding.codes:
            k_codes, v_codes = (codes(rotate(t)) for codes, t in zip(self.rounding.codes, (k, v), strict=True))
            kv.k.append(k_codes.values)
            kv.v.append(v_codes.values)
            out = rotate(attend(operands(rotate(q)), k_codes.values, v_codes, window, exactly))
            return self._linear(out.reshape(len(x), -1), f"{name}.o")
        k, v = self.rounding.kv(k), self.rounding.kv(v)
        kv.k.append(k)
        kv.v.append(v)
        round_attn = self.rounding.attn or self.rounding.kv
        out = attend(round_attn(q), k, v, window, round_attn)
        return self._linear(out.reshape(len(x), -1), f"{name}.o")

    def _mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        up = self._linear(x, f"{name}.up")
        if self.config.mlp == "gated":
            return self._linear(activation(self.config.activation, self._linear(x, f"{name}.gate")) * up, f"{name}.down")
        return self._linear(activation(self.config.activation, up), f"{name}.down")

    def _head(self, x: np.ndarray) -> np.ndarray:
        c = self.config
        x = self._norm(x, "final_norm") if c.final_norm else x
        logits = self._linear(x, "embed" if c.tied_embeddings else "head") * c.logit_scale
        return c.logit_softcap * np.tanh(logits / c.logit_softcap) if c.logit_softcap else logits
