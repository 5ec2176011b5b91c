"""How K and V are stored: `kv_mode=` and the environment variables of the specification."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .config import ModelConfig
from .environment import is_on

KV_DTYPES = {"fp16": "f16", "bf16": "bf16", "fp32": "f32", "int8": "int8", "int4": "int4", "h": "f16"}  # mode -> type of a stored value
VARIABLES = {"h": "TINYLOOP_KV_H_MODE", "int8": "TINYLOOP_KV_INT8", "int4": "TINYLOOP_KV_INT4"}
_GROUP = 32  # TL_KV_GROUP, dimensions that share a scale and a zero of int4 values; and TL_INT8_GROUP


def resolve_kv_mode(kv_mode: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The KV mode of a new model: the argument where given, else what the environment asks for, else "fp16".

    Raises
    ------
    TypeError, ValueError
        An unknown mode, a variable that is neither on nor off, or two modes at once.
    """
    if kv_mode is not None:
        if not isinstance(kv_mode, str):
            raise TypeError(f"kv_mode must be a str or None, got {type(kv_mode).__name__}")
        asked = [kv_mode]
    else:
        asked = [mode for mode, name in VARIABLES.items() if is_on(name, environ)]
    if len(asked) > 1:
        names = " and ".join(VARIABLES[mode] for mode in asked)
        raise ValueError(f"{names} are on, and a model has one KV mode; turn all but one off")
    mode = asked[0] if asked else "fp16"
    if mode not in KV_DTYPES:
        raise ValueError(f"kv_mode is {mode!r}, expected one of {', '.join(KV_DTYPES)}")
    return mode


def has_kv_mode(mode: str, config: ModelConfig) -> bool:
    """Whether a model can have a mode: h keeps the `dim` values of a layer's input in place of keys and values that must be more."""
    return mode != "h" or 2 * config.kv_dim > config.dim


def check_kv_mode(mode: str, config: ModelConfig) -> None:
    """ValueError where a model cannot have a mode."""
    if not has_kv_mode(mode, config):
        raise ValueError(
            f"the KV mode h keeps the {config.dim} values of a layer's input in place of its {2 * config.kv_dim} of keys and values, which is not "
            f"smaller for this model; take another KV mode, such as int8"
        )


def kv_nbytes_per_token(config: ModelConfig, loops: int, mode: str = "fp16", weights: str = "bf16") -> int:
    """Bytes of one token's keys and values at a depth: a slot for every layer run; without the padding of odd head sizes.

    In h mode what is held beyond a call, by the type of the weights (f32, bf16, f16, int8); of int8 on the CPU, on CUDA as bf16.
    """
    n_layers_run = config.n_prelude + loops * config.n_core + config.n_coda
    if mode == "h":
        return n_layers_run * _operand_nbytes(weights, config.dim)
    return n_layers_run * config.n_kv_heads * sum(_head_nbytes(mode, config.head_dim))


def _operand_nbytes(weights: str, dim: int) -> int:
    """Of the operand of one layer's product: int8 in groups of 32 with a float32 scale each."""
    return -(-dim // _GROUP) * (_GROUP + 4) if weights == "int8" else dim * (4 if weights == "f32" else 2)


def _head_nbytes(mode: str, head_dim: int) -> tuple[int, int]:
    """Of the key and of the value of one token in a layer and KV head: codes, scales and zeros."""
    if mode == "int4":
        return head_dim + 2, head_dim // 2 + 4 * -(-head_dim // _GROUP)
    nbytes = head_dim + 2 if mode == "int8" else head_dim * (4 if mode == "fp32" else 2)
    return nbytes, nbytes
