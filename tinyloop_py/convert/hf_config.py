"""config.json of a Hugging Face folder -> ModelConfig. What is not understood is refused by name."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..errors import FormatError
from ..strict_json import first_of, is_int, shown
from .families import ACTIVATIONS, FAMILIES, HARMLESS, ONLY, SIZES, Family
from .hf_rope import take_rope


def model_config(raw: dict[str, Any]) -> ModelConfig:
    """The config of a plain decoder: default, trained and greatest depth are 1.

    FormatError names an unknown architecture, a missing field, or a field (or value) that would change the forward pass.
    """
    architectures = raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise FormatError(f"config.json: architecture {shown(architectures)} is not supported; those that are: {', '.join(FAMILIES)}")
    left = {**family.defaults, **raw}  # every step takes what it understands
    fields = _take_sizes(left, raw)
    n_layers, head_dim = fields["n_core"], fields["head_dim"]
    fields |= take_rope(left, head_dim, fields["trained_seq_len"])
    fields["qk_norm"] = family.qk_norm
    fields["attn_bias"] = "qkvo" if family.bias_by_config and left.pop("attention_bias", None) else family.attn_bias
    if family.no_rope_layers:
        fields["nope_layers"] = _take_nope_layers(left, n_layers)
    if family.windows != "none":
        fields["layer_windows"] = _take_windows(left, family, n_layers, fields.get("nope_layers", ()))
    _refuse_rest(left, family, str(architecture))
    try:
        return ModelConfig(**fields, default_loops=1, trained_loops=1, max_loops=1, extra={"converted_from": architecture})
    except (ValueError, TypeError) as error:
        raise FormatError(f"config.json: {error}") from None


def _take_sizes(left: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {ours: _size(key, left.pop(key, None)) for ours, key in SIZES.items()}
    n_kv_heads, head_dim, positions = (left.pop(key, None) for key in ("num_key_value_heads", "head_dim", "max_position_embeddings"))
    fields["n_kv_heads"] = fields["n_heads"] if n_kv_heads is None else _size("num_key_value_heads", n_kv_heads)
    if head_dim is None and fields["dim"] % fields["n_heads"]:
        raise FormatError(
            f"config.json: hidden_size {fields['dim']} is no multiple of num_attention_heads {fields['n_heads']}, and head_dim is not given"
        )
    fields["head_dim"] = fields["dim"] // fields["n_heads"] if head_dim is None else _size("head_dim", head_dim)
    fields["trained_seq_len"] = None if positions is None else _size("max_position_embeddings", positions)
    activation = left.pop("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise FormatError(f"config.json: hidden_act is {shown(activation)}, supported are {', '.join(ACTIVATIONS)}")
    fields["activation"] = ACTIVATIONS[activation]
    fields["norm_eps"] = left.pop("rms_norm_eps", 1e-6)
    fields["tied_embeddings"] = left.pop("tie_word_embeddings", False)
    return fields


def _take_nope_layers(left: dict[str, Any], n_layers: int) -> tuple[int, ...]:
    """SmolLM3: 1 in no_rope_layers means that the layer has rope; by default every fourth has none."""
    flags, interval = left.pop("no_rope_layers", None), left.pop("no_rope_layer_interval", 4)
    if flags is None:
        return tuple(i for i in range(n_layers) if (i + 1) % _size("no_rope_layer_interval", interval) == 0)
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
        window = window if left.pop("use_sliding_window", False) else None
        first = left.pop("max_window_layers", 28) if not family.no_rope_layers else 0
        slides = nope_layers if family.no_rope_layers else range(_size("max_window_layers", first, 0), n_layers)
        types = _check_types(types, n_layers) or ["sliding_attention" if window and i in slides else "full_attention" for i in range(n_layers)]
    if "sliding_attention" not in types:
        return ()
    if window is None:
        raise FormatError("config.json: layer_types has sliding_attention, but sliding_window is unset or use_sliding_window false")
    return tuple(_size("sliding_window", window) if kind == "sliding_attention" else 0 for kind in types)


def _check_types(types: Any, n_layers: int) -> list[str] | None:
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != n_layers or not all(kind in ("full_attention", "sliding_attention") for kind in types):
        raise FormatError(
            f"config.json: layer_types is {shown(types)}, expected full_attention or sliding_attention for each of the {n_layers} layers"
        )
    return types


def _refuse_rest(left: dict[str, Any], family: Family, architecture: str) -> None:
    rest = {key: value for key, value in left.items() if key not in HARMLESS and key not in family.harmless and value is not None}
    for key, value in rest.items():
        if key in ONLY and value != ONLY[key]:
            raise FormatError(f"config.json: {key} is {shown(value)}, {architecture} is supported with {shown(ONLY[key])} only")
    if unknown := [key for key in rest if key not in ONLY]:
        raise FormatError(f"config.json: field {first_of(unknown)} is unknown for {architecture} and might change the forward pass")


def _size(key: str, value: Any, low: int = 1) -> int:
    if not is_int(value) or value < low:
        raise FormatError(f"config.json: {key} is {'missing' if value is None else shown(value)}, expected an integer from {low}")
    return int(value)
