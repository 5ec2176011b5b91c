"""What a KV mode costs and gives on one model: bytes of a token, perplexity on a text, decode speed, by context length.

Decode speed is that of tokens drawn behind a cached prompt, modes in turn, so that a drifting machine is the same for all; the
figure to read is the ratio to fp16. Perplexity is over windows of the context length, every token but the first of a window.

python bench/bench_kv_modes.py MODEL TEXT [--modes fp16,int8,...] [--contexts 256,1024,4096] [--tokens 20000] [--device cuda] [--keep NAME]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import alternate, keep, median_ratio, table
from perplexity import losses

import tinyloop_py as tl
from tinyloop_py.kv_modes import kv_nbytes_per_token

N_DRAWN = 12  # tokens of one timed run


def decode_seconds(model: tl.Model, prompt: np.ndarray) -> Callable[[], float]:
    """A run that draws behind a cached prompt and gives the seconds of a token."""
    pool = tl.PrefixPool()
    model.register_prefix(pool, prompt)

    def run() -> float:
        generation = model._start(prompt, N_DRAWN + 1, temperature=0.0, pool=pool, stop_tokens=())
        next(generation)
        begin = time.perf_counter()
        for _ in generation:
            pass
        return (time.perf_counter() - begin) / N_DRAWN

    return run


def speeds(path: Path, modes: list[str], ids: list[int], context: int, rounds: int, **how: Any) -> dict[str, list[float]]:
    models = {mode: tl.Model(path, context + N_DRAWN + 1, kv_mode=mode, **how) for mode in modes}
    prompt = np.array((ids * (context // len(ids) + 1))[:context], np.int32)
    try:
        return alternate({mode: decode_seconds(model, prompt) for mode, model in models.items()}, rounds)
    finally:
        for model in models.values():
            model.close()


def perplexities(path: Path, modes: list[str], ids: list[int], context: int, **how: Any) -> dict[str, float]:
    """Mean loss in nats by mode; `how`: device and threads."""
    out = {}
    for mode in modes:
        with tl.Model(path, context + 1, kv_mode=mode, **how) as model:
            out[mode] = float(losses(model, ids, context, None).mean())
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--modes", default="fp16,bf16,fp32,int8,int4", help="the first is what the others are compared with")
    parser.add_argument("--contexts", default="256,1024,4096")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the text for perplexity; 0 for none")
    parser.add_argument("--rounds", type=int, default=15, help="of decode timing; 0 for none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--keep", metavar="NAME", help="write bench/results/NAME.json")
    args = parser.parse_args()
    modes, how = args.modes.split(","), {"device": args.device, "threads": args.threads}
    with tl.Model(args.model, 16, device="cpu") as model:
        ids, config = model.tokenizer.encode(args.text.read_text()).ids, model.config
    rows: list[dict[str, Any]] = []
    for context in map(int, args.contexts.split(",")):
        loss = perplexities(args.model, modes, ids[: args.tokens], context, **how) if args.tokens else {}
        seconds = speeds(args.model, modes, ids, context, args.rounds, **how) if args.rounds else {}
        for mode in modes:
            row: dict[str, Any] = {"context": context, "mode": mode, "bytes/token": kv_nbytes_per_token(config, config.default_loops, mode)}
            if loss:
                row["perplexity"] = f"{math.exp(loss[mode]):.4f}"
                row["against " + modes[0]] = f"{math.exp(loss[mode] - loss[modes[0]]) - 1:+.3%}"
            if seconds:
                row["ms/token"] = f"{statistics.median(seconds[mode]) * 1e3:.2f}"
                row["speed of " + modes[0]] = f"{median_ratio(seconds[modes[0]], seconds[mode]):.3f}"
            rows.append(row)
            print(row, flush=True)
    print(table(rows))
    if args.keep:
        asked = {"model": args.model.name, "device": args.device, "text": args.text.name, "tokens": args.tokens}
        print("kept in", keep(args.keep, {**asked, "rows": rows}))


if __name__ == "__main__":
    main()
