"""tinyloop info FILE: what a `.tinyloop` file holds and what it costs to run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import Any

from ..config import ModelConfig
from ..kv_modes import KV_DTYPES, has_kv_mode, kv_nbytes_per_token
from ..model_file import ModelFile, open_model_file
from .generate import DEMO, model_path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "info", help="show what a model file holds", description="Show config, sizes, weights and KV bytes of a model file."
    )
    parser.add_argument("file", metavar="FILE", help=f"a .tinyloop file, or '{DEMO}' for the one that comes with tinyloop")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--verify", action="store_true", help="read all weights and compare them with the file's checksums")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the facts of a file."""
    with open_model_file(model_path(args.file)) as file:
        if args.verify:
            file.verify()
        facts = file_facts(file)
    print(json.dumps(facts, indent=2, ensure_ascii=False) if args.json else "\n".join(_lines(facts, args.verify)))
    return 0


def file_facts(file: ModelFile) -> dict[str, Any]:
    """The facts as JSON: config, file, parameters, weights by type, KV bytes of a token by depth, text side."""
    config = file.config
    weights: dict[str, dict[str, int]] = {}
    parameters = dict.fromkeys(("embed", "prelude", "core", "coda", "head", "other"), 0)
    for weight in file:
        entry = weights.setdefault(weight.dtype, {"tensors": 0, "parameters": 0, "nbytes": 0})
        n = math.prod(weight.shape)
        for key, value in (("tensors", 1), ("parameters", n), ("nbytes", weight.nbytes)):
            entry[key] += value
        part = weight.name.split(".")[0]
        parameters[part if part in parameters else "other"] += n
    tokenizer = file.load_tokenizer()
    return {
        "path": file.path,
        "file_nbytes": file.nbytes,
        "parameters": {"total": sum(parameters.values()), **parameters},
        "weights": weights,
        "group_size": file.group_size,
        "kv_fp16_nbytes_per_token": {str(loops): kv_nbytes_per_token(config, loops) for loops in _depths(config)},
        "kv_nbytes_per_token_by_mode": _kv_by_mode(config, max(weights, key=lambda dtype: weights[dtype]["parameters"]).lower()),
        "tokenizer_vocab": None if tokenizer is None else tokenizer.get_vocab_size(with_added_tokens=True),
        "chat_template": file.chat_template is not None,
        "stop_ids": {str(i): None if tokenizer is None else tokenizer.id_to_token(i) for i in file.stop_ids},
        "config": dataclasses.asdict(config),
    }


def _kv_by_mode(config: ModelConfig, matrices: str) -> dict[str, int]:
    """Bytes of a token at the default depth in every KV mode that the model can have; of h, what is held."""
    return {m: kv_nbytes_per_token(config, config.default_loops, m, matrices) for m in KV_DTYPES if has_kv_mode(m, config)}


def human_bytes(n: float) -> str:
    """A size to read: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def _depths(config: ModelConfig) -> list[int]:
    """1, 2, 4 and so on, with the default and the greatest depth."""
    assert config.max_loops is not None
    powers = [1 << i for i in range(config.max_loops.bit_length())]
    return sorted({*powers, config.default_loops, config.max_loops})


def _lines(facts: dict[str, Any], verified: bool) -> list[str]:
    c, parameters = facts["config"], facts["parameters"]
    lines = [f"{facts['path']}: {human_bytes(facts['file_nbytes'])}" + (", every checksum right" if verified else "")]
    shown_parts = ", ".join(f"{part} {n:,}" for part, n in parameters.items() if part != "total" and n)
    lines += ["", f"parameters  {parameters['total']:,} ({shown_parts})"]
    lines += [f"layers      {c['n_prelude']} prelude, {c['n_core']} core, {c['n_coda']} coda"]
    lines += [f"loops       default {c['default_loops']}, trained {c['trained_loops']}, at most {c['max_loops']}"]
    for dtype, entry in facts["weights"].items():
        group = f", a scale for {facts['group_size'] or 'each row'}{' columns' if facts['group_size'] else ''}" if dtype == "int8" else ""
        lines.append(f"{dtype:<11} {entry['tensors']} tensors, {entry['parameters']:,} parameters, {human_bytes(entry['nbytes'])}{group}")
    tokens = "none" if facts["tokenizer_vocab"] is None else f"{facts['tokenizer_vocab']:,} tokens"
    stops = ", ".join(f"{i}" + (f" {token}" if token else "") for i, token in facts["stop_ids"].items()) or "none"
    lines += [f"tokenizer   {tokens}; chat template {'yes' if facts['chat_template'] else 'no'}; stops at {stops}"]
    lines += ["", "KV bytes of a token in fp16, by loops"]
    for loops, nbytes in facts["kv_fp16_nbytes_per_token"].items():
        note = " (default)" if int(loops) == c["default_loops"] else ""
        lines.append(f"  {loops:>6}  {nbytes:>12,}  {human_bytes(nbytes)}{note}")
    lines += ["", "KV bytes of a token by mode, at the default depth"]
    for mode, nbytes in facts["kv_nbytes_per_token_by_mode"].items():
        lines.append(f"  {mode:>6}  {nbytes:>12,}  {human_bytes(nbytes)}{' (of what is held)' if mode == 'h' else ''}")
    defaults = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
    lines += ["", "config"]
    for name, value in c.items():
        if name in ("n_prelude", "n_coda") or value != defaults[name]:
            lines.append(f"  {name:<18} {json.dumps(value, ensure_ascii=False)}")
    return lines
