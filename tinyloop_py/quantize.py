"""Number formats of weights: bfloat16 bits and symmetric int8 with float32 scales, in NumPy.

int8 of a row, or of a group of `group_size` columns of it: ``scale = max|w| / 127`` rounded to float32, then
``q = round_half_even(w / scale)`` in float32, clipped to -127..127; a zero row has scale 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

F32Array = npt.NDArray[np.float32]

GROUP_STEP = 64  # group sizes are its multiples: the kernels quantise activations in groups of 32 or 64
BLOCK_ELEMENTS = 1 << 22  # values handled at a time: 16 MiB in float32


def bf16_from_float32(x: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """The bfloat16 bits of float32 values, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype="<f4").view("<u4")
    rounded: npt.NDArray[np.uint16] = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16).astype("<u2")
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if nan.any():
        rounded[nan] = (bits[nan] >> 16).astype("<u2") | 0x40
    return rounded


def float32_from_bf16(bits: npt.ArrayLike) -> F32Array:
    """The float32 values of bfloat16 bits (uint16), exactly."""
    return (np.asarray(bits, dtype="<u2").astype("<u4") << 16).view("<f4")


def check_group_size(group_size: int | None) -> None:
    """ValueError unless it is None or a positive multiple of 64."""
    if group_size is not None and (isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1 or group_size % GROUP_STEP):
        raise ValueError(f"group_size is {group_size!r}, expected a positive multiple of {GROUP_STEP}, or None for one scale a row")


def quantize_rows(x: F32Array, group_size: int | None = None) -> tuple[npt.NDArray[np.int8], F32Array]:
    """int8 values ``(n_out, n_in)`` and their scales, ``(n_out,)`` or ``(n_out, n_groups)``.

    `x` must be finite. The last group of a row may be shorter.
    """
    n_out, n_in = x.shape
    groups = _grouped(np.asarray(x, dtype=np.float32), group_size)
    scales = np.abs(groups).max(axis=2, initial=0.0) / np.float32(127)
    divisor = np.where(scales > 0, scales, np.float32(1))[:, :, None]
    with np.errstate(over="ignore"):  # a subnormal scale; clipped below
        q = np.clip(np.rint(groups / divisor), -127, 127)
    values = q.astype(np.int8).reshape(n_out, -1)[:, :n_in]
    return np.ascontiguousarray(values), scales[:, 0] if group_size is None else scales


def dequantize_rows(q: npt.NDArray[np.int8], scales: F32Array, group_size: int | None = None) -> F32Array:
    """The float32 values ``q * scale`` of `quantize_rows`' result."""
    if group_size is None:
        return q * scales[:, None]
    return q * np.repeat(scales, group_size, axis=1)[:, : q.shape[1]]


def row_blocks(n_rows: int, n_cols: int) -> Iterator[slice]:
    """Consecutive slices of rows of at most BLOCK_ELEMENTS values each (one row at least)."""
    step = max(1, BLOCK_ELEMENTS // max(1, n_cols))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))


def _grouped(x: F32Array, group_size: int | None) -> F32Array:
    """(n_out, n_groups, group) with zeros behind a short last group."""
    n_out, n_in = x.shape
    size = group_size or max(1, n_in)
    if pad := -n_in % size:
        x = np.pad(x, ((0, 0), (0, pad)))
    return x.reshape(n_out, -1, size)
