"""The metadata of a `.tinyloop` file: config, tokenizer, chat template, stop ids, checksums, as safetensors' text map."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .config import ModelConfig
from .errors import FormatError
from .quantize import check_group_size
from .safetensors_header import HeaderEntry
from .strict_json import is_int, load_json, load_object, shown

FORMAT = "tinyloop"
VERSION = "1"
TENSOR_CRC32 = "tensor_crc32"  # JSON: name -> CRC-32 of the stored bytes, 8 hex digits
HEADER_CRC32 = "header_crc32"  # CRC-32 of everything else in the header, in a canonical form


@dataclass(frozen=True)
class FileMetadata:
    """What a file says besides its tensors."""

    config: ModelConfig
    tokenizer_json: str | None = None
    chat_template: str | None = None
    stop_ids: tuple[int, ...] = ()
    group_size: int | None = None  # of every int8 matrix; None: one scale a row
    tensor_crc32: Mapping[str, str] = field(default_factory=dict)


def to_text_map(meta: FileMetadata) -> dict[str, str]:
    """The metadata as stored, without `header_crc32`."""
    text = {"format": FORMAT, "version": VERSION, "config": meta.config.to_json(), "stop_ids": json.dumps(list(meta.stop_ids))}
    if meta.tokenizer_json is not None:
        text["tokenizer"] = meta.tokenizer_json
    if meta.chat_template is not None:
        text["chat_template"] = meta.chat_template
    if meta.group_size is not None:
        text["group_size"] = str(meta.group_size)
    text[TENSOR_CRC32] = json.dumps(dict(meta.tensor_crc32), separators=(",", ":"))
    return text


def from_text_map(text: Mapping[str, str]) -> FileMetadata:
    """Read `to_text_map`'s result; unknown keys are ignored, checksums may be absent."""
    if text.get("format") != FORMAT:
        raise FormatError(f"a safetensors file, but not of tinyloop (format {shown(text.get('format'))}); `tinyloop convert` makes one")
    if text.get("version") != VERSION:
        raise FormatError(f"version is {shown(text.get('version'))}, this tinyloop reads version {VERSION}")
    if "config" not in text:
        raise FormatError("the metadata lacks the config")
    config = ModelConfig.from_json(text["config"])
    for key in ("tokenizer", "chat_template"):
        try:
            text.get(key, "").encode("utf-8")
        except UnicodeEncodeError:
            raise FormatError(f"the metadata's {key} is not valid Unicode") from None
    stop_ids = check_stop_ids(load_json(text.get("stop_ids", "[]"), "the metadata's stop_ids"), config)
    return FileMetadata(config, text.get("tokenizer"), text.get("chat_template"), stop_ids, _group_size(text), _checksums(text))


def check_stop_ids(ids: Any, config: ModelConfig) -> tuple[int, ...]:
    """The ids as a tuple; FormatError unless they are token ids of the model."""
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not all(is_int(i) and 0 <= i < config.vocab_size for i in ids):
        raise FormatError(f"stop_ids are {shown(ids)}, expected token ids below vocab_size = {config.vocab_size}")
    return tuple(ids)


def header_crc32(tensors: Mapping[str, HeaderEntry], text: Mapping[str, str], data_start: int) -> str:
    """Checksum of the header's meaning: independent of the order of its keys and of white space."""
    placed = {name: [e.dtype, list(e.shape), e.start - data_start, e.stop - data_start] for name, e in tensors.items()}
    rest = {key: value for key, value in text.items() if key != HEADER_CRC32}
    canonical = json.dumps([placed, rest], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return crc_text(zlib.crc32(canonical.encode("utf-8", "surrogatepass")))


def crc_text(value: int) -> str:
    """A CRC-32 as 8 hex digits."""
    return f"{value:08x}"


def _group_size(text: Mapping[str, str]) -> int | None:
    if "group_size" not in text:
        return None
    try:
        group_size = int(text["group_size"])
        check_group_size(group_size)
    except ValueError:
        raise FormatError(f"the metadata's group_size is {shown(text['group_size'])}, expected a positive multiple of 64") from None
    return group_size


def _checksums(text: Mapping[str, str]) -> dict[str, str]:
    sums = load_object(text.get(TENSOR_CRC32, "{}"), f"the metadata's {TENSOR_CRC32}")
    if not all(isinstance(value, str) for value in sums.values()):
        raise FormatError(f"the metadata's {TENSOR_CRC32} must map names to text")
    return sums
