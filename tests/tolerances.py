"""The one table of tolerances: how far a backend may be from the float64 reference, by weight type and KV mode, and why.

The measure is max|got - ref| / max|ref| over what a call returns. There are three bounds, from tight to loose:

`LAYER`, for models of one layer and one loop against the reference that rounds where the runtime does (`Rounding.of(weights, kv)`):
    on the rows that no rounding edge came between, only the order of float32 sums is left, 2**-24 * sqrt(K) for a product over
    K, some 1e-7 in any type. An operand that such a difference moves over an edge is off by a step h (bf16 2**-8, f16 2**-11,
    int8 1/127 of the group's largest), which happens to one in h * 2**24 / sqrt(K). So the lower quartile over rows is held to
    1e-5 and the worst row to `rounded`. This is the test of rounding points: leaving one out gives 5e-5 to 5e-3.
`rounded`, for any depth, against the same reference: a moved operand moves its product by h / sqrt(K), and behind that one operand
    in sqrt(K) / 2 is moved too. After a few layers what is left is nearly independent rounding, only a few times below `plain`.
`plain`, against the reference without rounding: an operand is off by h / sqrt(12) of its size, independently, and a product
    keeps that ratio. Eight loops of two layers with 7 products each: sqrt(112) * h / sqrt(12) = 3 h, 1e-2 in bf16, less what the residual
    stream damps (measured median 0.5e-2) and times what a sharp attention amplifies (measured worst 4e-2).

The figures hold for the models of `models.py` (16 layers or so, loops included); "measured" is the worst, at the default depth
and at 8 loops, of a second implementation in float32 with another order of sums, over all CONFIGS, two seeds, 80 tokens.
Bounds are two to four times that. A fault in meaning (a norm left out, keys missing) gives more than 1e-1: `plain` shows it in every
type but int8, where only LAYER does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LAYER = 1e-5


@dataclass(frozen=True)
class Tolerance:
    """Bounds on max|delta| / max|ref|, against the reference that rounds as the runtime does and against the plain one."""

    weights: str
    kv: str
    rounded: float
    plain: float
    reason: str


_TABLE = [
    Tolerance("f32", "f32", 1e-4, 1e-4, "order of float32 sums, 2**-24 * sqrt(K) each; measured 2e-6; the rest is for deeper models and the own exp"),
    Tolerance("f32", "f16", 2e-3, 1e-2, "q, K, V, P step 2**-11; measured 5e-4, 3e-3"),
    Tolerance("f32", "bf16", 1.5e-2, 1e-1, "q, K, V, P step 2**-8; measured 4e-3, 4e-2"),
    Tolerance("bf16", "f32", 3e-2, 1e-1, "operands step 2**-8; measured 1e-2, 4e-2"),
    Tolerance("bf16", "f16", 3e-2, 1e-1, "operands step 2**-8, KV 2**-11; measured 9e-3, 4e-2"),
    Tolerance("bf16", "bf16", 4e-2, 1e-1, "operands and KV step 2**-8; measured 2e-2, 4e-2"),
    Tolerance("f16", "f32", 4e-3, 1e-2, "operands step 2**-11; measured 1e-3, 3e-3"),
    Tolerance("f16", "f16", 8e-3, 1.5e-2, "operands and KV step 2**-11; measured 3e-3, 6e-3"),
    Tolerance("f16", "bf16", 2e-2, 1e-1, "operands step 2**-11, KV 2**-8; measured 7e-3, 4e-2"),
    Tolerance("int8", "f32", 8e-2, 2e-1, "operands step 1/127 of the largest of 32; measured 3e-2, 9e-2"),
    Tolerance("int8", "f16", 8e-2, 2e-1, "the same, KV step 2**-11; measured 4e-2, 1e-1"),
    Tolerance("int8", "bf16", 1e-1, 3e-1, "the same, KV step 2**-8; measured 4e-2, 1.5e-1"),
    # Codes: q and P step 2**-16 of the largest; K and V 1/127 of a head's largest, in int4 V 1/15 of a group's range. Rotation makes
    # every code of a head depend on each of its values, so one moved operand moves more of them.
    Tolerance("f32", "int8", 5e-3, 4e-2, "K, V step 1/127 of the head's largest; measured 2e-3, 1e-2"),
    Tolerance("bf16", "int8", 3e-2, 5e-2, "operands step 2**-8, KV 1/127; measured 8e-3, 1e-2"),
    Tolerance("f16", "int8", 1.5e-2, 4e-2, "operands step 2**-11, KV 1/127; measured 4e-3, 9e-3"),
    Tolerance("int8", "int8", 8e-2, 2e-1, "operands step 1/127 of the largest of 32, KV 1/127; measured 2e-2, 6e-2"),
    Tolerance("f32", "int4", 5e-2, 4e-1, "V step 1/15 of the range of 32; measured 1e-2, 2e-1"),
    Tolerance("bf16", "int4", 1e-1, 4e-1, "operands step 2**-8, V 1/15; measured 4e-2, 1e-1"),
    Tolerance("f16", "int4", 1e-1, 4e-1, "operands step 2**-11, V 1/15; measured 2e-2, 1e-1"),
    Tolerance("int8", "int4", 1e-1, 4e-1, "operands step 1/127 of the largest of 32, V 1/15; measured 2e-2, 1e-1"),
]
TOLERANCES = {(t.weights, t.kv): t for t in _TABLE}


def row_errors(got: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """max|got - ref| of every row (the first axis) / max|ref| of all; infinite where `got` is not finite."""
    got, ref = np.asarray(got, np.float64), np.asarray(ref, np.float64)
    assert got.shape == ref.shape, f"shape {got.shape}, expected {ref.shape}"
    rows = np.where(np.isfinite(got), np.abs(got - ref), np.inf).reshape(len(got), -1).max(1)
    return rows / np.abs(ref).max()


def assert_close(got: np.ndarray, ref: np.ndarray, weights: str, kv: str, *, rounded: bool = True) -> None:
    """`got` is within the table's bound of `ref`, which comes from the rounding reference (with rounded=False, from the plain one)."""
    tolerance = TOLERANCES[weights, kv]
    bound = tolerance.rounded if rounded else tolerance.plain
    error = row_errors(got, ref).max()
    assert error <= bound, f"error {error:.2e} of the largest value, bound {bound:.0e} ({weights} weights, {kv} KV: {tolerance.reason})"


def assert_layer_close(got: np.ndarray, ref: np.ndarray, weights: str, kv: str) -> None:
    """For a model of one layer and one loop: `got` is within LAYER of the rounding reference's `ref` on a quarter of the rows or more."""
    assert_close(got, ref, weights, kv)
    error = np.quantile(row_errors(got, ref), 0.25)
    assert error <= LAYER, f"error {error:.2e} of the largest value on the best quarter of the rows, bound {LAYER:.0e}: a rounding point differs"
