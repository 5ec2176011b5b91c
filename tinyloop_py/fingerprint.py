"""What saved KV must have in common with the model that takes it back: weights, config, KV mode and numerics."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from .config import ModelConfig
from .strict_json import shown

# Fields that change no result: the depths that calls may ask for, and provenance.
_FREE = ("extra", "default_loops", "trained_loops", "max_loops", "trained_seq_len")
REBUILT = ("kv_mode", "numerics_id")  # what may differ where the KV is built again from its tokens


def weights_id(checksums: Mapping[str, str], layout: Mapping[str, tuple[str, tuple[int, ...]]], group_size: int | None) -> str:
    """SHA-256 over the stored tensors: names, types, shapes and the CRC-32 of each."""
    listed = [[name, *layout[name], checksums[name]] for name in sorted(layout)]
    return hashlib.sha256(json.dumps([listed, group_size]).encode()).hexdigest()


def fingerprint(config: ModelConfig, weights: str, kv_mode: str, numerics_id: str) -> dict[str, Any]:
    """As JSON holds it."""
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in _FREE}
    return json.loads(json.dumps({"weights": weights, "config": fields, "kv_mode": kv_mode, "numerics_id": numerics_id}))  # type: ignore[no-any-return]


def differences(file: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, str]:
    """Part of the fingerprint -> what is different about it; empty where they agree."""
    found = {}
    for part in model:
        if file.get(part) == model[part]:
            continue
        if part == "weights":
            found[part] = "other weights"
        elif part == "config" and isinstance(file.get(part), dict):
            names = [name for name in model[part] if file[part].get(name) != model[part][name]] or sorted(set(file[part]) - set(model[part]))
            found[part] = ", ".join(f"config field {n}: {shown(file[part].get(n))}, not {shown(model[part].get(n))}" for n in names[:3])
        else:
            found[part] = f"{part} {shown(file.get(part))}, not {shown(model[part])}"
    return found
