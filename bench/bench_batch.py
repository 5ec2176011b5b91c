"""Decode of 1 to 32 sequences in one step, as generate_batch and the server run them: tokens per second, and the gain over one.

python bench/bench_batch.py [--model FILE] [--device cpu] [--prompt 64] [--tokens 64] [--rounds 5] [--keep NAME]
"""

from __future__ import annotations

import argparse
import functools
import statistics
from typing import Any

import numpy as np
from common import add_model_options, alternate, keep, median_ratio, seconds, table
from random_models import model_file

import tinyloop_py as tl
from tinyloop_py.lockstep import step_generations

SIZES = (1, 2, 4, 8, 16, 32)
WARM = 8  # steps before those that are timed: on a GPU the first ones are launched while nothing is ahead
GREEDY = {"temperature": 0.0, "stop_tokens": ()}


def step_seconds(model: tl.Model, prompts: list[np.ndarray], n_steps: int) -> float:
    """Seconds of a decode step of all of them, in steady state."""
    live = [model._start(p, n_steps + WARM + 66, run_prompt=False, **GREEDY) for p in prompts]
    while step_generations(live)[-1] is None:
        pass  # the prompts run
    for _ in range(WARM):
        step_generations(live)
    took = seconds(lambda: [step_generations(live) for _ in range(n_steps)]) / n_steps
    for generation in live:
        generation.close()
    return took


def measure(model: tl.Model, n_prompt: int, n_steps: int, rounds: int) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Rows of the table, and the seconds of a step by number of sequences."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.config.vocab_size, n_prompt).astype(np.int32) for _ in range(max(SIZES))]
    figures = alternate({str(n): functools.partial(step_seconds, model, prompts[:n], n_steps) for n in SIZES}, rounds)
    rows = []
    for n in SIZES:
        took = statistics.median(figures[str(n)])
        gain = n * median_ratio(figures["1"], figures[str(n)])
        rows.append({"sequences": n, "tokens/s": f"{n / took:.0f}", "ms a step": f"{1e3 * took:.2f}", "gain": f"{gain:.1f}x"})
    return rows, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, tl.demo_model())
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with model_file(args.model) as path, tl.Model(path, 2048, device=args.device, threads=args.threads) as model:
        rows, figures = measure(model, args.prompt, args.tokens, args.rounds)
    print(table(rows))
    if args.keep:
        print("kept in", keep(args.keep, {"model": str(args.model), "prompt": args.prompt, "rows": rows, "figures": figures}, args.device))


if __name__ == "__main__":
    main()
