"""Requests that share prefixes: generate, a bare PrefixCache for each prefix, and a pool of them all, beside what the parts predict.

8 prefixes of 512 tokens; a request is one of them, 32 tokens of its own and 32 drawn. The prediction is made of parts timed alone: the steps
of a whole prompt, those of the 32 tokens behind a prefix, and the 31 tokens drawn after the first.

    python bench/bench_prefix.py [--model FILE] [--device cpu] [--rounds 5] [--keep NAME]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from common import add_model_options, alternate, keep, median_ratio, seconds, table
from random_models import model_file

import tinyloop_py as tl

GREEDY = {"temperature": 0.0, "stop_tokens": ()}


def prompt_seconds(model: tl.Model, tokens: np.ndarray, first: int) -> float:
    """Seconds of a prompt's rows from `first` on, in the steps that a call takes."""
    most = model._engine.max_rows
    return sum(model._engine.time_rows(tokens[i : i + most], i, model.config.default_loops) for i in range(first, len(tokens), most))


def decode_seconds(model: tl.Model, tokens: np.ndarray, n_out: int) -> float:
    """Seconds of what is drawn after the first token."""
    generation = model._start(tokens, n_out, **GREEDY)
    next(generation)
    return seconds(lambda: list(generation))


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
    ways: dict[str, Callable[[int], list[list[int]]]] = {
        "generate": lambda n: [model.generate(p, n, **GREEDY) for p in prompts],
        "PrefixCache": lambda n: [model.generate_from_prefix_cache(c, n, suffix=s, **GREEDY) for c, s in zip(caches, own, strict=True)],
        "pool": lambda n: [model.generate_with_pool(pool, p, n, **GREEDY) for p in prompts],
    }
    runs: dict[str, Callable[[], float]] = {}
    for name, way in ways.items():
        runs[name] = lambda way=way: seconds(lambda: way(args.out))  # type: ignore[misc]
        runs[f"{name}, first token"] = lambda way=way: seconds(lambda: way(1))  # type: ignore[misc]
    runs["prompts alone"] = lambda: sum(prompt_seconds(model, p, 0) for p in prompts)
    runs["own tokens alone"] = lambda: sum(prompt_seconds(model, p, args.prefix) for p in prompts)
    runs["decode alone"] = lambda: sum(decode_seconds(model, p, args.out) for p in prompts)
    figures = alternate(runs, args.rounds)
    assert pool.stats().hits == pool.stats().queries > 0
    parts = zip(figures["prompts alone"], figures["own tokens alone"], figures["decode alone"], strict=True)
    predicted = statistics.median((whole + decode) / (rest + decode) for whole, rest, decode in parts)
    rows = []
    for name in ways:
        gain = median_ratio(figures["generate"], figures[name])
        rows.append({
            "requests through": name, "ms each": f"{1e3 * statistics.median(figures[name]) / len(prompts):.1f}", "gain": f"{gain:.2f}x",
            "of the predicted gain": f"{gain / predicted:.0%}" if name != "generate" else "",
            "against the bare cache": f"{median_ratio(figures[name], figures['PrefixCache']):.3f}" if name == "pool" else "",
            "first token, ms": f"{1e3 * statistics.median(figures[f'{name}, first token']) / len(prompts):.2f}",
            "its gain": f"{median_ratio(figures['generate, first token'], figures[f'{name}, first token']):.2f}x",
        })  # fmt: skip
    alone = {name: f"{1e3 * statistics.median(took) / len(prompts):.2f} ms" for name, took in figures.items() if name.endswith("alone")}
    print(f"predicted gain {predicted:.2f}x from {alone}; the pool holds {pool.nbytes / 1e6:.1f} MB")
    return rows, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, tl.demo_model())
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--out", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with model_file(args.model) as path, tl.Model(path, 2048, device=args.device, threads=args.threads) as model:
        rows, figures = measure(model, args)
    print(table(rows))
    if args.keep:
        print("kept in", keep(args.keep, {"model": str(args.model), "rows": rows, "figures": figures}, args.device))


if __name__ == "__main__":
    main()
