"""Every CUDA kernel once on small shapes: what compute-sanitizer watches (bench/run_gpu.sh). Prints `ran` and how many tokens.

Weights of all types, KV of all types, prompts that take every path of product and attention, decoding ahead, a hit with a partly
filled page, a window, a page read back.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from models import CONFIGS, random_model, random_tokens

import tinyloop_py as tl

CASES = (("shipped", "bf16", "fp16"), ("qwen2", "bf16", "bf16"), ("ouro", "f16", "fp16"), ("huginn", "int8", "bf16"), ("loop_bare", "f32", "fp32"))


def run(name: str, dtype: str, kv_mode: str, folder: str) -> int:
    """The tokens drawn."""
    config, path = CONFIGS[name], Path(folder) / f"{name}.tinyloop"
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
        print("ran", sum(run(*case, folder) for case in CASES))
