"""Perplexity of model files on a text, side by side: what a weight type or a KV mode costs in quality.

python bench/perplexity.py TEXT MODEL [MODEL ...] [--kv-mode fp16] [--context 512] [--tokens 20000] [--keep NAME]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
from common import keep, table

import tinyloop_py as tl


def losses(model: tl.Model, ids: list[int], context: int, loops: int | None) -> np.ndarray:
    """Loss in nats of every token but the first of each window of `context` tokens."""
    out = []
    for first in range(0, len(ids) - 1, context):
        window = np.array(ids[first : first + context + 1], np.int32)
        logits = model.logits(window[:-1], loops)
        for row in range(0, len(logits), 256):  # in blocks: float64 of a whole window is gigabytes
            rows, targets = logits[row : row + 256].astype(np.float64), window[1 + row : 257 + row]
            top = rows.max(1, keepdims=True)
            log_sum = np.log(np.exp(rows - top).sum(1)) + top[:, 0]
            out.append(log_sum - rows[np.arange(len(rows)), targets])
    return np.concatenate(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", type=Path, help="the first is what the others are compared with")
    parser.add_argument("--kv-mode")
    parser.add_argument("--loops", type=int)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--keep", metavar="NAME", help="write bench/results/NAME.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    first = None
    for path in args.models:
        with tl.Model(path, args.context + 1, device="cpu", kv_mode=args.kv_mode) as model:
            ids = model.tokenizer.encode(args.text.read_text()).ids[: args.tokens]
            loss = losses(model, ids, args.context, args.loops).mean()
        first = loss if first is None else first
        rows.append({"model": path.name, "tokens": len(ids), "loss": f"{loss:.5f}", "perplexity": f"{math.exp(loss):.4f}",
                     "against the first": f"{math.exp(loss - first) - 1:+.3%}"})  # fmt: skip
    print(table(rows))
    if args.keep:
        print("kept in", keep(args.keep, {"text": args.text.name, "context": args.context, "rows": rows}))


if __name__ == "__main__":
    main()
