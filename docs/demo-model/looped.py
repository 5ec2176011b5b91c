"""The forward pass of a looped model in plain PyTorch, for training and for checks.

It covers what the demo model and its teacher (a Llama, which is one loop) need of `ModelConfig`: no prelude or coda,
block_norm pre or sandwich, loop_norm none or every, inject none or add, state_init input or zero, tied embeddings.
`weights` maps the tensor names of a `.tinyloop` file to tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyloop_py.config import ModelConfig

Weights = dict[str, Tensor]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v), each (batch, n_heads, n_tokens, head_dim)


def check_supported(c: ModelConfig) -> None:
    """Raise ValueError on a config that this file does not compute."""
    supported = {
        "n_prelude": (0,), "n_coda": (0,), "block_norm": ("pre", "sandwich"), "loop_norm": ("none", "every"), "inject": ("none", "add"),
        "state_init": ("input", "zero"), "attn_bias": ("",), "qk_norm": ("none",), "rope_style": ("half",), "rotary_dim": (c.head_dim,),
        "rope_scaling": (None,), "nope_layers": ((),), "layer_windows": ((),), "mlp": ("gated",), "activation": ("silu",),
        "tied_embeddings": (True,), "logit_softcap": (0,), "exit": ("none",),
    }  # fmt: skip
    for name, values in supported.items():
        if getattr(c, name) not in values:
            raise ValueError(f"looped.py does not compute {name} = {getattr(c, name)!r}")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), in float32."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps)


def rope_table(c: ModelConfig, pos: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of shape (batch or 1, 1, n_tokens, head_dim / 2) for positions (batch or 1, n_tokens)."""
    frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, device=pos.device, dtype=torch.float32) / c.head_dim)
    angle = pos[:, None, :, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a whole sequence to itself."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def run_loop(
    c: ModelConfig, weights: Weights, x: Tensor, e: Tensor, rope: tuple[Tensor, Tensor], dtype: torch.dtype, attend: Attend = causal
) -> Tensor:
    """Apply the core once: inject, the layers, the loop norm. x and e are float32, matrix products run in `dtype`."""

    def linear(name: str, y: Tensor) -> Tensor:
        return F.linear(y.to(dtype), weights[f"{name}.weight"].to(dtype))

    def norm(name: str, y: Tensor) -> Tensor:
        return rms_norm(y, weights[f"{name}.weight"], c.norm_eps)

    if c.inject == "add":
        x = x + e
    for i in range(c.n_core):
        layer = f"core.{i}"
        y = norm(f"{layer}.attn_norm", x)
        q, k, v = (linear(f"{layer}.attn.{p}", y).unflatten(-1, (-1, c.head_dim)).transpose(1, 2) for p in "qkv")
        y = attend(i, rotate(q, rope), rotate(k, rope), v)
        y = linear(f"{layer}.attn.o", y.transpose(1, 2).flatten(2))
        x = x + (norm(f"{layer}.attn_post_norm", y) if c.block_norm == "sandwich" else y)
        y = norm(f"{layer}.mlp_norm", x)
        y = linear(f"{layer}.mlp.down", F.silu(linear(f"{layer}.mlp.gate", y)) * linear(f"{layer}.mlp.up", y))
        x = x + (norm(f"{layer}.mlp_post_norm", y) if c.block_norm == "sandwich" else y)
    return norm("loop_norm", x) if c.loop_norm == "every" else x


def hidden_states(
    c: ModelConfig, weights: Weights, tokens: Tensor, loops: int, *, pos: Tensor | None = None, cache: KVCache | None = None,
    dtype: torch.dtype = torch.float32, step: Callable[..., Tensor] = run_loop,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield x (batch, n_tokens, dim) after each loop; the r-th is what a call with loops=r ends with."""
    pos = torch.arange(tokens.shape[1], device=tokens.device)[None] if pos is None else pos
    rope = rope_table(c, pos)
    e = F.embedding(tokens, weights["embed.weight"]).float() * c.embed_scale
    x = 0 * e if c.state_init == "zero" else e  # not zeros(): with a gradient, so that every loop compiles to the same program
    for loop in range(loops):
        x = step(c, weights, x, e, rope, dtype, partial(cache.attend, loop * c.n_core, pos) if cache else causal)
        yield x


def head(c: ModelConfig, weights: Weights, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits (..., vocab_size) in `dtype`."""
    if c.final_norm:
        x = rms_norm(x, weights["final_norm.weight"], c.norm_eps)
    return F.linear(x.to(dtype), weights["embed.weight"].to(dtype)) * c.logit_scale


class KVCache:
    """Keys and values of a batch whose sequences have lengths of their own, a buffer per stage and layer."""

    def __init__(self, c: ModelConfig, loops: int, batch: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (batch, c.n_kv_heads, max_len, c.head_dim)
        self.k, self.v = ([torch.zeros(shape, dtype=dtype, device=device) for _ in range(loops * c.n_core)] for _ in range(2))
        self.rows = torch.arange(batch, device=device)[:, None]
        self.seq_len = 0  # of the longest sequence; the caller moves it

    def attend(self, first: int, pos: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v at `pos` (batch, n_tokens), then attend: a prompt to itself, one new token to its whole sequence."""
        keys, values = self.k[first + layer], self.v[first + layer]
        keys[self.rows, :, pos] = k.transpose(1, 2)
        values[self.rows, :, pos] = v.transpose(1, 2)
        if q.shape[2] > 1:
            return causal(layer, q, k, v)
        keys, values = keys[:, :, : self.seq_len], values[:, :, : self.seq_len]
        q = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])  # (batch, n_kv_heads, queries of that head, head_dim)
        score = (q @ keys.transpose(2, 3)).float() * q.shape[-1] ** -0.5
        hidden = torch.arange(self.seq_len, device=q.device) > pos  # (batch, seq_len)
        p = score.masked_fill_(hidden[:, None, None], float("-inf")).softmax(-1)
        return (p.to(values.dtype) @ values).reshape(len(q), -1, 1, q.shape[-1])

    def keep(self, rows: Tensor) -> None:
        """Drop all sequences but `rows`."""
        for buffers in (self.k, self.v):
            for i, buffer in enumerate(buffers):
                buffers[i] = buffer[rows]
        self.rows = self.rows[: len(rows)]
