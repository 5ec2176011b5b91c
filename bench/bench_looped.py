"""Decode of looped shapes on the CPU: weight bytes per second beside what the memory gives, and hand-written PyTorch.

The shape "8x4" is one block of 8 layers run 4 times, dim 512, random weights: 252 MB of bf16 weights read per token. "shipped" is
the model that comes with tinyloop, whose block stays in the cache.

    python bench/bench_looped.py [--rounds 9] [--threads 2] [--keep NAME]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_cpu import decode
from common import alternate, keep, median_ratio, read_rates, table
from random_models import SHAPES, model_file

import tinyloop_py as tl


def streamed_nbytes(model: tl.Model) -> int:
    """Weight bytes that one token reads: the core once a loop, prelude, coda and head once."""
    config, matrices = model.config, model._engine.plan.weights.matrices
    head = matrices["embed" if config.tied_embeddings else "head"].nbytes
    layers = {part: sum(m.nbytes for name, m in matrices.items() if name.startswith(part)) for part in ("prelude", "core", "coda", "inject")}
    return head + layers["prelude"] + layers["coda"] + config.default_loops * (layers["core"] + layers["inject"])


def resident_nbytes(model: tl.Model) -> int:
    """Bytes of all weights that a token touches: the set that a cache would have to hold."""
    return sum(m.nbytes for m in model._engine.plan.weights.matrices.values())


class Torch:
    """What a PyTorch user would write: the same looped block with one KV cache a loop, greedy, bf16."""

    def __init__(self, config: tl.ModelConfig, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.torch, self.c = torch, config
        gen = torch.Generator().manual_seed(0)
        make = lambda *shape: (torch.randn(*shape, generator=gen) * 0.02).to(torch.bfloat16)  # noqa: E731
        c = config
        self.embed = make(c.vocab_size, c.dim)
        self.layers = [
            {"qkv": make(c.q_dim + 2 * c.kv_dim, c.dim), "o": make(c.dim, c.q_dim), "gu": make(2 * c.ffn_dim, c.dim), "down": make(c.dim, c.ffn_dim),
             "n1": make(c.dim), "n2": make(c.dim)} for _ in range(c.n_core)
        ]  # fmt: skip
        self.norm = make(c.dim)
        freq = c.rope_theta ** -(torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angle = torch.arange(2048).float()[:, None] * freq
        self.cos, self.sin = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)

    def _rope(self, x: Any, pos: Any) -> Any:
        a, b = x.chunk(2, -1)
        cos, sin = self.cos[pos], self.sin[pos]
        return self.torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _forward(self, ids: Any, pos: Any, cache: dict[tuple[int, int], Any]) -> Any:
        torch, c = self.torch, self.c
        functional = torch.nn.functional
        n = len(ids)
        x = self.embed[ids]
        for loop in range(c.default_loops):
            for i, w in enumerate(self.layers):
                h = functional.rms_norm(x, (c.dim,), w["n1"], 1e-5)
                q, k, v = functional.linear(h, w["qkv"]).split([c.q_dim, c.kv_dim, c.kv_dim], -1)
                q, k, v = (t.view(n, -1, c.head_dim).transpose(0, 1) for t in (q, k, v))
                q, k = self._rope(q, pos), self._rope(k, pos)
                if (loop, i) in cache:
                    k, v = torch.cat((cache[loop, i][0], k), 1), torch.cat((cache[loop, i][1], v), 1)
                cache[loop, i] = (k, v)
                o = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=n > 1)
                x = x + functional.linear(o[0].transpose(0, 1).reshape(n, -1), w["o"])
                h = functional.rms_norm(x, (c.dim,), w["n2"], 1e-5)
                gate, up = functional.linear(h, w["gu"]).chunk(2, -1)
                x = x + functional.linear(functional.silu(gate) * up, w["down"])
            x = functional.rms_norm(x, (c.dim,), self.norm, 1e-5)
        return functional.linear(x[-1:], self.embed).argmax(-1)

    def decode(self, n_prompt: int, n: int) -> float:
        torch = self.torch
        cache: dict[tuple[int, int], Any] = {}
        with torch.inference_mode():
            token = self._forward(torch.arange(n_prompt), torch.arange(n_prompt), cache)
            token = self._forward(token, torch.tensor([n_prompt]), cache)
            begin = time.perf_counter()
            for i in range(n):
                token = self._forward(token, torch.tensor([n_prompt + 1 + i]), cache)
            return (time.perf_counter() - begin) / n


def measure(name: str, path: Path, threads: int, rounds: int, peer: Torch | None) -> tuple[dict[str, Any], dict[str, Any]]:
    tokens = np.arange(1, 9, dtype=np.int32)
    with tl.Model(path, 2048, device="cpu", threads=threads) as model:
        runs = {"tinyloop": lambda: decode(model, tokens, 64)}
        if peer:
            runs["PyTorch bf16"] = lambda: peer.decode(8, 16)
        figures = alternate(runs, rounds)
        nbytes, resident = streamed_nbytes(model), resident_nbytes(model)
        limit = read_rates(model._engine.plan.context, resident, max(1, (64 << 20) // resident))
    took = statistics.median(figures["tinyloop"])
    row = {
        "shape": name, "tokens/s": f"{1 / took:.0f}", "weights read, GB/s": f"{nbytes / took / 1e9:.1f}", "set, MB": f"{resident / 1e6:.1f}",
        "read rate of the set, GB/s": f"{limit / 1e9:.1f}", "share": f"{nbytes / took / limit:.0%}",
        "against PyTorch": f"{median_ratio(figures['PyTorch bf16'], figures['tinyloop']):.1f}x" if peer else "",
    }  # fmt: skip
    return row, {"seconds": figures, "streamed_nbytes": nbytes, "set_nbytes": resident, "read_rate": limit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shipped", type=Path, default=tl.demo_model())
    parser.add_argument("--keep", metavar="NAME", help="write bench/results/NAME.json")
    args = parser.parse_args()
    try:
        peer = Torch(SHAPES["8x4"], args.threads)
    except ImportError:
        peer = None
        print("PyTorch is left out, not installed: pip install torch==2.13.0")
    with model_file("8x4") as path:
        results = [
            measure("8x4", path, args.threads, args.rounds, peer),
            measure("shipped", args.shipped, args.threads, args.rounds, None),
        ]
    print(table([row for row, _ in results]))
    if args.keep:
        print("kept in", keep(args.keep, {"rows": [row for row, _ in results], "figures": [f for _, f in results]}))


if __name__ == "__main__":
    main()
