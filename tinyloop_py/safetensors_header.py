"""The header of a safetensors file: reading, with every inconsistency refused by name, and writing.

Layout: u64 length, that many bytes of JSON ``{name: {dtype, shape, data_offsets}, "__metadata__": {str: str}}``, then the
tensors without a gap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from .errors import FormatError
from .strict_json import is_int, load_object, shown

MAX_HEADER_NBYTES = 100_000_000  # the safetensors library's own limit
ALIGNMENT = 64  # of the first tensor in files that we write
METADATA = "__metadata__"
ITEM_NBYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class HeaderEntry:
    """Where a tensor lies: bytes `start` to `stop` of the file."""

    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: BinaryIO, file_nbytes: int) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Tensors (in file order) and metadata of an open safetensors file of `file_nbytes` bytes."""
    prefix = file.read(8)
    if len(prefix) < 8:
        raise FormatError(f"not a safetensors file: {file_nbytes} bytes, too short for a header")
    if prefix[:4] == b"GGUF":
        raise FormatError("a GGUF file, not a safetensors file; `tinyloop convert` makes a .tinyloop file from one")
    n = int.from_bytes(prefix, "little")
    if n > MAX_HEADER_NBYTES or n < 2:
        raise FormatError(f"not a safetensors file: its header would have {n} bytes")
    if 8 + n > file_nbytes:
        raise FormatError(f"truncated: the header has {n} bytes, the file {file_nbytes}")
    header = load_object(file.read(n), "safetensors header")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError("safetensors header: __metadata__ must map text to text")
    entries = {name: _entry(name, value, 8 + n, file_nbytes) for name, value in header.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_contiguous(ordered, 8 + n, file_nbytes)
    return ordered, metadata


def _entry(name: str, value: Any, data_start: int, file_nbytes: int) -> HeaderEntry:
    what = f"tensor {shown(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{what}: its header entry must hold dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_NBYTES:
        raise FormatError(f"{what}: unknown type {shown(dtype)}")
    if not isinstance(shape, list) or not all(is_int(n) and n >= 0 for n in shape):
        raise FormatError(f"{what}: shape is {shown(shape)}, expected a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_int(n) and n >= 0 for n in offsets) or offsets[0] > offsets[1]:
        raise FormatError(f"{what}: data_offsets are {shown(offsets)}, expected [start, end]")
    start, stop = (data_start + n for n in offsets)
    if stop > file_nbytes:
        raise FormatError(f"{what}: ends at byte {shown(stop)}, the file has {file_nbytes} (truncated?)")
    if (expected := math.prod(shape) * ITEM_NBYTES[dtype]) != stop - start:
        raise FormatError(f"{what}: {dtype} of shape {shown(shape)} takes {shown(expected)} bytes, the header gives it {stop - start}")
    return HeaderEntry(dtype, tuple(shape), start, stop)


def _check_contiguous(ordered: Mapping[str, HeaderEntry], data_start: int, file_nbytes: int) -> None:
    end, previous = data_start, "the header"
    for name, entry in ordered.items():
        if entry.start != end:
            fault = "overlaps" if entry.start < end else "leaves a gap behind"
            raise FormatError(f"tensor {shown(name)} {fault} {previous}: it starts at byte {entry.start}, expected {end}")
        end, previous = entry.stop, f"tensor {shown(name)}"
    if end != file_nbytes:
        raise FormatError(f"{file_nbytes - end} bytes follow {previous}, the last that the header names")


def header_bytes(entries: Mapping[str, tuple[str, tuple[int, ...], int, int]], metadata: Mapping[str, str]) -> bytes:
    """The start of a file up to its first tensor; `entries` are (type, shape, start, stop) relative to that point."""
    header: dict[str, Any] = {METADATA: dict(metadata)}
    for name, (dtype, shape, start, stop) in entries.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text that is not valid Unicode cannot be stored: {error}") from None
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_NBYTES:
        raise ValueError(f"the header would have {len(text)} bytes, beyond the {MAX_HEADER_NBYTES} that safetensors allows")
    return len(text).to_bytes(8, "little") + text
