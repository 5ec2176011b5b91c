"""Models of random weights in the shapes that benchmarks run, as what `open_model_file` gives, or as a file.

    python bench/random_models.py SHAPE FILE [--weights bf16]

A benchmark's --model takes the name of a shape in place of a file; several of them in a row want a file that is written once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import tinyloop_py as tl
from tinyloop_py.layout import tensor_shapes
from tinyloop_py.model_writer import ModelWriter
from tinyloop_py.weights import STORED, WeightTensor

MEMORY = "/dev/shm"  # written there in seconds


def looped(vocab_size: int, dim: int, ffn_dim: int, n_heads: int, head_dim: int, n_core: int, loops: int) -> tl.ModelConfig:
    """Multi-head attention and SwiGLU, no prelude and no coda, a norm after every loop."""
    return tl.ModelConfig(
        vocab_size=vocab_size, dim=dim, ffn_dim=ffn_dim, n_heads=n_heads, n_kv_heads=n_heads, head_dim=head_dim,
        n_core=n_core, default_loops=loops, loop_norm="every", final_norm=False,
    )  # fmt: skip


SHAPES = {
    "ouro-1.4b": looped(49152, 2048, 5632, 16, 128, n_core=24, loops=4),
    "small-12x4": looped(32000, 768, 2048, 12, 64, n_core=12, loops=4),
    "tiny-4x8": looped(32000, 1024, 2816, 16, 64, n_core=4, loops=8),
    "8x4": looped(32768, 512, 1536, 8, 64, n_core=8, loops=4),
}


class RandomFile:
    """A model file of random weights that is never written: stands for what `open_model_file` gives."""

    stop_ids: tuple[int, ...] = ()
    file_id: tuple[int, ...] = ()
    chat_template = tokenizer_json = None

    def __init__(self, config: tl.ModelConfig, dtype: str) -> None:
        self.config, self.dtype = config, dtype
        self.shapes = tensor_shapes(config)
        self.rng = np.random.default_rng(0)
        values = self.rng.standard_normal(1 << 22).astype(np.float32)
        self.some = {
            "f32": values,
            "bf16": (values.view(np.uint32) >> 16).astype(np.uint16),
            "int8": self.rng.integers(-127, 128, 1 << 22).astype(np.int8),
        }
        self.made: dict[tuple[int, ...], WeightTensor] = {}

    def __enter__(self) -> RandomFile:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tensor(self, name: str) -> WeightTensor:
        """A weight; those of one shape have the same values."""
        shape = self.shapes[name]
        if shape not in self.made:
            self.made[shape] = self._random(name, shape)
        return self.made[shape]

    def read(self, name: str, memory: Any = None) -> WeightTensor:
        """What `tensor` gives."""
        return self.tensor(name)

    def weights_id(self) -> None:
        """No file of a pool is written."""

    def check_unchanged(self) -> None:
        """There is no file to change."""

    def _random(self, name: str, shape: tuple[int, ...]) -> WeightTensor:
        """Random values around 1 for a vector, of standard deviation 1 / sqrt(columns) for a matrix."""
        if len(shape) == 1:
            return WeightTensor(name, "f32", shape, 1 + 0.1 * self.rng.standard_normal(shape[0]).astype(np.float32))
        n, n_in = shape[0] * shape[1], shape[1]
        if self.dtype == "int8":
            scales = np.full(shape[0], 1 / (73 * np.sqrt(n_in)), np.float32)
            return WeightTensor(name, "int8", shape, np.resize(self.some["int8"], n), scales)
        # A power of two keeps the bits' spread: the exponent moves, and nothing is rounded.
        step = round(0.5 * np.log2(n_in)) << 7
        return WeightTensor(name, "bf16", shape, np.resize((self.some["bf16"] - step).astype(STORED["bf16"][1]), n))


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """A word for every id."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def save_random(path: Path, shape: str, dtype: str = "bf16") -> Path:
    """Writes a model of a shape's name into a file."""
    weights = RandomFile(SHAPES[shape], dtype)
    with ModelWriter(path, weights.config, dtype, tokenizer=word_tokenizer(weights.config.vocab_size)) as writer:
        for name in writer.names:
            writer.write(name, weights.tensor(name))
    return path


@contextlib.contextmanager
def model_file(named: str | os.PathLike[str]) -> Iterator[Path]:
    """The file that --model names: its path, or that of a shape's weights, written for as long as this lasts."""
    if str(named) not in SHAPES:
        yield Path(named)
        return
    has_room = os.path.isdir(MEMORY) and shutil.disk_usage(MEMORY).free > 8 << 30
    with tempfile.TemporaryDirectory(dir=MEMORY if has_room else None) as folder:
        yield save_random(Path(folder) / f"{named}.tinyloop", str(named))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    parser.add_argument("--weights", choices=("bf16", "int8"), default="bf16")
    args = parser.parse_args()
    print(f"{save_random(args.file, args.shape, args.weights).stat().st_size:,} bytes in {args.file}")


if __name__ == "__main__":
    main()
