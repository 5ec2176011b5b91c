"""A GGUF file of architecture llama as a `Source`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..config import ModelConfig
from ..errors import FormatError
from ..quantize import F32Array
from ..strict_json import first_of, is_int, shown
from .families import GGUF_NAME
from .gguf_file import GgufFile
from .gguf_tokenizer import gguf_tokenizer
from .hf_rope import yarn_mscale
from .source import Source, pick_tensors
from .stop_ids import collect_stop_ids

ARCHITECTURE = "llama"
ROPE_FREQS = "rope_freqs.weight"
HARMLESS = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})
# What these say where they stand; with any other value the forward pass would differ.
ONLY: dict[str, Any] = {
    "expert_count": 0, "expert_used_count": 0, "attention.causal": True, "use_parallel_residual": False, "attention.sliding_window": 0,
    "rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}  # fmt: skip
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
_DERIVED = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?")  # of very old files; computed from the config
_ROTATED = re.compile(r"blk\.\d+\.attn_[qk]\.(weight|bias)")
_STOPS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def open_gguf(path: str, with_tokenizer: bool = True) -> Source:
    """Read everything but the weights; FormatError names what does not fit."""
    try:
        return _source(GgufFile.open(path), with_tokenizer)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def _source(file: GgufFile, with_tokenizer: bool) -> Source:
    architecture = file.fields.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise FormatError(f"general.architecture is {shown(architecture)}, supported is {ARCHITECTURE}")
    config = model_config(file)
    names = [name for name in file.tensors if name != ROPE_FREQS and not _DERIVED.fullmatch(name)]
    found = {name: file.tensor(name, config.head_dim if _ROTATED.fullmatch(name) else None) for name in names}
    picked = pick_tensors(config, found, GGUF_NAME)
    named = [file.fields.get(key) for key in _STOPS]
    if not with_tokenizer:
        return Source(config, picked, stop_ids=collect_stop_ids(named, None, lambda token: None, config.vocab_size))
    template = file.fields.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise FormatError(f"tokenizer.chat_template is {shown(template)}, expected text")
    tokenizer = gguf_tokenizer(file.fields)
    return Source(config, picked, tokenizer.to_str(), template, collect_stop_ids(named, template, tokenizer.token_to_id, config.vocab_size))


def model_config(file: GgufFile) -> ModelConfig:
    """The config of a plain decoder: default, trained and greatest depth are 1."""
    prefix = ARCHITECTURE + "."
    left = {key[len(prefix) :]: value for key, value in file.fields.items() if key.startswith(prefix)}
    if "token_embd.weight" not in file.tensors:
        raise FormatError("tensor token_embd.weight is missing")

    def size(key: str, default: int | None = None) -> int:
        value = left.pop(key, default)
        if not is_int(value) or value < 1:
            raise FormatError(f"{prefix}{key} is {'missing' if value is None else shown(value)}, expected a positive integer")
        return int(value)

    def number(key: str, default: float | None = None) -> float:
        value = left.pop(key, default)
        if not isinstance(value, float) or not 0 < value < np.inf:
            raise FormatError(f"{prefix}{key} is {'missing' if value is None else shown(value)}, expected a positive number")
        return float(str(np.float32(value)))  # the shortest decimal: 1e-05, where the file has float32's 9.99999975e-06

    fields: dict[str, Any] = {"n_core": size("block_count"), "dim": size("embedding_length"), "ffn_dim": size("feed_forward_length")}
    fields["n_heads"] = size("attention.head_count")
    fields["n_kv_heads"] = size("attention.head_count_kv", fields["n_heads"])
    fields["head_dim"] = size("attention.key_length", fields["dim"] // fields["n_heads"] or None)
    fields["trained_seq_len"] = size("context_length")
    fields["vocab_size"] = int(file.tensors["token_embd.weight"].shape[0])
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := size(key, fields["head_dim"])) != fields["head_dim"]:
            raise FormatError(f"{prefix}{key} is {value}, supported is the head's size, {fields['head_dim']}, only")
    fields["norm_eps"], fields["rope_theta"] = number("attention.layer_norm_rms_epsilon"), number("rope.freq_base", 10000.0)
    fields["attn_bias"] = "".join(p for p in "qkvo" if GGUF_NAME(f"core.0.attn.{p}.bias") in file.tensors)
    fields["tied_embeddings"] = GGUF_NAME("head.weight") not in file.tensors
    scalings = [_take_scaling(left, prefix, fields["trained_seq_len"], number), _llama3_scaling(file, fields["rope_theta"], fields["head_dim"])]
    if None not in scalings:
        raise FormatError(f"{prefix}rope.scaling and tensor {ROPE_FREQS} both scale rope, which is not supported")
    fields["rope_scaling"] = scalings[0] or scalings[1]
    _refuse_rest(left, prefix)
    try:
        extra = {"converted_from": "GGUF llama", **_provenance(file.fields)}
        return ModelConfig(**fields, default_loops=1, trained_loops=1, max_loops=1, extra=extra)
    except (ValueError, TypeError) as error:
        raise FormatError(str(error)) from None


def _take_scaling(left: dict[str, Any], prefix: str, context_length: int, number: Callable[..., float]) -> dict[str, Any] | None:
    kind, length = left.pop("rope.scaling.type", "none"), left.pop("rope.scaling.original_context_length", context_length)
    old = number("rope.scale_linear", 1.0)  # the key of files of 2023
    factor, beta_fast, beta_slow = (
        number("rope.scaling.factor", old),
        number("rope.scaling.yarn_beta_fast", 32.0),
        number("rope.scaling.yarn_beta_slow", 1.0),
    )
    if kind not in ("none", "linear", "yarn"):
        raise FormatError(f"{prefix}rope.scaling.type is {shown(kind)}, supported are none, linear, yarn")
    if factor == 1 or (kind == "none" and old == 1):
        return None
    if kind != "yarn":
        return {"type": "linear", "factor": factor}
    return {
        "type": "yarn", "factor": factor, "original_max_position": length, "beta_fast": beta_fast, "beta_slow": beta_slow,
        "attention_factor": yarn_mscale(factor),
    }  # fmt: skip


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The scaling behind rope_freqs.weight, by which inverse frequencies are divided: Llama 3's, or FormatError."""
    if ROPE_FREQS not in file.tensors:
        return None
    factors = file.small(ROPE_FREQS)
    if factors.size == head_dim // 2 and (factors == 1).all():
        return None
    scaling = {"type": "llama3", "factor": float(factors.max(initial=1.0)), **LLAMA3}
    if factors.size != head_dim // 2 or not np.allclose(factors, llama3_factors(scaling, theta, head_dim), rtol=1e-4, atol=0):
        raise FormatError(f"tensor {ROPE_FREQS} holds other factors than Llama 3's (low 1, high 4, original length 8192)")
    return scaling


def llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> F32Array:
    """What Llama 3 divides each inverse frequency by: 1 for short waves, `factor` for long ones, a blend of 1/factor and 1 between."""
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    waves = scaling["original_max_position"] * frequency / (2 * np.pi)  # in the original length
    blend = np.clip((waves - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"]), 0, 1)
    factors: F32Array = (1 / ((1 - blend) / scaling["factor"] + blend)).astype(np.float32)
    return factors


def _refuse_rest(left: dict[str, Any], prefix: str) -> None:
    for key, value in left.items():
        if key in ONLY and value != ONLY[key]:
            raise FormatError(f"{prefix}{key} is {shown(value)}, supported is {ONLY[key]} only")
    if unknown := [prefix + key for key in left if key not in ONLY and key not in HARMLESS]:
        raise FormatError(f"field {first_of(unknown)} is unknown and might change the forward pass")


def _provenance(fields: dict[str, Any]) -> dict[str, str]:
    return {key: text for key in ("name", "license") if isinstance(text := fields.get(f"general.{key}"), str)}
