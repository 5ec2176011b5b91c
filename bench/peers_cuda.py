"""What a PyTorch user would get on a GPU: batch-1 decode and prefill of a looped block, eager, in a CUDA graph and compiled.

Random bf16 weights, one KV cache a loop and layer, RMSNorm, RoPE, SwiGLU, greedy. bench_cuda.py measures these rows in its own run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import tinyloop_py as tl


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class LoopedBlock(torch.nn.Module):
    """The model of a ModelConfig without prelude and coda, its caches in static memory."""

    def __init__(self, c: tl.ModelConfig, n_positions: int) -> None:
        super().__init__()
        self.c, self.loops = c, c.default_loops
        n_qkv = c.q_dim + 2 * c.kv_dim
        self.embed, self.head = self._weight(c.vocab_size, c.dim), self._weight(c.vocab_size, c.dim)
        self.qkv, self.o = self._layers(n_qkv, c.dim), self._layers(c.dim, c.q_dim)
        self.gate_up, self.down = self._layers(2 * c.ffn_dim, c.dim), self._layers(c.dim, c.ffn_dim)
        self.norms = self._layers(2, c.dim)
        self.final = self._weight(c.dim)
        cache = (c.n_core * self.loops, 1, c.n_kv_heads, n_positions, c.head_dim)
        self.keys, self.values = (torch.zeros(cache, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.at = torch.arange(n_positions, device="cuda")
        turns = self.at.float()[:, None] / c.rope_theta ** (torch.arange(0, c.head_dim, 2, device="cuda") / c.head_dim)
        self.cos, self.sin = turns.cos().bfloat16(), turns.sin().bfloat16()

    @staticmethod
    def _weight(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02, requires_grad=False)

    def _layers(self, *shape: int) -> torch.nn.ParameterList:
        return torch.nn.ParameterList([self._weight(*shape) for _ in range(self.c.n_core)])

    def forward(self, token: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        """The greedy token after the last of some tokens."""
        c, n = self.c, token.shape[0]
        x, cos, sin = F.embedding(token, self.embed), self.cos[pos], self.sin[pos]
        seen = (self.at[None] <= pos[:, None])[None, None]
        for loop in range(self.loops):
            for layer in range(c.n_core):
                h = F.rms_norm(x, (c.dim,), self.norms[layer][0], c.norm_eps)
                q, k, v = (
                    part.view(n, -1, c.head_dim).transpose(0, 1) for part in F.linear(h, self.qkv[layer]).split([c.q_dim, c.kv_dim, c.kv_dim], -1)
                )
                keys, values = self.keys[loop * c.n_core + layer], self.values[loop * c.n_core + layer]
                keys[0].index_copy_(1, pos, _turned(k, cos, sin))
                values[0].index_copy_(1, pos, v)
                o = F.scaled_dot_product_attention(_turned(q, cos, sin)[None], keys, values, attn_mask=seen, enable_gqa=c.n_heads != c.n_kv_heads)
                x = x + F.linear(o[0].transpose(0, 1).reshape(n, -1), self.o[layer])
                gate, up = F.linear(F.rms_norm(x, (c.dim,), self.norms[layer][1], c.norm_eps), self.gate_up[layer]).chunk(2, -1)
                x = x + F.linear(F.silu(gate) * up, self.down[layer])
            x = F.rms_norm(x, (c.dim,), self.final, c.norm_eps)
        return F.linear(x[-1:], self.head).argmax(-1)


def _ms(call: Callable[[], Any], n: int) -> float:
    call()
    call()
    torch.cuda.synchronize()
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(n):
            call()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - begin) / n * 1e3)
    return statistics.median(took)


def measure(config: tl.ModelConfig, context: int, compiles: bool) -> dict[str, float]:
    """Milliseconds of a decode step at a context, each way, and of an eager prefill of that many tokens."""
    with torch.inference_mode():
        model = LoopedBlock(config, 2 * context)
        token, pos = torch.tensor([5], device="cuda"), torch.tensor([context], device="cuda")
        rows = {"eager": _ms(lambda: model(token, pos), 20)}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(token, pos)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(token, pos)
        rows["cuda graph"] = _ms(graph.replay, 50)
        del graph
        prompt, at = torch.randint(0, config.vocab_size, (context,), device="cuda"), torch.arange(context, device="cuda")
        rows["prefill, eager"] = _ms(lambda: model(prompt, at), 3)
        if compiles:
            compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
            rows["torch.compile"] = _ms(lambda: compiled(token, pos), 20)
    torch.compiler.reset()
    torch.cuda.empty_cache()
    return rows
