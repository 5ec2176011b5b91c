"""Builds of one backend's library beside each other: what a change of a kernel is worth, and whether it changes a bit.

    python bench/bench_builds.py BASE.so VARIANT.so ... [--device cuda] [--shapes ouro-1.4b:int8,small-12x4] [--extend] [--rounds 2]

The builds take turns, each in a process of its own with all shapes (random weights and tokens), so that a device that slows down does so for all.
A figure is the median of its rounds' medians, and its ratio to the first build's; "bits" says whether the logits behind the prompt and the tokens
drawn after it are the first build's. With --extend also a call with 8, 32 and 64 new tokens on a hit, up to its first token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from bench_cuda import median_ms, open_random, steady_ms
from common import keep, table
from random_models import SHAPES

import tinyloop_py as tl

EXTENSIONS = (8, 32, 64)


def measure(shape: str, asked: SimpleNamespace) -> dict[str, Any]:
    """A shape's figures with the build that this process has loaded."""
    name, _, dtype = shape.partition(":")
    config = SHAPES[name]
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 2 * asked.context + max(EXTENSIONS)).astype(np.int32)
    prompt = tokens[: asked.context]
    with open_random(config, dtype or "bf16", 2 * asked.context + 1024, asked.device) as model:
        drawn = model.generate(prompt, 16, temperature=0.0, stop_tokens=())
        bits = hashlib.sha256(np.asarray(model.logits(prompt)).tobytes() + np.asarray(drawn).tobytes()).hexdigest()
        row: dict[str, Any] = {"bits": bits, "decode ms": statistics.median(steady_ms(model, prompt, asked.tokens) for _ in range(5))}
        if asked.extend:
            pool = tl.PrefixPool()
            model.register_prefix(pool, tokens[: 2 * asked.context])
            for n in EXTENSIONS:
                call = partial(model.generate_with_pool, pool, tokens[: 2 * asked.context + n], 1, temperature=0.0, stop_tokens=())
                row[f"extend {n} ms"] = median_ms(call)
    return row


def run_build(library: Path, asked: SimpleNamespace) -> dict[str, dict[str, Any]]:
    """Each shape's figures, measured in a process that loads the library."""
    variable = f"TINYLOOP_{'CUDA' if asked.device.startswith('cuda') else 'CPU'}_LIBRARY"
    command = [sys.executable, *sys.argv, "--measure"]
    done = subprocess.run(command, env={**os.environ, variable: str(library.resolve())}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def rows_of(rounds: list[dict[Path, dict[str, dict[str, Any]]]]) -> list[dict[str, Any]]:
    """The table: a row for each shape and build."""
    rows, first = [], next(iter(rounds[0]))
    for shape, figures in rounds[0][first].items():
        for library in rounds[0]:
            row = {"shape": shape, "build": library.name}
            for figure in figures:
                if figure == "bits":
                    row["bits"] = "same" if all(r[library][shape]["bits"] == rounds[0][first][shape]["bits"] for r in rounds) else "differ"
                    continue
                mine, base = (statistics.median(r[build][shape][figure] for r in rounds) for build in (library, first))
                row[figure] = f"{mine:.3f} ({mine / base:.3f})"
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", type=Path, help="the first one is what the others are compared with")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", default="ouro-1.4b,ouro-1.4b:int8,small-12x4,tiny-4x8")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompt; a hit has twice as many")
    parser.add_argument("--tokens", type=int, default=128, help="over which a step's time is taken")
    parser.add_argument("--extend", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep", metavar="NAME")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked: SimpleNamespace = parser.parse_args(namespace=SimpleNamespace())
    if asked.measure:
        print(json.dumps({shape: measure(shape, asked) for shape in asked.shapes.split(",")}))
        return
    rounds = [{library: run_build(library, asked) for library in asked.libraries} for _ in range(asked.rounds)]
    rows = rows_of(rounds)
    print(table(rows))
    if asked.keep:
        keep(asked.keep, {"rows": rows}, asked.device)


if __name__ == "__main__":
    main()
