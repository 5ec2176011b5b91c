"""How K and V are stored: `kv_mode=` and the environment variables of the specification."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .config import ModelConfig

KV_DTYPES = {"fp16": "f16", "bf16": "bf16", "fp32": "f32", "int8": "int8", "int4": "int4"}  # mode -> type of a stored value
VARIABLES = {"h": "TINYLOOP_KV_H_MODE", "int8": "TINYLOOP_KV_INT8", "int4": "TINYLOOP_KV_INT4"}
_OFF, _ON = ("", "0", "false", "off"), ("1", "true", "on")
_GROUP = 32  # dimensions of a head that share a scale and a zero in int4: TL_KV_GROUP


def _is_on(name: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(name, "").strip().lower()
    if value not in _OFF + _ON:
        raise ValueError(f"the environment variable {name} is {environ[name]!r}, expected 1, true or on; or 0, false, off or nothing")
    return value in _ON


def resolve_kv_mode(kv_mode: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The KV mode of a new model: the argument where given, else what the environment asks for, else "fp16".

    Raises
    ------
    TypeError, ValueError
        An unknown mode, a variable that is neither on nor off, two modes at once, or a mode that this version lacks.
    """
    asked = [mode for mode, name in VARIABLES.items() if _is_on(name, environ)]
    if kv_mode is not None:
        if not isinstance(kv_mode, str):
            raise TypeError(f"kv_mode must be a str or None, got {type(kv_mode).__name__}")
        asked = [kv_mode]
    if len(asked) > 1:
        names = " and ".join(VARIABLES[mode] for mode in asked)
        raise ValueError(f"{names} are on, and a model has one KV mode; turn all but one off")
    mode = asked[0] if asked else "fp16"
    if mode == "h":
        source = f"kv_mode={mode!r}" if kv_mode is not None else f"the environment variable {VARIABLES[mode]}"
        raise ValueError(f"{source} asks for the {mode} mode, which this version does not have; it has {', '.join(KV_DTYPES)}")
    if mode not in KV_DTYPES:
        raise ValueError(f"kv_mode is {mode!r}, expected one of {', '.join(KV_DTYPES)}")
    return mode


def head_nbytes(mode: str, head_dim: int) -> int:
    """Bytes that the key, or the value, of one token takes in a layer and KV head."""
    if mode == "int4":
        return head_dim // 2 + 4 * -(-head_dim // _GROUP)
    return head_dim + 2 if mode == "int8" else head_dim * (4 if mode == "fp32" else 2)


def kv_nbytes_per_token(config: ModelConfig, loops: int, mode: str = "fp16") -> int:
    """Bytes of the keys and values of one token at a depth: a slot for every layer run; without the padding of odd head sizes."""
    n_layers_run = config.n_prelude + loops * config.n_core + config.n_coda
    return 2 * n_layers_run * config.n_kv_heads * head_nbytes(mode, config.head_dim)
