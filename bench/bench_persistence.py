"""Save and load of a pool in GB/s of the file, beside what the same bytes cost to copy, to check and to write, and beside building it.

A file in a folder in memory (--folder /dev/shm) shows tinyloop's own cost; elsewhere the disk's flush is part of a save.

    python bench/bench_persistence.py [--model FILE] [--device cpu] [--prefixes 8] [--tokens 512] [--folder DIR] [--rounds 5] [--keep NAME]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from common import add_model_options, alternate, keep, seconds, table
from random_models import model_file

import tinyloop_py as tl


def write_and_flush(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def measure(model: tl.Model, n_prefixes: int, n_tokens: int, folder: Path, rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rng = np.random.default_rng(0)
    pool = tl.PrefixPool(n_prefixes)
    prefixes = [rng.integers(0, model.config.vocab_size, n_tokens).astype(np.int32) for _ in range(n_prefixes)]
    model.generate(prefixes[0], 1)  # what the first call alone does
    built = seconds(lambda: [model.register_prefix(pool, tokens) for tokens in prefixes])
    path = folder / "pool.kv"
    pool.save(path)
    nbytes = path.stat().st_size
    data = path.read_bytes()
    figures = alternate({
        "save": lambda: seconds(lambda: pool.save(path)),
        "load": lambda: seconds(lambda: model.load_pool(path)),
        "the file's bytes written and flushed": lambda: seconds(lambda: write_and_flush(folder / "plain", data)),
        "CRC-32 of the file's bytes": lambda: seconds(lambda: zlib.crc32(data)),
        "the file's bytes copied in memory": lambda: seconds(lambda: bytearray(data)),
    }, rounds)  # fmt: skip
    rows = [
        {"what": name, "ms": f"{1e3 * statistics.median(t):.0f}", "GB/s": f"{nbytes / statistics.median(t) / 1e9:.2f}"} for name, t in figures.items()
    ]
    rows.append({"what": "building it from tokens", "ms": f"{1e3 * built:.0f}", "GB/s": f"{nbytes / built / 1e9:.2f}"})
    return rows, {"seconds": figures, "built_seconds": built, "file_nbytes": nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, tl.demo_model())
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--kv-mode")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        model_file(args.model) as path,
        tl.Model(path, 2048, device=args.device, threads=args.threads, kv_mode=args.kv_mode) as model,
    ):
        rows, record = measure(model, args.prefixes, args.tokens, Path(folder), args.rounds)
    print(f"{args.prefixes} prefixes of {args.tokens} tokens, a file of {record['file_nbytes'] / 1e6:,.1f} MB\n")
    print(table(rows))
    if args.keep:
        print("kept in", keep(args.keep, {"model": str(args.model), "rows": rows, **record}, args.device))


if __name__ == "__main__":
    main()
