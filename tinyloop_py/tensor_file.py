"""Safetensors files of named arrays with checksums: written piece by piece and atomically, read with every fault named."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from .atomic_file import AtomicFile, PathLike, file_kind
from .errors import FormatError
from .file_metadata import HEADER_CRC32, TENSOR_CRC32, crc_text, header_crc32
from .positioned_read import read_summed
from .safetensors_header import ITEM_NBYTES, HeaderEntry, header_bytes, read_header
from .strict_json import load_object, shown

NUMPY_TYPES = {"U8": np.uint8, "I32": np.int32, "F16": np.float16, "BF16": np.uint16, "F32": np.float32}  # BF16 as its bits


class TensorFileWriter:
    """A new file of the given tensors, which replaces `path` on `close`.

    Parameters
    ----------
    tensors
        Name -> (safetensors type, shape).
    text
        The metadata; two checksums join it.
    """

    def __init__(self, path: PathLike, tensors: Mapping[str, tuple[str, tuple[int, ...]]], text: Mapping[str, str]) -> None:
        self._text = dict(text)
        self._places: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        end = 0
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -ITEM_NBYTES[item[1][0]]):  # so that every tensor is aligned
            start, end = end, end + math.prod(shape) * ITEM_NBYTES[dtype]
            self._places[name] = (dtype, shape, start, end)
        self._crc32 = dict.fromkeys(self._places, 0)
        self._written = dict.fromkeys(self._places, 0)
        self._data_start = len(self._header())
        self._file = AtomicFile(path, self._data_start + end)

    def append(self, name: str, values: npt.NDArray[Any]) -> None:
        """Add the next values of a tensor, in its type and order."""
        dtype, _, start, stop = self._places[name]
        assert values.dtype == NUMPY_TYPES[dtype] and self._written[name] + values.nbytes <= stop - start
        self._file.write(self._data_start + start + self._written[name], values)
        self._crc32[name] = zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, self._crc32[name])
        self._written[name] += values.nbytes

    def close(self) -> None:
        """Complete the file and give it its name."""
        assert all(self._written[name] == stop - start for name, (_, _, start, stop) in self._places.items())
        self._file.write(0, self._header())
        self._file.commit()

    def _header(self) -> bytes:
        text = dict(self._text)
        text[TENSOR_CRC32] = json.dumps({name: crc_text(crc) for name, crc in self._crc32.items()}, separators=(",", ":"))
        entries = {name: HeaderEntry(*place) for name, place in self._places.items()}
        text[HEADER_CRC32] = header_crc32(entries, text, 0)
        return header_bytes(self._places, text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._file.abort()


class TensorFile:
    """An open file of `TensorFileWriter`; its header is sound, a tensor is checked when it is read.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    FormatError
        It is not of this format and version, or its header is damaged.
    """

    def __init__(self, path: PathLike, file_format: str, version: str) -> None:
        self.path = os.fsdecode(path)
        if kind := file_kind(os.stat(self.path).st_mode):  # opening a FIFO would wait for its writer
            raise FormatError(f"{kind}, expected a file that save wrote")
        self._file = open(self.path, "rb")  # noqa: SIM115
        try:
            self._read_header(file_format, version)
        except BaseException:
            self.close()
            raise

    def _read_header(self, file_format: str, version: str) -> None:
        nbytes = os.fstat(self._file.fileno()).st_size
        self.entries, self.text = read_header(self._file, nbytes)
        if self.text.get("format") != file_format:
            raise FormatError(f"format is {shown(self.text.get('format'))}, expected {file_format!r}")
        if self.text.get("version") != version:
            raise FormatError(f"version is {shown(self.text.get('version'))}, this tinyloop reads version {version}")
        data_start = min((entry.start for entry in self.entries.values()), default=nbytes)
        if header_crc32(self.entries, self.text, data_start) != self.text.get(HEADER_CRC32):
            raise FormatError(f"the header is damaged: its checksum is not {shown(self.text.get(HEADER_CRC32))}")
        self._crc32 = load_object(self.text.get(TENSOR_CRC32, "{}"), f"the metadata's {TENSOR_CRC32}")

    def read(self, name: str, dtype: str, shape: tuple[int, ...], memory: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[Any]:
        """A tensor, which must be of this type and shape and hold what was written; in `memory` where given."""
        entry = self.entries.get(name)
        if entry is None:
            raise FormatError(f"tensor {name} is missing")
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise FormatError(f"tensor {name} is {entry.dtype} of shape {shown(list(entry.shape))}, expected {dtype} of {list(shape)}")
        nbytes = entry.stop - entry.start
        flat = np.empty(nbytes, np.uint8) if memory is None else memory[:nbytes]
        if crc_text(read_summed(self._file.fileno(), flat, entry.start, f"tensor {name}")) != self._crc32.get(name):
            raise FormatError(f"tensor {name} is damaged: its checksum is not {shown(self._crc32.get(name))}")
        return flat.view(NUMPY_TYPES[dtype]).reshape(shape)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
