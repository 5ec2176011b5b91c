"""The header of a GGUF file (versions 2 and 3, little-endian): fields and where the tensors lie.

Read here rather than by `gguf.GGUFReader`, which takes many seconds for a large vocabulary and doesn't say which tensor
a truncated file lacks. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import FormatError
from ..strict_json import shown

STRING, ARRAY = 8, 9
SCALARS = dict(enumerate(["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u1"])) | {10: "<u8", 11: "<i8", 12: "<f8"}  # 7 is bool
BOOL = 7
MAX_DIMS = 4


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies; `shape` has rows first, as NumPy counts."""

    name: str
    kind: int  # ggml's number of the type
    shape: tuple[int, ...]
    offset: int  # from the start of the file


def read_gguf_header(path: str) -> tuple[dict[str, Any], list[GgufTensor], int]:
    """Fields, tensors and the size of the file; FormatError says what is damaged."""
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes < 24:
            raise FormatError(f"truncated GGUF file: {nbytes} bytes")
        with mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ) as mapping:
            return *_Cursor(mapping).header(), nbytes


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def header(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        if (magic := self._take(4)) != b"GGUF":
            raise FormatError(f"not a GGUF file: it begins with {magic!r}")
        if (version := self._int("<I")) not in (2, 3):
            hint = " (the other byte order?)" if version & 0xFFFF == 0 else ""
            raise FormatError(f"GGUF version is {version}{hint}, supported are 2 and 3")
        n_tensors, n_fields = self._count(24), self._count(12)
        fields: dict[str, Any] = {}
        for _ in range(n_fields):
            key = self._text("a key")
            if key in fields:
                raise FormatError(f"GGUF field {shown(key)} appears twice")
            fields[key] = self._value(self._int("<I"), key)
        infos = [self._tensor_info() for _ in range(n_tensors)]
        if len({name for name, *_ in infos}) != n_tensors:
            raise FormatError("a GGUF tensor appears twice")
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise FormatError(f"general.alignment is {shown(alignment)}, expected a power of two")
        start = -(-self._at // alignment) * alignment
        return fields, [GgufTensor(name, kind, shape, start + offset) for name, kind, shape, offset in infos]

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._text("a tensor's name")
        n_dims = self._int("<I")
        if not 1 <= n_dims <= MAX_DIMS:
            raise FormatError(f"tensor {shown(name)} has {n_dims} dimensions")
        shape = tuple(self._int("<Q") for _ in range(n_dims))[::-1]
        return name, self._int("<I"), shape, self._int("<Q")

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._text(f"field {shown(key)}")
        if kind == ARRAY:
            item = self._int("<I")
            if item == STRING:
                return [self._text(f"field {shown(key)}") for _ in range(self._count(8))]
            values = np.frombuffer(self._take(self._count(1) * self._scalar(item, key).itemsize), self._scalar(item, key)).tolist()
            return [bool(value) for value in values] if item == BOOL else values
        value = np.frombuffer(self._take(self._scalar(kind, key).itemsize), self._scalar(kind, key))[0].item()
        return bool(value) if kind == BOOL else value

    def _scalar(self, kind: int, key: str) -> np.dtype[Any]:
        if kind not in SCALARS:
            raise FormatError(f"GGUF field {shown(key)} has the unknown type {kind}")
        return np.dtype(SCALARS[kind])

    def _count(self, item_nbytes: int) -> int:
        """A count of things of at least so many bytes each: no more than the file has room for."""
        n = self._int("<Q")
        if n * item_nbytes > len(self._data) - self._at:
            raise FormatError(f"truncated or damaged GGUF file: {n} things announced at byte {self._at - 8}")
        return n

    def _text(self, what: str) -> str:
        try:
            return self._take(self._int("<Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"GGUF file: {what} is not UTF-8: {error}") from None

    def _int(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _take(self, n: int) -> bytes:
        taken = self._data[self._at : self._at + n]
        if len(taken) != n:
            raise FormatError(f"truncated or damaged GGUF file: its header goes on beyond its {len(self._data)} bytes")
        self._at += n
        return taken
