"""The cost of a prompt at 4 loops from a handle at 2, beside a run from scratch; and what the handle adds to building and to memory.

For a model with at least 4 loops.

    python bench/bench_resume.py [--model FILE] [--device cpu] [--tokens 512] [--rounds 7] [--threads 2] [--keep NAME]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np
from common import add_model_options, alternate, keep, median_ratio, seconds, table
from random_models import model_file

import tinyloop_py as tl

GREEDY = {"temperature": 0.0, "stop_tokens": ()}


def measure(model: tl.Model, n_tokens: int, rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, n_tokens).astype(np.int32)
    handle = model.build_resume_handle(prompt, 2)
    assert model.resume_generate(handle, 4, 8, **GREEDY) == model.generate(prompt, 8, 4, **GREEDY)
    runs = {
        "fresh, 4 loops": lambda: seconds(lambda: model.generate(prompt, 1, 4, **GREEDY)),
        "resumed, 2 to 4": lambda: seconds(lambda: model.resume_generate(handle, 4, 1, **GREEDY)),
        "resumed, 2 to 2": lambda: seconds(lambda: model.resume_generate(handle, 2, 1, **GREEDY)),
        "resumed, 2 to 1": lambda: seconds(lambda: model.resume_generate(handle, 1, 1, **GREEDY)),
        "fresh, 2 loops": lambda: seconds(lambda: model.generate(prompt, 1, 2, **GREEDY)),
        "building the handle at 2": lambda: seconds(lambda: model.build_resume_handle(prompt, 2)),
    }
    figures = alternate(runs, rounds)
    rows = [
        {"what": name, "ms": f"{1e3 * statistics.median(took):.1f}", "of fresh at 4": f"{median_ratio(took, figures['fresh, 4 loops']):.1%}"}
        for name, took in figures.items()
    ]
    hidden = handle.nbytes - handle._prefix_at(2).nbytes
    rows.append({"what": f"hidden rows, {hidden:,} bytes", "ms": "", "of fresh at 4": f"{hidden / (handle.nbytes - hidden):.1%} of the KV at 2"})
    return rows, {"seconds": figures, "hidden_nbytes": hidden, "handle_nbytes": handle.nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, "8x4")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with model_file(args.model) as path, tl.Model(path, 2048, device=args.device, threads=args.threads) as model:
        rows, record = measure(model, args.tokens, args.rounds)
    print(f"a prompt of {args.tokens} tokens and one token drawn\n")
    print(table(rows))
    if args.keep:
        print("kept in", keep(args.keep, {"model": str(args.model), "tokens": args.tokens, "rows": rows, **record}, args.device))


if __name__ == "__main__":
    main()
