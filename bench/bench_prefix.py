"""Requests that share prefixes: generate, a bare PrefixCache for each prefix, and a pool of them all, beside what the parts predict.

8 prefixes of 512 tokens; a request is one of them, 32 tokens of its own and 32 drawn. The prediction is made of steps timed alone: the prefix, the
32 tokens after it, and 31 decode steps.

    python bench/bench_prefix.py [--model FILE] [--device cpu] [--rounds 5] [--keep NAME]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np
from common import alternate, keep, median_ratio, seconds, table

import tinyloop_py as tl

GREEDY = {"temperature": 0.0, "stop_tokens": ()}


def steps(model: tl.Model, tokens: np.ndarray, n_prefix: int, n_out: int) -> tuple[float, float]:
    """Seconds of the prefix's rows, and of all that a request runs after them."""
    loops, time_rows = model.config.default_loops, model._engine.time_rows
    starts = range(0, n_prefix, model._engine.max_rows)
    prefix = sum(time_rows(tokens[first : min(first + model._engine.max_rows, n_prefix)], first, loops) for first in starts)
    own = time_rows(tokens[n_prefix:], n_prefix, loops)
    one = tokens[:1].copy()
    return prefix, own + sum(time_rows(one, len(tokens) + i, loops) for i in range(n_out - 1))


def measure(model: tl.Model, args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    rng = np.random.default_rng(0)
    random = lambda n: rng.integers(0, model.config.vocab_size, n).astype(np.int32)  # noqa: E731
    prefixes = [random(args.prefix) for _ in range(args.prefixes)]
    own = [random(args.new) for _ in prefixes]
    prompts = [np.concatenate(pair) for pair in zip(prefixes, own, strict=True)]
    pool = tl.PrefixPool(args.prefixes)
    for prefix in prefixes:
        model.register_prefix(pool, prefix)
    caches = [model.build_prefix_cache(prefix) for prefix in prefixes]
    parts: list[tuple[float, float]] = []

    def predict() -> float:
        timed = [steps(model, prompt, args.prefix, args.out) for prompt in prompts]
        parts.append((sum(a for a, _ in timed), sum(b for _, b in timed)))
        return sum(parts[-1])

    figures = alternate({
        "generate": lambda: seconds(lambda: [model.generate(p, args.out, **GREEDY) for p in prompts]),
        "PrefixCache": lambda: seconds(
            lambda: [model.generate_from_prefix_cache(c, args.out, suffix=s, **GREEDY) for c, s in zip(caches, own, strict=True)]
        ),
        "pool": lambda: seconds(lambda: [model.generate_with_pool(pool, p, args.out, **GREEDY) for p in prompts]),
        "steps alone": predict,
    }, args.rounds)  # fmt: skip
    assert pool.stats().hits == pool.stats().queries > 0
    predicted = statistics.median((a + b) / b for a, b in parts[1:])
    rows = []
    for name in ("generate", "PrefixCache", "pool"):
        gain = median_ratio(figures["generate"], figures[name])
        rows.append({
            "requests through": name, "ms each": f"{1e3 * statistics.median(figures[name]) / len(prompts):.1f}", "gain": f"{gain:.2f}x",
            "of the predicted gain": f"{gain / predicted:.0%}" if name != "generate" else "",
            "against the bare cache": f"{median_ratio(figures[name], figures['PrefixCache']):.3f}" if name == "pool" else "",
        })  # fmt: skip
    print(f"predicted gain {predicted:.2f}x; the pool holds {pool.nbytes / 1e6:.1f} MB")
    return rows, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=tl.demo_model(), help="default: the model that comes with tinyloop")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--out", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", metavar="NAME", help="write bench/results/NAME.json")
    args = parser.parse_args()
    with tl.Model(args.model, 2048, device=args.device, threads=args.threads) as model:
        rows, figures = measure(model, args)
    print(table(rows))
    if args.keep:
        print("kept in", keep(args.keep, {"model": str(args.model), "device": args.device, "rows": rows, "figures": figures}))


if __name__ == "__main__":
    main()
