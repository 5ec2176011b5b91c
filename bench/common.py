"""What every benchmark shares: alternating runs, medians, the machine's own limits, and a record to keep."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def add_model_options(parser: argparse.ArgumentParser, model: Any, threads: int | None = 2) -> None:
    """--model, --device and --threads with their defaults, and --keep."""
    parser.add_argument("--model", default=model, help="a file, or a shape of random_models.py (default: %(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=threads, help="of the CPU")
    parser.add_argument("--keep", metavar="NAME", help="write bench/results/NAME.json")


def seconds(call: Callable[[], Any]) -> float:
    """Wall seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def alternate(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Each run's own figure, round by round in turn, so that a machine whose speed drifts is the same for all."""
    figures: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # warm
    for _ in range(rounds):
        for name, run in runs.items():
            figures[name].append(run())
    return figures


def median_ratio(over: list[float], under: list[float]) -> float:
    """Median of the ratios pair by pair."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def read_rates(context: Any, nbytes: int, n_repeats: int = 5, rounds: int = 9) -> float:
    """Median rate at which the context's threads read a set of this size, each its own part of it, bytes/s."""
    import ctypes

    buffer = context.alloc(nbytes, "the read probe")
    ctypes.memset(buffer.pointer, 1, nbytes)
    return statistics.median(context.read_rate(buffer, n_repeats) for _ in range(rounds))


def commit() -> str:
    """The source's commit, with a plus sign where files differ from it."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if dirty else "")


def processor() -> str:
    """Its name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def gpu() -> str:
    """Its name and driver, as nvidia-smi tells it."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        name, driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    except (OSError, ValueError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}, driver {driver}"


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table, columns in the order of the first row."""
    columns = list(rows[0])
    text = [[str(row.get(c, "")) for c in columns] for row in rows]
    widths = [max(len(c), *(len(row[i]) for row in text)) for i, c in enumerate(columns)]
    line = lambda cells: "| " + " | ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)) + " |"  # noqa: E731
    return "\n".join([line(columns), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *(line(row) for row in text)])


def keep(name: str, record: dict[str, Any], device: str = "cpu") -> Path:
    """Writes a record with date, commit, machine and command into bench/results/; files by their names, without folders."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    head = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        **({"device": gpu()} if device.startswith("cuda") else {}),
        "processor": processor(),
        "python": platform.python_version(),
        "command": " ".join(["python", *sys.argv]),
    }
    text = json.dumps({**head, **record}, indent=1, default=str)
    path.write_text(re.sub(r"(?<![\w.])/[^\s\"']*/([^\s\"'/]+)", r"\1", text) + "\n")
    return path
