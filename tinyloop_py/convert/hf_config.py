"""config.json of a Hugging Face folder -> ModelConfig. What is not understood is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from ..config import ModelConfig
from ..errors import FormatError
from ..strict_json import first_of, is_int, shown
from .families import ACTIVATIONS, FAMILIES, HARMLESS, HUGINN, ONLY, SIZES, Family
from .hf_rope import take_rope


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """The config of a decoder: a plain one has 1 for its default, trained and greatest depth, a looped one what it was trained at.

    FormatError names an unknown architecture, a missing field, or a field (or value) that would change the forward pass.
    """
    architectures = raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise FormatError(f"config.json: architecture {shown(architectures)} is not supported; those that are: {', '.join((*FAMILIES, HUGINN))}")
    left = {**family.defaults, **raw}  # every step takes what it understands
    fields = _take_sizes(left, raw)
    n_layers, head_dim = fields["n_core"], fields["head_dim"]
    fields |= take_rope(left, head_dim, fields["trained_seq_len"])
    if family.loops and fields["rotary_dim"] != head_dim:  # Nanbeige's code has no such thing, Ouro's fails
        raise FormatError(f"config.json: partial_rotary_factor is below 1, {architecture} is supported with heads that turn as a whole only")
    fields["qk_norm"] = family.qk_norm
    fields["attn_bias"] = "qkvo" if family.bias_by_config and flag("attention_bias", left.pop("attention_bias", None)) else family.attn_bias
    if family.no_rope_layers:
        fields["nope_layers"] = _take_nope_layers(left, n_layers)
    if family.windows != "none":
        fields["layer_windows"] = _take_windows(left, family, n_layers, fields.get("nope_layers", ()))
    fields |= _take_loops(left, family) if family.loops else {"default_loops": 1, "trained_loops": 1, "max_loops": 1}
    refuse_rest(left, family.only, family.harmless, str(architecture))
    try:
        return ModelConfig(**fields, extra={"converted_from": architecture})
    except (ValueError, TypeError) as error:
        raise FormatError(f"config.json: {error}") from None


def _take_sizes(left: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {ours: size(key, left.pop(key, None)) for ours, key in SIZES.items()}
    n_kv_heads, head_dim, positions = (left.pop(key, None) for key in ("num_key_value_heads", "head_dim", "max_position_embeddings"))
    fields["n_kv_heads"] = fields["n_heads"] if n_kv_heads is None else size("num_key_value_heads", n_kv_heads)
    if head_dim is None and fields["dim"] % fields["n_heads"]:
        raise FormatError(
            f"config.json: hidden_size {fields['dim']} is no multiple of num_attention_heads {fields['n_heads']}, and head_dim is not given"
        )
    fields["head_dim"] = fields["dim"] // fields["n_heads"] if head_dim is None else size("head_dim", head_dim)
    if left.get("kv_channels") == fields["head_dim"]:  # Nanbeige names it twice
        del left["kv_channels"]
    fields["trained_seq_len"] = None if positions is None else size("max_position_embeddings", positions)
    activation = left.pop("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise FormatError(f"config.json: hidden_act is {shown(activation)}, supported are {', '.join(ACTIVATIONS)}")
    fields["activation"] = ACTIVATIONS[activation]
    fields["norm_eps"] = left.pop("rms_norm_eps", 1e-6)
    fields["tied_embeddings"] = left.pop("tie_word_embeddings", False)
    return fields


def _take_loops(left: dict[str, Any], family: Family) -> dict[str, Any]:
    """The depth, and the norms: that behind the stack is every loop's, or only the last one's."""
    loops, losses = size(family.loops, left.pop(family.loops, None)), left.pop(family.loop_losses, None) if family.loop_losses else None
    if losses is not None and not (isinstance(losses, list) and all(isinstance(x, int | float) and not isinstance(x, bool) for x in losses)):
        raise FormatError(f"config.json: {family.loop_losses} is {shown(losses)}, expected a list of numbers")
    skips_norm = family.skips_loop_norm != "" and flag(family.skips_loop_norm, left.pop(family.skips_loop_norm, None))
    return {
        "default_loops": len(losses) + 1 if losses else loops, "loop_norm": "last" if skips_norm else "every", "final_norm": False,
        "block_norm": family.block_norm, "exit": "hazard_gate" if family.exit_gate else "none",
    }  # fmt: skip


def _take_nope_layers(left: dict[str, Any], n_layers: int) -> tuple[int, ...]:
    """SmolLM3: 1 in no_rope_layers means that the layer has rope; by default every fourth has none."""
    flags, interval = left.pop("no_rope_layers", None), left.pop("no_rope_layer_interval", 4)
    if flags is None:
        return tuple(i for i in range(n_layers) if (i + 1) % size("no_rope_layer_interval", interval) == 0)
    if not isinstance(flags, list) or len(flags) < n_layers or not all(flag in (0, 1) for flag in flags):
        raise FormatError(f"config.json: no_rope_layers is {shown(flags)}, expected a 0 or 1 for each of the {n_layers} layers")
    return tuple(i for i in range(n_layers) if not flags[i])


def _take_windows(left: dict[str, Any], family: Family, n_layers: int, nope_layers: tuple[int, ...]) -> tuple[int, ...]:
    window, types = left.pop("sliding_window", None), left.pop("layer_types", None)
    if family.windows == "all":
        types = _check_types(types, n_layers) or ["sliding_attention" if window else "full_attention"] * n_layers
        if window and "full_attention" in types:  # transformers slides over all layers of a Mistral, whatever the list says
            raise FormatError("config.json: layer_types has full_attention beside a sliding_window, which MistralForCausalLM does not mean")
    else:
        window = window if flag("use_sliding_window", left.pop("use_sliding_window", None)) else None
        first = left.pop("max_window_layers", 28) if not family.no_rope_layers else 0
        slides = nope_layers if family.no_rope_layers else range(size("max_window_layers", first, 0), n_layers)
        types = _check_types(types, n_layers) or ["sliding_attention" if window and i in slides else "full_attention" for i in range(n_layers)]
    if "sliding_attention" not in types:
        return ()
    if window is None:
        raise FormatError("config.json: layer_types has sliding_attention, but sliding_window is unset or use_sliding_window false")
    return tuple(size("sliding_window", window) if kind == "sliding_attention" else 0 for kind in types)


def _check_types(types: Any, n_layers: int) -> list[str] | None:
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != n_layers or not all(kind in ("full_attention", "sliding_attention") for kind in types):
        raise FormatError(
            f"config.json: layer_types is {shown(types)}, expected full_attention or sliding_attention for each of the {n_layers} layers"
        )
    return types


def refuse_rest(left: Mapping[str, Any], only: Mapping[str, Any], harmless: Set[str], architecture: str) -> None:
    """FormatError names a field that is left, unless it means nothing or has the one value (`only`, and ONLY) that changes nothing."""
    only = {**ONLY, **only}
    rest = {key: value for key, value in left.items() if key not in HARMLESS and key not in harmless and value is not None}
    for key, value in rest.items():
        if key in only and value != only[key]:
            raise FormatError(f"config.json: {key} is {shown(value)}, {architecture} is supported with {shown(only[key])} only")
    if unknown := [key for key in rest if key not in only]:
        raise FormatError(f"config.json: field {first_of(unknown)} is unknown for {architecture} and might change the forward pass")


def flag(key: str, value: Any) -> bool:
    """A field that is true or false; FormatError names one that is neither. None is false, as for transformers."""
    if not isinstance(value, bool | None):
        raise FormatError(f"config.json: {key} is {shown(value)}, expected true or false")
    return bool(value)


def size(key: str, value: Any, low: int = 1) -> int:
    """A field that is a size; FormatError names one that is none."""
    if not is_int(value) or not low <= value < 2**31:
        raise FormatError(f"config.json: {key} is {'missing' if value is None else shown(value)}, expected an integer from {low} to {2**31 - 1}")
    return int(value)
