"""Tokenizer and chat template of a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import FormatError
from ..strict_json import load_object, shown
from ..tokenizer_json import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_optional(folder: str, name: str) -> dict[str, Any]:
    """A JSON object of the folder, empty where the file does not exist."""
    try:
        with open(os.path.join(folder, name), "rb") as file:
            return load_object(file.read(), name)
    except FileNotFoundError:
        return {}


def folder_tokenizer(folder: str) -> Tokenizer:
    """tokenizer.json with the tokens that tokenizer_config.json adds. As in transformers 5, its add_bos_token and add_eos_token count for nothing."""
    path = os.path.join(folder, TOKENIZER)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{folder} has no {TOKENIZER}; --no-tokenizer converts without one")
    with open(path, encoding="utf-8") as file:
        try:
            tokenizer = load_tokenizer(file.read())
        except ValueError as error:  # UnicodeDecodeError too
            raise FormatError(f"{path}: {error}") from None
    _add_tokens(tokenizer, read_optional(folder, SETTINGS))
    return tokenizer


def folder_chat_template(folder: str) -> str | None:
    """chat_template.jinja, else chat_template.json, else the one in tokenizer_config.json (of several the default one)."""
    path = os.path.join(folder, "chat_template.jinja")
    if os.path.exists(path):
        with open(path, "rb") as file:
            try:
                return file.read().decode("utf-8")
            except UnicodeDecodeError as error:
                raise FormatError(f"{path} is not UTF-8: {error}") from None
    template = read_optional(folder, "chat_template.json").get("chat_template") or read_optional(folder, SETTINGS).get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise FormatError(f"{SETTINGS}: chat_template is {shown(template)}, expected text")
    return template


def _add_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    from tokenizers import AddedToken

    listed = settings.get("added_tokens_decoder") or {}
    entries = listed.items() if isinstance(listed, dict) else [("", None)]
    if not all(key.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str) for key, entry in entries):
        raise FormatError(f"{SETTINGS}: added_tokens_decoder is {shown(listed)}, expected an object from id to token")
    known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    for token_id, entry in sorted(entries, key=lambda item: int(item[0])):
        flags = {key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in entry}
        token = AddedToken(entry["content"], **flags)
        if repr(token) not in known:
            tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != int(token_id):
            raise FormatError(
                f"{SETTINGS}: token {shown(token.content)} has id {token_id}, in {TOKENIZER} it would have {tokenizer.token_to_id(token.content)}"
            )
    whole = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for text in filter(None, (_token_text(settings.get(name)) for name in _NAMED)):
        if text not in whole and tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json: its text, or an object with it."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None
