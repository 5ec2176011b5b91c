"""What a KV mode costs and gives on one model: bytes of a token, perplexity on a text, decode speed, by context length.

Without a text it is speed alone, on random tokens.

Decode speed is that of tokens drawn behind a cached prompt, modes in turn, so that a drifting machine is the same for all; the
figure to read is the ratio to fp16. Perplexity is over windows of the context length, every token but the first of a window.

    python bench/bench_kv_modes.py --model FILE [--text FILE] [--modes fp16,int8,...] [--contexts 256,1024,4096] [--tokens 20000] [--keep NAME]
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
from common import add_model_options, alternate, keep, median_ratio, table
from perplexity import losses
from random_models import model_file

import tinyloop_py as tl
from tinyloop_py.kv_modes import kv_nbytes_per_token
from tinyloop_py.model_file import open_model_file

N_DRAWN = 12  # tokens of one timed run
WARM = 4  # before them


def decode_seconds(model: tl.Model, prompt: np.ndarray) -> Callable[[], float]:
    """A run that draws behind a cached prompt and gives the seconds of a token."""
    pool = tl.PrefixPool()
    model.register_prefix(pool, prompt)

    def run() -> float:
        generation = model._start(prompt, N_DRAWN + WARM, temperature=0.0, pool=pool, stop_tokens=())
        for _ in range(WARM):
            next(generation)
        begin = time.perf_counter()
        for _ in generation:
            pass
        return (time.perf_counter() - begin) / N_DRAWN

    return run


def speeds(path: Path, modes: list[str], ids: list[int], contexts: list[int], rounds: int, **how: Any) -> dict[int, dict[str, list[float]]]:
    """Seconds of a token by context and mode; `how`: device and threads."""
    models = {mode: tl.Model(path, max(contexts) + N_DRAWN + WARM, kv_mode=mode, **how) for mode in modes}
    found = {}
    try:
        for context in contexts:
            prompt = np.array((ids * (context // len(ids) + 1))[:context], np.int32)
            found[context] = alternate({mode: decode_seconds(model, prompt) for mode, model in models.items()}, rounds)
        return found
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


def measure(path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the table."""
    modes, contexts = args.modes.split(","), [int(n) for n in args.contexts.split(",")]
    how = {"device": args.device, "threads": args.threads}
    with open_model_file(path) as file:
        config, tokenizer = file.config, file.load_tokenizer()
    if args.text and tokenizer is None:
        raise ValueError(f"{path} has no tokenizer: leave --text out")
    ids = tokenizer.encode(args.text.read_text()).ids if args.text else np.random.default_rng(0).integers(0, config.vocab_size, 4096).tolist()
    seconds = speeds(path, modes, ids, contexts, args.rounds, **how) if args.rounds else {}
    rows: list[dict[str, Any]] = []
    for context in contexts:
        loss = perplexities(path, modes, ids[: args.tokens], context, **how) if args.text and args.tokens else {}
        for mode in modes:
            row: dict[str, Any] = {"context": context, "mode": mode, "bytes/token": kv_nbytes_per_token(config, config.default_loops, mode)}
            if loss:
                row["perplexity"] = f"{math.exp(loss[mode]):.4f}"
                row["against " + modes[0]] = f"{math.exp(loss[mode] - loss[modes[0]]) - 1:+.3%}"
            if seconds:
                row["ms/token"] = f"{statistics.median(seconds[context][mode]) * 1e3:.3f}"
                row["speed of " + modes[0]] = f"{median_ratio(seconds[context][modes[0]], seconds[context][mode]):.3f}"
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, tl.demo_model(), threads=None)
    parser.add_argument("--text", type=Path, help="what perplexity is measured on")
    parser.add_argument("--modes", default="fp16,bf16,fp32,int8,int4", help="the first is what the others are compared with")
    parser.add_argument("--contexts", default="256,1024,4096")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the text for perplexity; 0 for none")
    parser.add_argument("--rounds", type=int, default=15, help="of decode timing; 0 for none")
    args = parser.parse_args()
    with model_file(args.model) as path:
        rows = measure(path, args)
    print(table(rows))
    if args.keep:
        asked = {"model": str(args.model), "text": str(args.text), "tokens": args.tokens}
        print("kept in", keep(args.keep, {**asked, "rows": rows}, args.device))


if __name__ == "__main__":
    main()
