"""Quantised keys and values in float64 NumPy: what docs/kv-modes.md defines, and attention's arithmetic on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

OPERAND_MAX = 127 * 256
GROUP = 32  # dimensions of a head that share a scale and a zero in int4
LEAST = 2.0**-100


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Nearest bfloat16 (ties to even) of the float32, as float64."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def rotate(x: np.ndarray) -> np.ndarray:
    """Every head of x (..., head_dim) times the orthonormal Hadamard matrix, in blocks of the largest power of two that divides it."""
    n = x.shape[-1]
    block = n & -n
    h = np.ones((1, 1))
    while len(h) < block:
        h = np.block([[h, h], [h, -h]])
    return (x.reshape(*x.shape[:-1], -1, block) @ h / math.sqrt(block)).reshape(x.shape)


def operands(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """x rounded to 16-bit integers times a scale that the largest magnitude along the axis gives."""
    top = np.abs(x).max(axis, keepdims=True)
    scale = top / OPERAND_MAX
    return np.where(top >= LEAST, np.rint(x / np.where(scale == 0, 1, scale)) * scale, 0.0)


@dataclass(frozen=True)
class Codes:
    """Keys or values (n, n_kv_heads, head_dim) as scale * code + zero; scale and zero are repeated over their group."""

    code: np.ndarray
    scale: np.ndarray
    zero: np.ndarray

    @property
    def values(self) -> np.ndarray:
        return self.code * self.scale + self.zero

    def repeat(self, group: int) -> Codes:
        """Once for every query head."""
        return Codes(*(np.repeat(a, group, axis=1) for a in (self.code, self.scale, self.zero)))

    def weigh(self, p: np.ndarray, first: int, n: int) -> np.ndarray:
        """Sum over n keys from `first` on of the weights p (n_heads, n_queries, n) times the values: P scale as operands, P zero as it is."""
        code, scale, zero = (a[first : first + n] for a in (self.code, self.scale, self.zero))
        out = np.einsum("hij,jhd->hid", p, zero)
        for d in range(0, code.shape[-1], GROUP):
            at = slice(d, d + GROUP)
            weights = operands(p * scale[:, :, d].T[:, None, :])
            out[:, :, at] += np.einsum("hij,jhd->hid", weights, code[:, :, at])
        return out


def int8_codes(x: np.ndarray) -> Codes:
    """A scale a head."""
    scale = to_bf16(np.abs(x).max(-1, keepdims=True) / 127)
    code = np.where(scale >= LEAST, np.clip(np.rint(x / np.where(scale == 0, 1, scale)), -127, 127), 0)
    scale = np.broadcast_to(scale, x.shape)
    return Codes(code, scale, np.zeros(x.shape))


def int4_codes(x: np.ndarray) -> Codes:
    """A scale and a zero a group of dimensions."""
    code, scale, zero = (np.empty(x.shape) for _ in range(3))
    for d in range(0, x.shape[-1], GROUP):
        at, part = slice(d, d + GROUP), x[..., d : d + GROUP]
        z = to_bf16(part.min(-1, keepdims=True))
        s = to_bf16((part.max(-1, keepdims=True) - z) / 15)
        code[..., at] = np.where(s >= LEAST, np.clip(np.rint((part - z) / np.where(s == 0, 1, s)), 0, 15), 0)
        scale[..., at], zero[..., at] = s, z
    return Codes(code, scale, zero)
