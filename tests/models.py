"""Small random models: configs that between them use every field and value, and weights that no test can pass by luck.

`CONFIGS` maps a name to a config; `configs()` draws any valid small one; `random_model` gives it weights. Weights are float32
arrays whose values the storage type holds exactly, so that the reference and the runtime see the same numbers; `stored` gives
the bytes of a file.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from hypothesis import strategies as st
from reference import ROUND

from tinyloop_py.config import CHOICES, ModelConfig
from tinyloop_py.layout import matrix_shapes, scale_shapes, vector_shapes

DTYPES = ("f32", "bf16", "f16", "int8")

LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 64}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position": 32, "beta_fast": 8.0, "beta_slow": 1.0, "attention_factor": 1.1386294361119891}
LINEAR = {"type": "linear", "factor": 4.0}


def small(**changes: Any) -> ModelConfig:
    """A plain decoder of odd sizes, with `changes`."""
    base = {"vocab_size": 97, "dim": 64, "ffn_dim": 172, "n_heads": 4, "n_kv_heads": 4, "head_dim": 16, "n_core": 2, "default_loops": 1}
    return ModelConfig(**{**base, "max_loops": 8, **changes})


_CORE3 = {"n_prelude": 1, "n_core": 2, "n_coda": 1}
_HUGINN = {**_CORE3, "inject": "concat_linear", "state_init": "normal", "state_init_std": 0.63, "default_loops": 4}

CONFIGS: dict[str, ModelConfig] = {
    # Plain decoders.
    "llama": small(tied_embeddings=False),
    "llama3": small(n_kv_heads=2, rope_theta=500000.0, rope_scaling=LLAMA3, vocab_size=259),
    "linear": small(dim=36, ffn_dim=44, n_heads=8, n_kv_heads=1, head_dim=8, rope_scaling=LINEAR),
    "yarn": small(n_heads=2, n_kv_heads=1, head_dim=64, rope_scaling=YARN),
    "smollm2": small(dim=100, n_heads=3, n_kv_heads=1, head_dim=64, norm_eps=1e-5, rope_theta=100000.0),
    "smollm3": small(n_core=4, n_kv_heads=2, nope_layers=(3,), norm_eps=1e-6, rope_theta=2e6),
    "mistral": small(n_kv_heads=2, n_core=3, layer_windows=(5, 5, 5), tied_embeddings=False),
    "mixed_windows": small(n_core=3, layer_windows=(3, 0, 70), n_kv_heads=1),
    "qwen2": small(n_heads=3, n_kv_heads=1, head_dim=48, attn_bias="qkv", norm_eps=1e-6, rope_theta=1e6),
    "qwen3": small(n_heads=2, n_kv_heads=1, head_dim=80, qk_norm="head", norm_eps=1e-6, rope_theta=1e6),
    "olmo2": small(block_norm="post", qk_norm="full", n_kv_heads=2, tied_embeddings=False, norm_eps=1e-6, rope_theta=500000.0),
    "odd": small(dim=36, ffn_dim=44, n_heads=3, n_kv_heads=3, head_dim=8, mlp="plain", activation="gelu", attn_bias="qkvo"),
    "capped": small(activation="gelu", logit_softcap=5.0, logit_scale=0.5, embed_scale=8.0, rotary_dim=8, attn_bias="o"),
    "relu2": small(dim=100, ffn_dim=300, mlp="plain", activation="relu2", qk_norm="head", rope_style="interleaved", rotary_dim=6),
    "no_rope": small(rotary_dim=0, n_kv_heads=2),
    # Looped, in miniature.
    "ouro": small(block_norm="sandwich", loop_norm="every", final_norm=False, exit="hazard_gate", default_loops=4, tied_embeddings=False,
                  rope_theta=1e6, norm_eps=1e-6),
    "nanbeige": small(dim=48, n_heads=6, n_kv_heads=2, head_dim=128, loop_norm="every", final_norm=False, default_loops=2,
                      tied_embeddings=False, rope_theta=7e7),
    "nanbeige_skip": small(n_heads=8, n_kv_heads=1, loop_norm="last", final_norm=False, default_loops=2, tied_embeddings=False),
    "huginn": small(**_HUGINN, dim=96, n_heads=2, n_kv_heads=2, head_dim=96, block_norm="sum_sandwich", loop_norm="last", embed_scale=96**0.5,
                    attn_bias="qk", rope_style="interleaved", rope_theta=50000.0, state_init_seed=7, norm_eps=1e-6),
    "retrofit_llama": small(**_HUGINN, n_kv_heads=2, tied_embeddings=False, rope_scaling=LLAMA3),
    "retrofit_olmo": small(**_HUGINN, block_norm="post", qk_norm="full", tied_embeddings=False),
    "shipped": small(dim=48, ffn_dim=100, n_heads=3, n_kv_heads=1, loop_norm="every", inject="add", default_loops=8, vocab_size=259),
    "zero_init": small(**_CORE3, inject="add", state_init="zero", block_norm="sandwich", default_loops=3, layer_windows=(0, 4, 0, 9)),
    "loop_bare": small(n_core=1, default_loops=8, n_kv_heads=2),
}  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any valid small config."""
    head_dim = draw(st.sampled_from([8, 16, 48, 64, 80]))
    n_kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (1, 8)]))
    n_prelude, n_core, n_coda = draw(st.sampled_from([(0, 1, 0), (0, 2, 0), (1, 1, 1), (0, 1, 2), (2, 1, 0)]))
    n_layers = n_prelude + n_core + n_coda
    inject = draw(st.sampled_from(CHOICES["inject"]))
    choices = {name: draw(st.sampled_from(CHOICES[name])) for name in CHOICES if name not in ("inject", "state_init")}
    return ModelConfig(
        vocab_size=draw(st.sampled_from([97, 128, 259])),
        dim=draw(st.sampled_from([16, 36, 48, 100])),
        ffn_dim=draw(st.sampled_from([44, 64, 172])),
        n_heads=n_kv_heads * group,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        n_prelude=n_prelude,
        n_core=n_core,
        n_coda=n_coda,
        default_loops=draw(st.integers(1, 4)),
        max_loops=8,
        inject=inject,
        state_init="input" if inject == "none" else draw(st.sampled_from(CHOICES["state_init"])),
        state_init_std=0.5,
        state_init_seed=draw(st.integers(0, 3)),
        norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        final_norm=draw(st.booleans()),
        attn_bias=draw(st.sampled_from(["", "qk", "qkv", "qkvo", "o"])),
        rope_theta=draw(st.sampled_from([1e4, 1e6])),
        rotary_dim=draw(st.sampled_from([None, 0, head_dim // 2])),
        rope_scaling=draw(st.sampled_from([None, LINEAR, LLAMA3, YARN])),
        nope_layers=draw(st.sampled_from([(), (0,), (n_layers - 1,)])),
        layer_windows=draw(st.one_of(st.just(()), st.tuples(*[st.sampled_from([0, 1, 5, 70])] * n_layers))),
        tied_embeddings=draw(st.booleans()),
        embed_scale=draw(st.sampled_from([1.0, 6.0])),
        logit_scale=draw(st.sampled_from([1.0, 0.5])),
        logit_softcap=draw(st.sampled_from([0.0, 10.0])),
        **choices,
    )


# Standard deviation of a matrix's outputs for inputs of 1. o and down are small, as depth has made them in trained models: a
# model whose loops amplify what differs by one rounding would need tolerances that hide faults.
_GAINS = {"embed": 3.0, "head": 3.0, "inject": 1.0, "q": 1.0, "k": 1.0, "v": 1.0, "o": 0.4, "gate": 1.0, "up": 1.0, "down": 0.4}


def _matrix(rng: np.random.Generator, name: str, shape: tuple[int, int], config: ModelConfig) -> np.ndarray:
    """Normal entries, rows of unequal size, one entry in a hundred four times as large."""
    kind, columns = name.split(".")[-2], np.ones(shape[1])
    if kind == "inject":
        columns = np.repeat([0.5, 1.3], config.dim)  # the state fades, the input is added again
    if kind == "embed" and not config.tied_embeddings:
        columns *= np.sqrt(config.dim) / 3  # entries of 1
    w = rng.standard_normal(shape) * np.where(rng.random(shape) < 0.01, 4.0, 1.0)
    w *= np.exp(0.3 * rng.standard_normal((shape[0], 1))) * columns
    return w * (_GAINS[kind] / 1.18 / np.sqrt(shape[1]))  # 1.18: what the outliers and unequal rows add to the rms


def _vector(rng: np.random.Generator, name: str, shape: tuple[int, ...], config: ModelConfig) -> np.ndarray:
    """Norm weights around 1 with spread and a few large ones, branch norms around 1/2, biases around 0."""
    if name.endswith(".bias"):
        return 0.2 * rng.standard_normal(shape)
    if "norm" not in name:
        return rng.standard_normal(shape) / np.sqrt(shape[-1])
    if name == "loop_norm.weight":  # applied again and again: outliers would leave one channel alone
        return np.exp(0.1 * rng.standard_normal(shape))
    on_a_branch = name.endswith("_post_norm.weight") and config.block_norm != "sum_sandwich"
    return np.exp(0.25 * rng.standard_normal(shape)) * np.where(rng.random(shape) < 0.03, 2.0, 1.0) * (0.5 if on_a_branch else 1.0)


def quantize_int8(w: np.ndarray, group_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(q int8 within +-127, scale float32) of a matrix, shaped as `layout.scale_shapes` says.

    A scale has 16 significant bits, so q * scale is exact in float32, and quantising that again gives q and scale back.
    """
    n_out, n_in = w.shape
    size = group_size or n_in
    groups = np.pad(w, [(0, 0), (0, -n_in % size)]).astype(np.float32).reshape(n_out, -1, size)
    mantissa, exponent = np.frexp(np.abs(groups).max(-1) / np.float32(127))
    scale = np.ldexp(np.rint(np.ldexp(mantissa, 16)), exponent - 16).astype(np.float32)
    q = np.rint(groups / np.where(scale == 0, np.float32(1), scale)[..., None]).astype(np.int8)
    return q.reshape(n_out, -1)[:, :n_in], scale[:, 0] if group_size is None else scale


def dequantize_int8(q: np.ndarray, scale: np.ndarray, group_size: int | None = None) -> np.ndarray:
    """q * scale in float32."""
    columns = np.zeros(q.shape[1], int) if group_size is None else np.arange(q.shape[1]) // group_size
    return q * scale.reshape(len(q), -1)[:, columns]


def random_model(config: ModelConfig, seed: int = 0, dtype: str = "f32", group_size: int | None = None) -> dict[str, np.ndarray]:
    """Every tensor of the model as float32, with values that `dtype` (f32, bf16, f16, int8) holds exactly.

    A tensor depends on (seed, its name, its shape, the kind of model) alone. With int8 the matrices are q * scale and the vectors float32.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, shape in {**matrix_shapes(config), **vector_shapes(config)}.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        is_matrix = name in matrix_shapes(config)
        w = (_matrix if is_matrix else _vector)(rng, name, shape, config)
        if dtype == "int8" and is_matrix:
            tensors[name] = dequantize_int8(*quantize_int8(w, group_size), group_size)
        else:
            tensors[name] = ROUND["f32" if dtype == "int8" else dtype](w).astype(np.float32)
    return tensors


def stored(config: ModelConfig, tensors: dict[str, np.ndarray], dtype: str, group_size: int | None = None) -> dict[str, tuple[str, np.ndarray]]:
    """Name -> (safetensors dtype, array) as a file of `dtype` holds them, int8 scales included; BF16 as uint16 bits.

    Exact for what `random_model` made. Vectors (norms, biases, the gate) stay F32.
    """
    out: dict[str, tuple[str, np.ndarray]] = {}
    for name, w in tensors.items():
        if dtype == "f32" or name not in matrix_shapes(config):
            out[name] = "F32", w
        elif dtype == "f16":
            out[name] = "F16", w.astype(np.float16)
        elif dtype == "bf16":
            out[name] = "BF16", (w.view(np.uint32) >> 16).astype(np.uint16)
        else:
            q, scale = quantize_int8(w, group_size)
            out[name] = "I8", q
            out[scale_shapes(name, w.shape, group_size)[0]] = "F32", scale
    return out


def random_tokens(config: ModelConfig, n: int, seed: int = 0) -> np.ndarray:
    """n token ids, int32."""
    return np.random.default_rng([seed, n]).integers(0, config.vocab_size, n, dtype=np.int32)
