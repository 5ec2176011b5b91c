"""Huginn (RavenForCausalLM): prelude, looped core and coda, under field and tensor names of its own; three projections are fused into two tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..errors import FormatError
from ..strict_json import first_of, shown
from .families import HUGINN
from .hf_config import flag, refuse_rest, size
from .hf_tensors import FolderTensor, drop_tied_head
from .source import SourceTensor

EMBEDDING, HEAD, NORM = "transformer.wte.weight", "lm_head.weight", "transformer.ln_f.weight"
PARTS = {"prelude": "n_layers_in_prelude", "core": "n_layers_in_recurrent_block", "coda": "n_layers_in_coda"}
SIZES = {
    "dim": "n_embd", "ffn_dim": "intermediate_size", "n_heads": "n_heads", "default_loops": "mean_recurrence", "trained_seq_len": "block_size",
    **{f"n_{part}": field for part, field in PARTS.items()},
}  # fmt: skip
DEFAULTS = {  # of the class behind config.json
    "n_embd": 5280, "n_heads": 55, "intermediate_size": 17920, "mean_recurrence": 32, "block_size": 4096, "vocab_size": 65536,
    "n_layers_in_prelude": 2, "n_layers_in_recurrent_block": 4, "n_layers_in_coda": 2, "norm_eps": 1e-6, "rope_base": 50000,
    "qk_bias": True, "tie_embeddings": True,
}  # fmt: skip
ONLY = {
    "architecture_class_name": "RecurrentGPT", "block_class_name": "SandwichBlock", "norm_class_name": "RMSNorm_llama", "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU", "injection_type": "linear", "state_init": "like-init", "bias": False, "test_time_noise": 0,
}  # fmt: skip
HARMLESS = frozenset({
    "auto_map", "padding_multiple", "init_strategy", "init_orthogonal", "sampling_scheme", "mean_backprop_depth", "effective_expected_depth",
    "activation_checkpoint_impl", "test_time_noise_type", "tie_word_embeddings",
})  # fmt: skip
LAYER_TENSORS = {
    "attn_norm.weight": "norm_1.weight", "attn_post_norm.weight": "norm_2.weight", "mlp_norm.weight": "norm_3.weight",
    "mlp_post_norm.weight": "norm_4.weight", "attn.o.weight": "attn.proj.weight", "mlp.down.weight": "mlp.proj.weight",
}  # fmt: skip


def is_huginn(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of this architecture."""
    return raw.get("architectures") == [HUGINN]


def huginn_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The model's config; FormatError names a missing field, or a field (or value) that would change the forward pass."""
    left = {**DEFAULTS, **raw}  # every step takes what it understands
    fields: dict[str, Any] = {ours: size(theirs, left.pop(theirs)) for ours, theirs in SIZES.items()}
    dim, n_heads = fields["dim"], fields["n_heads"]
    if dim % n_heads:
        raise FormatError(f"config.json: n_embd {dim} is no multiple of n_heads {n_heads}")
    vocab_size, padded = left.pop("vocab_size"), left.pop("padded_vocab_size", None)
    fields["vocab_size"] = size("padded_vocab_size", vocab_size if padded is None else padded)
    for theirs, value in (
        ("n_layers", sum(fields[f"n_{part}"] for part in PARTS)), ("num_attention_heads", n_heads), ("num_key_value_heads", n_heads),
        ("head_dim", dim // n_heads), ("hidden_size", dim), ("num_hidden_layers", sum(fields[f"n_{part}"] for part in PARTS)),
    ):  # fmt: skip
        if (given := left.pop(theirs, None)) not in (None, value):
            raise FormatError(f"config.json: {theirs} is {shown(given)}, {HUGINN} is supported with {value} here only")
    std, scale = _init_values(left.pop("init_values", None), dim)
    fields |= {
        "n_kv_heads": n_heads, "head_dim": dim // n_heads, "norm_eps": left.pop("norm_eps"), "rope_theta": left.pop("rope_base"),
        "attn_bias": "qk" if flag("qk_bias", left.pop("qk_bias")) else "", "tied_embeddings": left.pop("tie_embeddings"), "embed_scale": scale,
        "state_init_std": std * scale,
    }  # fmt: skip
    refuse_rest(left, ONLY, HARMLESS, HUGINN)
    try:
        return ModelConfig(
            **fields, block_norm="sum_sandwich", loop_norm="last", inject="concat_linear", state_init="normal", rope_style="interleaved",
            extra={"converted_from": HUGINN},
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise FormatError(f"config.json: {error}") from None


def _init_values(given: Any, dim: int) -> tuple[float, float]:
    """Standard deviation of a fresh state before it is scaled, and what embeddings and states are scaled by."""
    if not isinstance(given, dict | None):
        raise FormatError(f"config.json: init_values is {shown(given)}, expected an object")
    values = {"std": math.sqrt(2 / (5 * dim)), "embed_scale": math.sqrt(dim)} | (given or {})
    for key in ("std", "embed_scale"):
        if isinstance(values[key], bool) or not isinstance(values[key], int | float) or not 0 < values[key] <= sys.float_info.max:
            raise FormatError(f"config.json: init_values.{key} is {shown(values[key])}, expected a positive number")
    return float(values["std"]), float(values["embed_scale"])


def huginn_tensors(config: ModelConfig, found: Mapping[str, FolderTensor]) -> dict[str, SourceTensor]:
    """The source's tensors, fused ones in their parts, whose names `huginn_name` gives."""
    whole = {name: tensor for name, tensor in found.items() if name != "freqs_cis"}  # computed from the config
    if config.tied_embeddings:
        drop_tied_head(whole, HEAD, EMBEDDING)
    split: dict[str, SourceTensor] = {}
    q, n_ffn = config.q_dim, config.ffn_dim
    for name, tensor in whole.items():
        if name.endswith(".attn.Wqkv.weight"):
            split |= tensor.parts({f"{name}[{p}]": (i * q, q) for i, p in enumerate("qkv")}, (3 * q, config.dim))
        elif name.endswith(".mlp.fc.weight"):
            split |= tensor.parts({f"{name}[gate]": (0, n_ffn), f"{name}[up]": (n_ffn, n_ffn)}, (2 * n_ffn, config.dim))
        elif name.endswith(".attn.qk_bias"):
            split |= tensor.parts({f"{name}[{p}]": (i, 1) for i, p in enumerate("qk")}, (2, 1, config.n_heads, config.head_dim))
        elif name.endswith("]"):  # a part's name, which no file has
            raise FormatError(f"tensor {first_of([name])} has no place in the model that the config describes")
        else:
            split[name] = tensor
    return split


def huginn_name(name: str) -> str:
    """tinyloop's name -> the source's. One norm serves behind the last loop and before the head."""
    whole = {"embed.weight": EMBEDDING, "head.weight": HEAD, "inject.weight": "transformer.adapter.weight"}
    if name in whole:
        return whole[name]
    if name in ("loop_norm.weight", "final_norm.weight"):
        return NORM
    part, index, rest = name.split(".", 2)
    layer = f"transformer.{'core_block' if part == 'core' else part}.{index}."
    if rest in LAYER_TENSORS:
        return layer + LAYER_TENSORS[rest]
    _, p, kind = rest.split(".")
    return layer + (f"attn.qk_bias[{p}]" if kind == "bias" else f"attn.Wqkv.weight[{p}]" if rest.startswith("attn.") else f"mlp.fc.weight[{p}]")
