"""Rotary position fields of config.json, in the spelling of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters)."""

from __future__ import annotations

import math
from typing import Any

from ..errors import FormatError
from ..strict_json import first_of, shown

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KEYS = {  # rope type -> its own keys
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    },
}  # fmt: skip


def take_rope(left: dict[str, Any], head_dim: int, max_positions: int | None) -> dict[str, Any]:
    """Take the rope fields out of `left`: rope_theta, rotary_dim and rope_scaling of a ModelConfig.

    FormatError names a type (dynamic, longrope) or key that is not supported.
    """
    old, new = left.pop("rope_scaling", None), left.pop("rope_parameters", None)
    where, rope = ("rope_scaling", old) if old else ("rope_parameters", new or {})
    rope = _same_for_all_layers(rope, where)
    theta, partial = left.pop("rope_theta", 10000.0), left.pop("partial_rotary_factor", 1.0)
    original = (
        left.pop("original_max_position_embeddings", None) or rope.get("original_max_position_embeddings") or max_positions
    )  # transformers' order
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KEYS or rope.get("type", kind) != kind:
        raise FormatError(f"config.json: {where} has type {shown(rope.get('type', kind))}, supported are {', '.join(_KEYS)}")
    if unknown := [key for key, value in rope.items() if key not in _COMMON | _KEYS[kind] and value is not None]:
        raise FormatError(f"config.json: {where} of type {kind} has the unknown key {first_of(unknown)}")
    theta, partial = rope.get("rope_theta", theta), rope.get("partial_rotary_factor", partial)
    if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise FormatError(f"config.json: partial_rotary_factor is {shown(partial)}, expected a number above 0 and up to 1")
    fields = {"rope_theta": theta, "rotary_dim": int(head_dim * partial), "rope_scaling": None}
    if kind != "default":
        fields["rope_scaling"] = {"type": kind, **_scaling(kind, rope, where, original, max_positions)}
    return fields


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies cos and sin by for a stretch of `factor` (https://arxiv.org/abs/2309.00071, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _scaling(kind: str, rope: dict[str, Any], where: str, original: Any, max_positions: int | None) -> dict[str, Any]:
    def number(key: str, default: Any = None) -> float:
        value = default if rope.get(key) is None else rope[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise FormatError(f"config.json: {where}.{key} is {'missing' if value is None else shown(value)}, expected a positive number")
        return value

    if kind == "linear":
        return {"factor": number("factor")}
    rope = {**rope, "original_max_position_embeddings": original}
    length = number("original_max_position_embeddings")
    if kind == "llama3":
        return {**{key: number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}, "original_max_position": length}
    if rope.get("truncate", True) is not True:
        raise FormatError(f"config.json: {where}.truncate is {shown(rope['truncate'])}, supported is true only")
    factor = number("factor", max_positions / length if max_positions else None)
    default = yarn_mscale(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        default = yarn_mscale(factor, number("mscale")) / yarn_mscale(factor, number("mscale_all_dim"))
    return {
        "factor": factor, "original_max_position": length, "beta_fast": number("beta_fast", 32), "beta_slow": number("beta_slow", 1),
        "attention_factor": number("attention_factor", default),
    }  # fmt: skip


def _same_for_all_layers(rope: Any, where: str) -> dict[str, Any]:
    """transformers 5 may give the parameters by layer type; they must agree."""
    if not isinstance(rope, dict):
        raise FormatError(f"config.json: {where} is {shown(rope)}, expected an object")
    nested = [value for key, value in rope.items() if key in ("full_attention", "sliding_attention") and value is not None]
    if not nested:
        return rope
    if len(nested) != len(rope) or not all(isinstance(value, dict) and value == nested[0] for value in nested):
        raise FormatError(f"config.json: {where} differs between layer types, which is not supported")
    return dict(nested[0])
