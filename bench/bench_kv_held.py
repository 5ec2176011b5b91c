"""What a held prefix costs in each KV mode: bytes of a pool entry, and the time to the first token of a hit against a cold prefill.

The default is a looped shape with as many KV heads as heads, where h applies: one block of 8 layers run 4 times, dim 512.

    python bench/bench_kv_held.py [--model FILE] [--device cpu] [--modes fp16,int8,int4,h] [--tokens 512,1024] [--rounds 5] [--keep NAME]
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import numpy as np
from common import add_model_options, alternate, keep, seconds, table
from random_models import model_file

import tinyloop_py as tl


def first_token(model: tl.Model, prompt: np.ndarray, pool: tl.PrefixPool) -> float:
    return seconds(lambda: model.generate_with_pool(pool, prompt, 1, temperature=0.0, stop_tokens=()))


def measure(models: dict[str, tl.Model], n: int, rounds: int) -> list[dict[str, Any]]:
    vocab_size = next(iter(models.values())).config.vocab_size
    tokens = np.random.default_rng(n).integers(0, vocab_size, n + 1).astype(np.int32)
    pools = {mode: tl.PrefixPool() for mode in models}
    for mode, model in models.items():
        model.register_prefix(pools[mode], tokens[:n])
    runs = {mode: partial(first_token, model, tokens, pools[mode]) for mode, model in models.items()}
    runs |= {f"{mode} cold": partial(first_token, model, tokens, tl.PrefixPool()) for mode, model in models.items()}
    times = {name: statistics.median(figures) for name, figures in alternate(runs, rounds).items()}
    return [
        {"tokens": n, "mode": mode, "entry, MB": f"{pools[mode].nbytes / 1e6:.1f}", "hit, ms": f"{times[mode] * 1e3:.2f}",
         "cold, ms": f"{times[mode + ' cold'] * 1e3:.2f}", "hit / cold": f"{times[mode] / times[mode + ' cold']:.3f}"} for mode in models
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, "8x4", threads=None)
    parser.add_argument("--modes", default="fp16,int8,int4,h")
    parser.add_argument("--tokens", default="512,1024")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    lengths = [int(n) for n in args.tokens.split(",")]
    with model_file(args.model) as path:
        models = {m: tl.Model(path, max(lengths) + 2, device=args.device, kv_mode=m, threads=args.threads) for m in args.modes.split(",")}
        rows = [row for n in lengths for row in measure(models, n, args.rounds)]
        for model in models.values():
            model.close()
    print(table(rows))
    if args.keep:
        print("kept in", keep(args.keep, {"model": str(args.model), "rows": rows}, args.device))


if __name__ == "__main__":
    main()
