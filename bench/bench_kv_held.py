"""What a held prefix costs in each KV mode: bytes of a pool entry, and the time to the first token of a hit against a cold prefill.

On a looped shape with as many KV heads as heads, where h applies: one block of 8 layers run 4 times, dim 512, random bf16 weights.

    python bench/bench_kv_held.py [--modes fp16,int8,int4,h] [--tokens 512,1024] [--rounds 5] [--keep NAME]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from bench_looped import SHAPE
from common import alternate, keep, seconds, table

import tinyloop_py as tl
from tinyloop_py.layout import tensor_shapes


def save_shape(path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = tensor_shapes(SHAPE)
    tensors = {n: np.ones(s, np.float32) if len(s) == 1 else (rng.standard_normal(s) * 0.02).astype(np.float32) for n, s in shapes.items()}
    tl.save_model(path, SHAPE, tensors, dtype="bf16")


def first_token(model: tl.Model, prompt: np.ndarray, pool: tl.PrefixPool) -> float:
    return seconds(lambda: model.generate_with_pool(pool, prompt, 1, temperature=0.0, stop_tokens=()))


def measure(models: dict[str, tl.Model], n: int, rounds: int) -> list[dict[str, Any]]:
    tokens = np.random.default_rng(n).integers(0, SHAPE.vocab_size, n + 1).astype(np.int32)
    pools = {mode: tl.PrefixPool() for mode in models}
    for mode, model in models.items():
        model.register_prefix(pools[mode], tokens[:n])
    runs = {mode: (lambda m=model, p=pools[mode]: first_token(m, tokens, p)) for mode, model in models.items()}
    runs |= {f"{mode} cold": (lambda m=model: first_token(m, tokens, tl.PrefixPool())) for mode, model in models.items()}
    times = {name: statistics.median(figures) for name, figures in alternate(runs, rounds).items()}
    return [
        {"tokens": n, "mode": mode, "entry, MB": f"{pools[mode].nbytes / 1e6:.1f}", "hit, ms": f"{times[mode] * 1e3:.1f}",
         "cold, ms": f"{times[mode + ' cold'] * 1e3:.1f}", "hit / cold": f"{times[mode] / times[mode + ' cold']:.3f}"} for mode in models
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="fp16,int8,int4,h")
    parser.add_argument("--tokens", default="512,1024")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--keep", metavar="NAME", help="write bench/results/NAME.json")
    args = parser.parse_args()
    lengths = [int(n) for n in args.tokens.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shape.tinyloop"
        save_shape(path)
        models = {m: tl.Model(path, max(lengths) + 2, device="cpu", kv_mode=m, threads=args.threads) for m in args.modes.split(",")}
        rows = [row for n in lengths for row in measure(models, n, args.rounds)]
        for model in models.values():
            model.close()
    print(table(rows))
    if args.keep:
        print("kept in", keep(args.keep, {"rows": rows}))


if __name__ == "__main__":
    main()
