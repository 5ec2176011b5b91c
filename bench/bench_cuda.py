"""Decode, prefill, extension and a hit's cost on one GPU, random weights and tokens, beside PyTorch in the same run.

    python bench/bench_cuda.py [--shapes ouro-1.4b,ouro-1.4b:int8,small-12x4,tiny-4x8] [--no-torch] [--no-compile] [--keep NAME]

Decode is the time between tokens of one call in steady state, at a context of 1,024 to 1,152; prefill is a prompt of 1,024 up to
its first token; extension is a call with 32 new tokens on a hit of 2,048, up to its first token. "hit" is the host's time until the
first new row is asked for. Host time per token is what the calling thread spends on one in steady state, without its waits for the
device; "idle" is the same for tokens that are there already, when device and core have had nothing to do for 50 ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import keep, seconds, table
from random_models import SHAPES, RandomFile

import tinyloop_py as tl
from tinyloop_py import loaded_model

CONTEXT, HIT, NEW, LONG = 1024, 2048, 128, 32768


def open_random(config: tl.ModelConfig, dtype: str, max_seq_len: int, device: str = "cuda") -> tl.Model:
    """A model of random weights."""
    real = loaded_model.open_model_file
    loaded_model.open_model_file = lambda path: RandomFile(config, dtype)  # type: ignore[attr-defined]
    try:
        return tl.Model(Path("random"), max_seq_len, device=device, kv_mode="bf16")
    finally:
        loaded_model.open_model_file = real  # type: ignore[attr-defined]


def steady_ms(model: tl.Model, prompt: np.ndarray, n: int) -> float:
    """Milliseconds between tokens of one generation."""
    generation = model._start(prompt, n + 16, temperature=0.0, stop_tokens=())
    for _ in range(8):
        next(generation)
    took = seconds(lambda: [next(generation) for _ in range(n)])
    generation.close()
    return took / n * 1e3


def host_us(model: tl.Model, prompt: np.ndarray) -> float:
    """Microseconds of the host for a token: launching it among others and taking it, without the wait for it."""
    generation = model._start(prompt, NEW + 64, temperature=0.0, stop_tokens=())
    for _ in range(16):
        next(generation)
    waited = generation.stepper.waited_ns
    took = seconds(lambda: [next(generation) for _ in range(NEW)]) * 1e9
    waited = generation.stepper.waited_ns - waited
    generation.close()
    return (took - waited) / NEW / 1e3


def host_idle_us(model: tl.Model, prompt: np.ndarray) -> float:
    """Microseconds of the host for a token: four that are there already, and the launch of four more among them, after a pause."""
    generation, took = model._start(prompt, NEW, temperature=0.0, stop_tokens=()), []
    for _ in range(20):
        time.sleep(0.05)  # what was launched is done
        took.append(seconds(lambda: [next(generation) for _ in range(4)]) / 4 * 1e6)
    generation.close()
    return statistics.median(took[2:])


def hit_us(model: tl.Model, pool: tl.PrefixPool, prompt: np.ndarray) -> float:
    """Microseconds from the call until its first new row could be enqueued: match, pages, the partly filled page."""
    took = []
    for _ in range(30):
        begin = time.perf_counter()
        generation = model._start(prompt, 8, temperature=0.0, pool=pool, run_prompt=False)
        took.append((time.perf_counter() - begin) * 1e6)
        generation.close()
    return statistics.median(took)


def median_ms(call: Any, n: int = 7) -> float:
    call()
    return statistics.median(seconds(call) * 1e3 for _ in range(n))


def measure(name: str, dtype: str, torch_rows: bool, compiles: bool) -> dict[str, Any]:
    """One row of the table."""
    config, rng = SHAPES[name], np.random.default_rng(1)
    long = LONG if name == "ouro-1.4b" and dtype == "bf16" else 0
    tokens = rng.integers(0, config.vocab_size, max(long, HIT) + 64).astype(np.int32)
    row: dict[str, Any] = {"shape": name, "weights": dtype}
    begin = time.perf_counter()
    with open_random(config, dtype, max(long, HIT + CONTEXT) + 1024) as model:
        row["load s"] = round(time.perf_counter() - begin, 1)
        row["decode ms"] = round(statistics.median(steady_ms(model, tokens[:CONTEXT], NEW) for _ in range(5)), 3)
        row[f"at {HIT:,}"] = round(steady_ms(model, tokens[:HIT], NEW // 2), 3)
        row["host us"] = round(statistics.median(host_us(model, tokens[:64]) for _ in range(5)), 2)
        row["idle us"] = round(host_idle_us(model, tokens[:64]), 2)
        row["prefill ms"] = round(median_ms(lambda: model.generate(tokens[:CONTEXT], 1, temperature=0.0, stop_tokens=())), 2)
        pool = tl.PrefixPool()
        model.register_prefix(pool, tokens[:HIT])
        for n in (8, 32, 64):
            prompt = tokens[: HIT + n]
            call = partial(model.generate_with_pool, pool, prompt, 1, temperature=0.0, stop_tokens=())
            row[f"extend {n} ms"] = round(median_ms(call), 3)
        row["hit us"] = round(hit_us(model, pool, tokens[: HIT + 32]), 1)
        if long:
            model.register_prefix(pool, tokens[:long])
            row["hit 32k us"] = round(hit_us(model, pool, tokens[: long + 32]), 1)
        assert pool.stats().fallbacks == 0
        row["numerics_id"] = model.numerics_id
    if torch_rows and dtype == "bf16":
        import peers_cuda

        row["torch"] = {key: round(value, 3) for key, value in peers_cuda.measure(config, CONTEXT, compiles).items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="ouro-1.4b,ouro-1.4b:int8,small-12x4,tiny-4x8")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes a minute a shape")
    parser.add_argument("--keep", metavar="NAME")
    asked: SimpleNamespace = parser.parse_args(namespace=SimpleNamespace())
    rows = []
    for shape in asked.shapes.split(","):
        name, _, dtype = shape.partition(":")
        rows.append(measure(name, dtype or "bf16", not asked.no_torch, not asked.no_compile))
        print(rows[-1], flush=True)
        if asked.keep:
            keep(asked.keep, {"rows": rows}, "cuda")
    columns = [c for c in rows[0] if c not in ("torch", "numerics_id")]
    print(table([{c: row.get(c, "") for c in columns} for row in rows]))


if __name__ == "__main__":
    main()
