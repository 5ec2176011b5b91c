"""WeightTensor: one weight in the type that a `.tinyloop` file stores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .quantize import F32Array, bf16_from_float32, dequantize_rows, float32_from_bf16, row_blocks

# type -> (name in a safetensors header, element as NumPy sees it; bfloat16 as its bits)
STORED: dict[str, tuple[str, np.dtype[Any]]] = {
    "f32": ("F32", np.dtype("<f4")),
    "bf16": ("BF16", np.dtype("<u2")),
    "f16": ("F16", np.dtype("<f2")),
    "int8": ("I8", np.dtype("i1")),
}
FLOAT_TYPES = ("f32", "bf16", "f16")


@dataclass(frozen=True, eq=False)
class WeightTensor:
    """A weight: `data` is flat, in row-major order, of the type STORED says (bfloat16: uint16 bits).

    From a `ModelFile` the arrays are read-only views of the mapped file: nothing is copied before it is used.
    """

    name: str
    dtype: str  # "f32", "bf16", "f16" or "int8"
    shape: tuple[int, ...]
    data: npt.NDArray[Any]
    scales: F32Array | None = None  # int8: (n_out,), or (n_out, n_groups) with a group_size
    group_size: int | None = None  # columns that share a scale; None: the whole row

    @classmethod
    def of(cls, array: npt.ArrayLike, name: str = "") -> WeightTensor:
        """A float weight from an array of float32, float16, float64 (rounded to float32) or ml_dtypes' bfloat16."""
        a = np.asarray(array)
        kind = a.dtype.name  # by name: ml_dtypes need not be installed
        if kind == "bfloat16":
            return cls(name, "bf16", a.shape, np.ascontiguousarray(a).view("<u2").reshape(-1))
        dtype = {"float32": "f32", "float64": "f32", "float16": "f16"}.get(kind)
        if dtype is None:
            hint = "; wrap bfloat16 bits as WeightTensor.bf16(bits)" if kind == "uint16" else ""
            raise TypeError(f"weight {name or 'array'} has type {kind}, expected float32, float16, bfloat16 or float64{hint}")
        return cls(name, dtype, a.shape, np.ascontiguousarray(a, dtype=STORED[dtype][1]).reshape(-1))

    @classmethod
    def bf16(cls, bits: npt.ArrayLike, name: str = "") -> WeightTensor:
        """A bfloat16 weight from its bits, an array of uint16 (or int16), as torch's ``t.view(torch.int16).numpy()`` gives them."""
        a = np.asarray(bits)
        if a.dtype.kind not in "iu" or a.dtype.itemsize != 2:
            raise TypeError(f"bfloat16 bits have type {a.dtype.name}, expected uint16 or int16")
        return cls(name, "bf16", a.shape, np.ascontiguousarray(a).view("<u2").reshape(-1))

    @property
    def nbytes(self) -> int:
        """Bytes of the values and their scales."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def n_rows(self) -> int:
        """Rows of a matrix; a vector has one."""
        return self.shape[0] if len(self.shape) > 1 else 1

    def rows_float32(self, rows: slice = slice(None)) -> F32Array:
        """Rows of the weight in float32, ``(n, n_in)``; a vector counts as one row. Always a new array."""
        data = self.data.reshape(self.n_rows, -1)[rows]
        if self.dtype == "int8":
            assert self.scales is not None
            return dequantize_rows(data, self.scales[rows], self.group_size)
        return float32_from_bf16(data) if self.dtype == "bf16" else data.astype(np.float32)

    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite (int8: no scale)."""
        if self.scales is not None:
            return bool(np.isfinite(self.scales).all())
        blocks = row_blocks(self.n_rows, self.data.size // self.n_rows)
        return all(bool(np.isfinite(self.rows_float32(rows)).all()) for rows in blocks)

    def to_float32(self) -> F32Array:
        """The whole weight in float32, in its shape. Always a new array."""
        return self.rows_float32().reshape(self.shape)


def float_bits(values: F32Array, dtype: str) -> npt.NDArray[Any]:
    """float32 values in the stored form of a float type; values beyond float16 become infinite."""
    if dtype == "bf16":
        return bf16_from_float32(values)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, dtype=STORED[dtype][1])


def stored_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of the values of a weight, its scales aside."""
    return math.prod(shape) * STORED[dtype][1].itemsize
