"""How long PrefixPool.match takes for an int32 prompt of 2,048 tokens, by number and shape of the entries.

Prints a Markdown table: median and 99th percentile of single calls in us. The prompts of a case take turns, as do the pool
sizes of a row, so that caches and branch predictors are not flattered and noise falls on all alike.

    python bench/bench_match.py [--rounds 40] [--sizes 1,16,256,1024,10000]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import time
from collections.abc import Callable

import numpy as np

from tinyloop_py.pool import PrefixPool
from tinyloop_py.pool_client import PoolClient

N_PROMPT = 2048
N_PROMPTS = 16  # per case
N_CALLS = 64  # timed one by one, per round
VOCAB = 50_000

Tokens = np.ndarray
Case = tuple[list[Tokens], list[Tokens]]  # entries, prompts


class NoPages:
    def parts(self) -> tuple[()]:
        return ()


def changed(tokens: Tokens, at: int, token: int) -> Tokens:
    """A copy with one token replaced."""
    copy = tokens.copy()
    copy[at] = token
    return copy


def nested(n: int, rng: np.random.Generator, longest: int) -> Case:
    """Chains of prefixes of each other, the longest of each `longest` tokens, and prompts that start with all of a chain."""
    n_chains = -(-n // longest)
    bases = [changed(rng.integers(1, VOCAB, N_PROMPT).astype(np.int32), 0, i + 1) for i in range(n_chains)]
    entries = [bases[i % n_chains][: longest - i // n_chains] for i in range(n)]
    return entries, bases


def nested_diverging(n: int, rng: np.random.Generator, longest: int, token: int) -> Case:
    """The same, and prompts that leave their chain anywhere between its shortest and its longest entry."""
    entries, bases = nested(n, rng, longest)
    points = rng.integers(len(entries[-1]), longest, N_PROMPTS) if n > 1 else [longest - 1]
    return entries, [changed(bases[i % len(bases)], int(point), token) for i, point in enumerate(points)]


def last_token(n: int, rng: np.random.Generator, hit: bool) -> Case:
    """Entries that share 2,047 tokens, half of them below and half above a prompt that misses."""
    base = rng.integers(1, VOCAB, N_PROMPT).astype(np.int32)
    entries = [changed(base, -1, 2 * i) for i in range(n)]
    tokens = [2 * int(i) for i in rng.integers(0, n, N_PROMPTS)] if hit else [2 * (n // 2) - 1]
    return entries, [changed(base, -1, token) for token in tokens]


def comb(n: int, rng: np.random.Generator) -> Case:
    """Entries that leave the prompt one after the other along its length, by turns below and above it."""
    base = rng.integers(1, VOCAB, N_PROMPT).astype(np.int32)
    points = [1 + i * (N_PROMPT - 1) // n for i in range(n)]
    entries = [np.append(base[:point], [(VOCAB + 1 + i) if i % 2 else -1 - i]).astype(np.int32) for i, point in enumerate(points)]
    return entries, [base, changed(base, N_PROMPT // 2, 0), changed(base, N_PROMPT - 1, VOCAB)]


def unrelated(n: int, rng: np.random.Generator) -> Case:
    entries = [rng.integers(1, VOCAB, 256).astype(np.int32) for _ in range(n)]
    return entries, [rng.integers(1, VOCAB, N_PROMPT).astype(np.int32) for _ in range(N_PROMPTS)]


CASES: dict[str, Callable[[int, np.random.Generator], Case]] = {
    "nested, lengths 1 to n": lambda n, rng: nested(n, rng, min(n, N_PROMPT)),
    "nested, lengths 1 to n, prompt leaves upwards": lambda n, rng: nested_diverging(n, rng, min(n, N_PROMPT), VOCAB),
    "nested, lengths 1 to n, prompt leaves downwards": lambda n, rng: nested_diverging(n, rng, min(n, N_PROMPT), 0),
    "nested, lengths to 2,048": lambda n, rng: nested(n, rng, N_PROMPT),
    "nested, lengths to 2,048, prompt leaves upwards": lambda n, rng: nested_diverging(n, rng, N_PROMPT, VOCAB),
    "nested, lengths to 2,048, prompt leaves downwards": lambda n, rng: nested_diverging(n, rng, N_PROMPT, 0),
    "2,047 tokens shared, hit": lambda n, rng: last_token(n, rng, True),
    "2,047 tokens shared, miss": lambda n, rng: last_token(n, rng, False),
    "comb along the prompt": comb,
    "unrelated": unrelated,
}


def filled(model: PoolClient, entries: list[Tokens]) -> tuple[PrefixPool, float]:
    """A pool of these entries, and the seconds that it took to fill."""
    pool = PrefixPool(capacity=len(entries))
    key = model._pool_key()
    start = time.perf_counter()
    for tokens in entries:
        pool._insert(key, tokens, NoPages())
    return pool, time.perf_counter() - start


def time_calls(pool: PrefixPool, model: PoolClient, prompts: list[Tokens]) -> list[int]:
    """Nanoseconds of single calls, the clock's own cost included."""
    clock = time.perf_counter_ns
    times = []
    for i in range(N_CALLS):
        prompt = prompts[i % len(prompts)]
        start = clock()
        pool.match(model, prompt)
        times.append(clock() - start)
    return times


def clock_cost() -> float:
    clock = time.perf_counter_ns
    times = []
    for _ in range(20_000):
        start = clock()
        times.append(clock() - start)
    return statistics.median(times)


def machine() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    return f"{name}, Python {platform.python_version()}, commit {commit or 'unknown'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 256, 1024, 10_000])
    args = parser.parse_args()
    model = PoolClient(8, 8)
    clock = clock_cost()
    print(f"{machine()}; us a call, median (p99), less {clock:.0f} ns of clock\n")
    print("| entries | " + " | ".join(f"{n:,}" for n in args.sizes) + " |")
    print("|---|" + "---|" * len(args.sizes))
    slowest_fill = 0.0
    for name, case in CASES.items():
        made = [case(n, np.random.default_rng(n)) for n in args.sizes]
        pools = [filled(model, entries) for entries, _ in made]
        slowest_fill = max(slowest_fill, *(seconds / n for (_, seconds), n in zip(pools, args.sizes, strict=True)))
        times: list[list[int]] = [[] for _ in pools]
        for _ in range(args.rounds):
            for (pool, _), (_, prompts), into in zip(pools, made, times, strict=True):
                into += time_calls(pool, model, prompts)
        cells = []
        for into in times:
            into.sort()
            cells.append(f"{(into[len(into) // 2] - clock) / 1e3:.2f} ({(into[len(into) * 99 // 100] - clock) / 1e3:.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |")
    print(f"\nslowest filling: {slowest_fill * 1e6:.1f} us an entry")


if __name__ == "__main__":
    main()
