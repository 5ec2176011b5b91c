"""Cosine and sine tables of rotary position embeddings (Su et al., RoFormer), with the scalings that models use.

Angles are computed in float64 and rounded once. The scaling formulas are those of the Hugging Face transformers library
(`modeling_rope_utils`): linear, llama3 (Llama 3.1) and yarn (Peng et al., 2023).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .config import ModelConfig

BLOCK = 4096  # positions whose angles are computed at a time


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of every rotated pair, float64 (rotary_dim / 2,)."""
    dim = config.rotary_dim or 0
    freq = config.rope_theta ** -(np.arange(0, dim, 2, dtype=np.float64) / max(dim, 1))
    scaling = config.rope_scaling
    if scaling is None:
        return freq
    if scaling["type"] == "linear":
        return freq / float(scaling["factor"])
    if scaling["type"] == "llama3":
        return _llama3(freq, scaling)
    return _yarn(freq, dim, config.rope_theta, scaling)


def _llama3(freq: np.ndarray, s: dict[str, Any]) -> np.ndarray:
    """Long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / freq
    low, high = s["original_max_position"] / s["low_freq_factor"], s["original_max_position"] / s["high_freq_factor"]
    if s["high_freq_factor"] == s["low_freq_factor"]:
        return np.where(wavelength > low, freq / s["factor"], freq)
    smooth = (s["original_max_position"] / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
    between = (1 - smooth) * freq / s["factor"] + smooth * freq
    return np.where(wavelength > low, freq / s["factor"], np.where(wavelength < high, freq, between))


def _yarn(freq: np.ndarray, dim: int, theta: float, s: dict[str, Any]) -> np.ndarray:
    """Pairs that turn more than beta_fast times in the original context are kept, fewer than beta_slow slowed."""

    def pair_of(rotations: float) -> float:
        return dim * math.log(s["original_max_position"] / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(s["beta_fast"])), 0)
    high = min(math.ceil(pair_of(s["beta_slow"])), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return freq / float(s["factor"]) * ramp + freq * (1 - ramp)


def rope_tables(config: ModelConfig, n_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine, float32 (n_positions, rotary_dim / 2) each; yarn's attention factor is in both."""
    factor = config.rope_scaling["attention_factor"] if config.rope_scaling and config.rope_scaling["type"] == "yarn" else 1.0
    frequencies = inverse_frequencies(config)
    cos, sin = (np.empty((n_positions, len(frequencies)), np.float32) for _ in range(2))
    for first in range(0, n_positions, BLOCK):  # float64 of a block at a time
        angle = np.arange(first, min(first + BLOCK, n_positions), dtype=np.float64)[:, None] * frequencies
        cos[first : first + BLOCK] = np.cos(angle) * factor
        sin[first : first + BLOCK] = np.sin(angle) * factor
    return cos, sin
