"""A Hugging Face folder as a `Source`: config.json, safetensors, tokenizer.json, chat template, generation_config.json."""

from __future__ import annotations

import os
from typing import Any

from ..config import ModelConfig
from ..strict_json import load_object
from .families import HF_NAME
from .hf_config import model_config
from .hf_tensors import drop_tied_head, folder_tensors
from .hf_tokenizer import folder_chat_template, folder_tokenizer, read_optional
from .huginn import huginn_config, huginn_name, huginn_tensors, is_huginn
from .source import Source, SourceTensor, pick_tensors
from .stop_ids import collect_stop_ids


def open_folder(folder: str, with_tokenizer: bool = True) -> Source:
    """Read everything but the weights; FormatError or FileNotFoundError names what does not fit."""
    try:
        with open(os.path.join(folder, "config.json"), "rb") as file:
            raw = load_object(file.read(), "config.json")
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} has no config.json, expected the folder of a Hugging Face model") from None
    config, picked = _open_huginn(folder, raw) if is_huginn(raw) else _open_plain(folder, raw)
    named = [read_optional(folder, "generation_config.json").get("eos_token_id"), raw.get("eos_token_id")]
    if not with_tokenizer:
        return Source(config, picked, stop_ids=collect_stop_ids(named, None, lambda token: None, config.vocab_size))
    tokenizer, template = folder_tokenizer(folder), folder_chat_template(folder)
    return Source(config, picked, tokenizer.to_str(), template, collect_stop_ids(named, template, tokenizer.token_to_id, config.vocab_size))


def _open_plain(folder: str, raw: dict[str, Any]) -> tuple[ModelConfig, dict[str, SourceTensor]]:
    config, tensors = model_config(raw), folder_tensors(folder)
    if config.tied_embeddings:
        drop_tied_head(tensors, HF_NAME("head.weight"), HF_NAME("embed.weight"))
    return config, pick_tensors(config, tensors, HF_NAME)


def _open_huginn(folder: str, raw: dict[str, Any]) -> tuple[ModelConfig, dict[str, SourceTensor]]:
    config = huginn_config(raw)
    return config, pick_tensors(config, huginn_tensors(config, folder_tensors(folder)), huginn_name)
