"""Every CUDA kernel once on small shapes: what compute-sanitizer watches (bench/run_gpu.sh). Prints `ran` and how many tokens.

Weights of all types, KV of all types, prompts that take every path of product and attention, decoding ahead, a hit with a partly
filled page, a window, a page read back. --quick leaves out what other cases run too, for racecheck, which is the slowest.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from models import CONFIGS, random_model, random_tokens, small

import tinyloop_py as tl

SHAPES = {**CONFIGS, "wide": small(n_heads=32, n_kv_heads=32)}  # so many heads that a prompt takes the attention of many rows
CASES = (
    ("shipped", "bf16", "fp16"), ("qwen2", "bf16", "bf16"), ("ouro", "f16", "fp16"), ("huginn", "int8", "bf16"), ("loop_bare", "f32", "fp32"),
    ("qwen3", "bf16", "int8"), ("shipped", "f16", "int4"), ("ouro", "int8", "h"),
    ("wide", "bf16", "fp16"), ("wide", "bf16", "int8"), ("wide", "bf16", "int4"),
)  # fmt: skip
QUICK = (("shipped", "bf16", "fp16"), ("huginn", "int8", "int8"), ("wide", "f16", "int4"))


def run(name: str, dtype: str, kv_mode: str, folder: str) -> int:
    """The tokens drawn."""
    config, path = SHAPES[name], Path(folder) / f"{name}-{dtype}.tinyloop"
    tl.save_model(path, config, random_model(config, 0, dtype), dtype=dtype)
    tokens, n = random_tokens(config, 150), 0
    with tl.Model(path, 256, device="cuda", kv_mode=kv_mode) as model:
        pool = tl.PrefixPool()
        model.register_prefix(pool, tokens[:70], loops=1)
        for end in (71, 78, 110):  # 1, 8 and 40 rows on a hit that ends inside a page
            how = {"loops": 1, "temperature": 1.0, "top_k": 5, "seed": 1, "stop_tokens": ()}
            drawn = model.generate_with_pool(pool, tokens[:end], 3, **how)
            assert drawn == model.generate(tokens[:end], 3, **how)
            n += 2 * (len(drawn) - end)
        model.logits(tokens, 1, 20, last_only=True)
        assert pool.stats().fallbacks == 0
    return n


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print("ran", sum(run(*case, folder) for case in (QUICK if "--quick" in sys.argv[1:] else CASES)))
