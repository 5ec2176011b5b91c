"""What calls cost beside the model's work: the pool without a hit, the hit itself beside a deep copy, a call's own overhead; and memory of a hit.

The first three rows run on a tiny random model, where a step takes microseconds and what is added shows.

    python bench/bench_calls.py [--model FILE] [--device cpu] [--pairs 200] [--keep NAME]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import add_model_options, alternate, keep, seconds, table
from random_models import model_file

import tinyloop_py as tl
from tinyloop_py.layout import tensor_shapes

GREEDY = {"temperature": 0.0, "stop_tokens": ()}


def tiny_model(folder: Path) -> Path:
    """A random model of one layer of width 32."""
    config = tl.ModelConfig(vocab_size=97, dim=32, ffn_dim=64, n_heads=2, n_kv_heads=1, head_dim=16, n_core=1, default_loops=1)
    rng = np.random.default_rng(0)
    tl.save_model(folder / "tiny.tinyloop", config, {n: rng.standard_normal(s) * 0.1 for n, s in tensor_shapes(config).items()})
    return folder / "tiny.tinyloop"


def no_hits(model: tl.Model, pairs: int) -> dict[str, Any]:
    """generate_with_pool on a pool of 16 entries that never match, less generate."""
    rng = np.random.default_rng(0)
    pool = tl.PrefixPool(16)
    for _ in range(16):
        model.register_prefix(pool, rng.integers(0, model.config.vocab_size, 32))
    prompt = rng.integers(0, model.config.vocab_size, 64).astype(np.int32)
    assert pool.match(model, prompt) == 0
    t = alternate({
        "with": lambda: seconds(lambda: model.generate_with_pool(pool, prompt, 1, **GREEDY)),
        "without": lambda: seconds(lambda: model.generate(prompt, 1, **GREEDY)),
    }, pairs)  # fmt: skip
    added = statistics.median(a - b for a, b in zip(t["with"], t["without"], strict=True))
    return {"what": f"generate_with_pool at no hits, added to generate (median of {pairs} pairs)", "us": f"{1e6 * added:.1f}", "bar": 20}


def own_cost(model: tl.Model, pairs: int) -> dict[str, Any]:
    """generate(max_tokens=1) less the same step run from C."""
    prompt = np.arange(1, 9, dtype=np.int32)
    t = alternate({
        "call": lambda: seconds(lambda: model.generate(prompt, 1, **GREEDY)),
        "step": lambda: model._engine.time_rows(prompt, 0, model.config.default_loops),
    }, pairs)  # fmt: skip
    added = statistics.median(a - b for a, b in zip(t["call"], t["step"], strict=True))
    return {"what": "generate(max_tokens=1) less the same step alone", "us": f"{1e6 * added:.1f}", "bar": 15}


def stream_cost(model: tl.Model, pairs: int) -> dict[str, Any]:
    """A token of generate_stream less one of generate, on a model whose step takes microseconds."""
    prompt, n = np.arange(1, 9, dtype=np.int32), 256
    t = alternate({
        "stream": lambda: seconds(lambda: list(model.generate_stream(prompt, n, **GREEDY))),
        "generate": lambda: seconds(lambda: model.generate(prompt, n, **GREEDY)),
    }, max(1, pairs // 10))  # fmt: skip
    added = statistics.median(a - b for a, b in zip(t["stream"], t["generate"], strict=True)) / n
    return {"what": "generate_stream added to generate, a token", "us": f"{1e6 * added:.2f}"}


def hit(model: tl.Model, n_tokens: int, pairs: int) -> dict[str, Any]:
    """A hit on the whole prompt that draws nothing: look-up, references, page table, partial page; no row runs."""
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, n_tokens).astype(np.int32)
    pool = tl.PrefixPool()
    model.register_prefix(pool, prompt)
    store = model._engine.plan.store
    held = store.used_nbytes
    store.reset_peak()
    t = alternate({"hit": lambda: seconds(lambda: model.generate_with_pool(pool, prompt, 0))}, pairs)["hit"]
    assert pool.stats().prefilled_tokens == 0
    what = f"the hit itself, {n_tokens:,} tokens at depth {model.config.default_loops}, result list included"
    return {"what": what, "us": f"{1e6 * statistics.median(t):.0f}", "bar": 200, "bytes added": f"{store.peak_nbytes - held:,}"}


def deep_copy(model: tl.Model, n_tokens: int, pairs: int) -> dict[str, Any]:
    """What a runtime does that gives every call a cache of its own: the prefix's bytes copied, in memory that is there already."""
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, n_tokens).astype(np.int32)
    with model.build_prefix_cache(prompt) as cache:
        nbytes = cache.nbytes
    context = model._engine.plan.context
    source, to = (context.alloc(nbytes, "a deep copy") for _ in range(2))
    copy, wait = (ctypes.memmove, lambda _: None) if model.device == "cpu" else (context.device.copy, context.device.wait)
    run = lambda: (copy(to.pointer, source.pointer, nbytes), wait("the copy"))  # noqa: E731
    t = alternate({"copy": lambda: seconds(run)}, pairs)["copy"]
    return {"what": f"a deep copy of those {n_tokens:,} tokens' KV", "us": f"{1e6 * statistics.median(t):.0f}", "bytes added": f"{nbytes:,}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, tl.demo_model())
    parser.add_argument("--pairs", type=int, default=200)
    args = parser.parse_args()
    how = {"device": args.device, "threads": args.threads}
    with tempfile.TemporaryDirectory() as folder, tl.Model(tiny_model(Path(folder)), 2048, **how) as model:
        rows = [no_hits(model, args.pairs), own_cost(model, args.pairs), stream_cost(model, args.pairs)]
    with model_file(args.model) as path, tl.Model(path, 2048, **how) as model:
        rows += [hit(model, n, args.pairs) for n in (1024, 1030)] + [deep_copy(model, 1024, args.pairs)]
    print(table([{"what": "", "us": "", "bar": "", "bytes added": "", **row} for row in rows]))
    if args.keep:
        print("kept in", keep(args.keep, {"model": str(args.model), "rows": rows}, args.device))


if __name__ == "__main__":
    main()
