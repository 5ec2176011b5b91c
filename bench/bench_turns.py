"""What a newcomer waits for, and what those that draw wait for meanwhile: steps by rows, and the first token of a hit in company.

A step is of one prompt's rows, at the beginning and behind 1,024 tokens. The newcomer is 32 tokens on a prefix of 512, alone or beside sequences that
decode; "left" are such as were closed just before it came.

    python bench/bench_turns.py [--model FILE] [--device cpu] [--rounds 5] [--keep NAME]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from common import add_model_options, keep, seconds, table
from random_models import model_file

import tinyloop_py as tl
from tinyloop_py.lockstep import step_generations

ROWS, BEHIND, COMPANY, WARM = (1, 8, 32, 64, 128, 256, 512, 768, 1024), 1024, (0, 1, 7), 20


def step_ms(model: tl.Model, tokens: np.ndarray, first: int, rounds: int) -> float:
    """Of these rows at positions from `first` on."""
    took = [model._engine.time_rows(tokens, first, model.config.default_loops) for _ in range(rounds + 1)]
    return 1e3 * statistics.median(took[1:])


def newcomer_ms(model: tl.Model, pool: tl.PrefixPool, prompt: np.ndarray, n_others: int, left: bool) -> float:
    """Until the first token of a prompt that hits, beside others."""
    how: dict[str, Any] = {"temperature": 0.0, "stop_tokens": (), "run_prompt": False}
    others = [model._start(prompt[i : i + 64].copy(), 400, **how) for i in range(n_others)]
    for _ in range(WARM):
        step_generations(others)
    if left:
        for generation in others:
            generation.close()
    newcomer = model._start(prompt, 4, pool=pool, **how)
    live = [newcomer] if left else [*others, newcomer]

    def draw() -> None:
        while step_generations(live)[-1] is None:
            pass

    took = seconds(draw)
    for generation in live:
        generation.close()
    time.sleep(0.05)  # what is ahead of them is done
    return 1e3 * took


def measure(model: tl.Model, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, BEHIND).astype(np.int32)
    sizes = [n for n in ROWS if n <= model._engine.max_rows]
    steps = [{"rows": n, **{f"at {first:,}, ms": f"{step_ms(model, tokens[:n].copy(), first, rounds):.2f}" for first in (0, BEHIND)}} for n in sizes]
    pool = tl.PrefixPool(1)
    model.register_prefix(pool, tokens[:512])
    firsts = []
    for n in COMPANY:
        for left in (False, True) if n else (False,):
            took = [newcomer_ms(model, pool, tokens[:544].copy(), n, left) for _ in range(rounds + 1)][1:]
            firsts.append({"others": n, "they have": "left" if left else "", "first token, ms": f"{statistics.median(took):.2f}"})
    return steps, firsts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, tl.demo_model())
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with model_file(args.model) as path, tl.Model(path, 2 * BEHIND, device=args.device, threads=args.threads) as model:
        steps, firsts = measure(model, args.rounds)
    print(table(steps), table(firsts), sep="\n\n")
    if args.keep:
        print("kept in", keep(args.keep, {"model": str(args.model), "steps": steps, "newcomer": firsts}, args.device))


if __name__ == "__main__":
    main()
