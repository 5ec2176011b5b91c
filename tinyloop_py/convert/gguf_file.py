"""The tensors of a GGUF file as float32 blocks, dequantised by the `gguf` package."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import FormatError
from ..quantize import F32Array, row_blocks
from .extra import require_extra
from .gguf_header import GgufTensor, read_gguf_header
from .source import SourceTensor

# type -> what it is stored as where nothing is asked for; the quantised ones have no counterpart
OWN_TYPE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
QUANTISED_OWN_TYPE = "bf16"


@dataclass(frozen=True)
class GgufFile:
    """The fields and tensors of a GGUF file."""

    path: str
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]
    nbytes: int

    @classmethod
    def open(cls, path: str) -> GgufFile:
        """Read the header of a GGUF file of one part; FormatError where it is damaged."""
        require_extra("gguf")  # before anything else can go wrong
        fields, tensors, nbytes = read_gguf_header(path)
        if (parts := fields.get("split.count", 1)) not in (0, 1):
            raise FormatError(f"split.count is {parts}; merge the parts into one GGUF file first")
        return cls(path, fields, {tensor.name: tensor for tensor in tensors}, nbytes)

    def tensor(self, name: str, rope_head_dim: int | None = None) -> SourceTensor:
        """A tensor, dequantised block by block. With `rope_head_dim` rows go from llama.cpp's interleaved order to the half-split one."""
        gguf = require_extra("gguf")
        tensor = self.tensors[name]
        supported = {int(gguf.GGMLQuantizationType[kind]): kind for kind in (*OWN_TYPE, *QUANTISED)}
        if tensor.kind not in supported:
            known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
            raise FormatError(f"tensor {name} has type {known.get(tensor.kind, tensor.kind)}, supported are {', '.join(supported.values())}")
        kind = gguf.GGMLQuantizationType(tensor.kind)
        n_rows, n_cols = math.prod(tensor.shape[:-1]), tensor.shape[-1]
        block_size, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
        row_nbytes = n_cols // block_size * block_nbytes
        if n_cols % block_size:
            raise FormatError(f"tensor {name} has rows of {n_cols} values, {kind.name} stores {block_size} at a time")
        if tensor.offset + n_rows * row_nbytes > self.nbytes:
            raise FormatError(f"truncated: tensor {name} ends at byte {tensor.offset + n_rows * row_nbytes}, the file has {self.nbytes}")
        unit = rope_head_dim if rope_head_dim and len(tensor.shape) > 1 else 1  # rows that must stay in one block

        def blocks() -> Iterator[F32Array]:
            with open(self.path, "rb") as file:
                file.seek(tensor.offset)
                for units in row_blocks(n_rows // unit, n_cols * unit):
                    n = (units.stop - units.start) * unit
                    raw = np.fromfile(file, np.uint8, n * row_nbytes)
                    if raw.size != n * row_nbytes:
                        raise FormatError(f"tensor {name} ends early; the file was changed while it was read")
                    block = gguf.dequantize(raw.reshape(n, row_nbytes), kind).reshape(n, n_cols)
                    if rope_head_dim:
                        columns = n_cols if len(tensor.shape) > 1 else 1  # a bias: every value is a row
                        block = half_split_rows(block.reshape(-1, columns), rope_head_dim).reshape(block.shape)
                    yield block

        return SourceTensor(name, tensor.shape, OWN_TYPE.get(kind.name, QUANTISED_OWN_TYPE), n_rows * row_nbytes, blocks)

    def small(self, name: str) -> F32Array:
        """A small tensor, whole and flat."""
        return np.concatenate([block.reshape(-1) for block in self.tensor(name).blocks()])


def half_split_rows(rows: F32Array, head_dim: int) -> F32Array:
    """Undo the row order of llama.cpp's converter, which puts the two rows that rope turns together next to each other."""
    split: F32Array = rows.reshape(-1, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
    return split


def is_gguf(path: str) -> bool:
    """Whether a file starts as GGUF does."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"
