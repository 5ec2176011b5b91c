"""Reading `.tinyloop` files: checked whole before anything is used, then read tensor by tensor, or mapped."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .atomic_file import PathLike, file_kind
from .config import ModelConfig
from .errors import FormatError
from .file_metadata import HEADER_CRC32, FileMetadata, crc_text, from_text_map, header_crc32
from .fingerprint import weights_id
from .layout import SCALE_SUFFIX, layer_names, matrix_shapes, scale_shapes, tensor_shapes
from .positioned_read import crc32_at, read_array
from .safetensors_header import HeaderEntry, read_header
from .strict_json import first_of, shown
from .weights import STORED, WeightTensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DTYPE_OF = {header_name: dtype for dtype, (header_name, _) in STORED.items()}
FUSED = (("attn.q", "attn.k", "attn.v"), ("mlp.gate", "mlp.up"))  # run as one product, so of one type


def open_model_file(path: PathLike) -> ModelFile:
    """Map a `.tinyloop` file and check everything that can be wrong with it except the weights' values (`ModelFile.verify`).

    Raises
    ------
    FileNotFoundError
        `path` does not exist.
    FormatError
        The file is damaged or of another kind; the text names the tensor or field.
    """
    path = os.fsdecode(path)
    if kind := file_kind(os.stat(path).st_mode):
        hint = " (`tinyloop convert` makes one from a Hugging Face folder)" if kind == "a folder" else ""
        raise FormatError(f"{path}: {kind}, expected a .tinyloop file{hint}")
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            nbytes = status.st_size
            entries, text = read_header(file, nbytes)
            meta = from_text_map(text)
            dtypes = check_tensors(meta, entries)
            if HEADER_CRC32 in text and header_crc32(entries, text, min(e.start for e in entries.values())) != text[HEADER_CRC32]:
                raise FormatError(f"the header is damaged: its checksum is not {shown(text[HEADER_CRC32])}")
            try:
                mapping = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
            except ValueError:  # shorter than it was a moment ago
                raise FormatError(f"truncated: it had {nbytes} bytes, now {os.fstat(file.fileno()).st_size}") from None
            file_id = (status.st_dev, status.st_ino, nbytes, status.st_mtime_ns)
            opened = ModelFile(path, meta, entries, dtypes, mapping, io.FileIO(os.dup(file.fileno())), file_id)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    try:
        _check_small_values(opened)
    except BaseException:
        opened.close()
        raise
    return opened


class ModelFile:
    """An open `.tinyloop` file.

    `read` copies a weight, and is what a model is loaded with: a file that shrinks meanwhile is a FormatError. `tensor` is a
    view of the mapping, which stays readable after `close` for as long as it is held, and for as long as nothing cuts the file.

    Attributes
    ----------
    config, tokenizer_json, chat_template, stop_ids
        The metadata; the tokenizer is `tokenizers` JSON, None where the file has none.
    path, nbytes
        Where the file lies and its size.
    names
        The weights in layout order (int8 scales belong to their weight).
    """

    def __init__(
        self,
        path: str,
        meta: FileMetadata,
        entries: Mapping[str, HeaderEntry],
        dtypes: Mapping[str, str],
        mapping: mmap.mmap,
        file: io.FileIO,
        file_id: tuple[int, ...],
    ) -> None:
        self.path = path
        self.config: ModelConfig = meta.config
        self.tokenizer_json = meta.tokenizer_json
        self.chat_template = meta.chat_template
        self.stop_ids = meta.stop_ids
        self.group_size = meta.group_size
        self.nbytes = len(mapping)
        self.file_id = file_id  # inode, size and time: whether a path still names this file
        self.names = tuple(dtypes)
        self._crc32 = meta.tensor_crc32
        self._entries = entries
        self._dtypes = dtypes
        self._mapping: mmap.mmap | None = mapping
        self._file = file  # for reads without the mapping

    def tensor(self, name: str) -> WeightTensor:
        """The weight called `name`, uncopied; KeyError where the model has none of that name."""
        dtype, entry = self._dtypes[name], self._entries[name]
        if dtype != "int8":
            return WeightTensor(name, dtype, entry.shape, self._view(name, dtype))
        scales = self._view(name + SCALE_SUFFIX, "f32").reshape(self._entries[name + SCALE_SUFFIX].shape)
        return WeightTensor(name, dtype, entry.shape, self._view(name, dtype), scales, self.group_size)

    def read(self, name: str, memory: npt.NDArray[np.uint8] | None = None) -> WeightTensor:
        """The weight called `name` in memory of its own, or its values in `memory`; FormatError where the file has become too short for it."""
        dtype, entry = self._dtypes[name], self._entries[name]
        scales = self._read(name + SCALE_SUFFIX) if dtype == "int8" else None
        return WeightTensor(name, dtype, entry.shape, self._read(name, memory).reshape(-1), scales, self.group_size if dtype == "int8" else None)

    def check_unchanged(self) -> None:
        """FormatError where the file was written to or cut since it was opened: what was read may be of two files."""
        status = os.fstat(self._open_fd())
        if (status.st_size, status.st_mtime_ns) != self.file_id[2:]:
            raise FormatError(f"{self.path}: the file was changed while it was read; open it again when its writer is done")

    def __iter__(self) -> Iterator[WeightTensor]:
        return (self.tensor(name) for name in self.names)

    def __len__(self) -> int:
        return len(self.names)

    def load_tokenizer(self) -> Tokenizer | None:
        """A new `tokenizers.Tokenizer`, None where the file has none; FormatError where its text cannot be read."""
        if self.tokenizer_json is None:
            return None
        from .tokenizer_json import stored_tokenizer

        return stored_tokenizer(self.tokenizer_json, self.path)

    def verify(self) -> None:
        """Read every byte: FormatError names the first tensor whose checksum is wrong or, where the file has none, that holds NaN or infinity."""
        for name, entry in self._entries.items():
            if name in self._crc32 and self._checksum(name, entry) != self._crc32[name]:
                raise FormatError(f"{self.path}: tensor {name} is damaged: its checksum is not {shown(self._crc32[name])}")
            if name not in self._crc32 and name in self._dtypes and not self.read(name).is_finite():
                raise FormatError(f"{self.path}: tensor {name} holds NaN or infinity")

    def weights_id(self, read: bool = False) -> str | None:
        """A fingerprint of all weights, from the checksums in the file; where it lacks one, from the bytes if `read`, else None."""
        sums = dict(self._crc32)
        if missing := [name for name in self._entries if name not in sums]:
            if not read:
                return None
            sums |= {name: self._checksum(name, self._entries[name]) for name in missing}
        return weights_id(sums, {name: (entry.dtype, entry.shape) for name, entry in self._entries.items()}, self.group_size)

    def close(self) -> None:
        """Let go of the mapping; it is unmapped when the last tensor taken from it is gone."""
        self._file.close()
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # views are still held
                mapping.close()

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open_fd(self) -> int:
        if self._mapping is None:
            raise ValueError(f"{self.path} is closed")
        return self._file.fileno()

    def _checksum(self, name: str, entry: HeaderEntry) -> str:
        return crc_text(crc32_at(self._open_fd(), entry.stop - entry.start, entry.start, f"{self.path}: tensor {name}"))

    def _read(self, stored_name: str, memory: npt.NDArray[np.uint8] | None = None) -> np.ndarray:
        entry = self._entries[stored_name]
        element = STORED[DTYPE_OF[entry.dtype]][1]
        values = read_array(self._open_fd(), element, math.prod(entry.shape), entry.start, f"{self.path}: tensor {stored_name}", memory)
        return values.reshape(entry.shape)

    def _view(self, name: str, dtype: str) -> np.ndarray:
        if self._mapping is None:
            raise ValueError(f"{self.path} is closed")
        entry, element = self._entries[name], STORED[dtype][1]
        return np.frombuffer(self._mapping, element, math.prod(entry.shape), entry.start)


def check_tensors(meta: FileMetadata, entries: Mapping[str, HeaderEntry]) -> dict[str, str]:
    """Name -> type of every weight, in layout order; FormatError names a tensor that is missing, extra, or of another shape or type."""
    config = meta.config
    if 6 * config.n_layers > len(entries):  # before the layout is spelled out: a damaged config may name billions
        raise FormatError(f"the config has {config.n_layers} layers, the file only {len(entries)} tensors")
    expected, matrices = tensor_shapes(config), matrix_shapes(config)
    dtypes: dict[str, str] = {}
    known = set()
    for name, shape in expected.items():
        dtypes[name] = _check_entry(name, entries, shape, tuple(STORED) if name in matrices else ("f32", "bf16", "f16"))
        known.add(name)
        if dtypes[name] == "int8":
            scale_name, scale_shape = scale_shapes(name, matrices[name], meta.group_size)
            _check_entry(scale_name, entries, scale_shape, ("f32",))
            known.add(scale_name)
    if extra := [name for name in entries if name not in known]:
        raise FormatError(f"tensor {first_of(extra)} does not belong to a model of this config")
    check_fused(config, dtypes)
    return dtypes


def check_fused(config: ModelConfig, dtypes: Mapping[str, str]) -> None:
    """FormatError unless the matrices that run as one product (q, k, v; gate, up) are of one type."""
    for layer, group in itertools.product(layer_names(config), FUSED):
        names = [f"{layer}.{part}.weight" for part in group if f"{layer}.{part}.weight" in dtypes]
        for name in names[1:]:
            if dtypes[name] != dtypes[names[0]]:
                raise FormatError(f"tensors {names[0]} ({dtypes[names[0]]}) and {name} ({dtypes[name]}) run as one product and must be of one type")


def _check_entry(name: str, entries: Mapping[str, HeaderEntry], shape: tuple[int, ...], allowed: tuple[str, ...]) -> str:
    entry = entries.get(name)
    if entry is None:
        raise FormatError(f"tensor {name} is missing")
    if entry.shape != shape:
        raise FormatError(f"tensor {name} has shape {shown(list(entry.shape))}, the config asks for {list(shape)}")
    dtype = DTYPE_OF.get(entry.dtype)
    if dtype not in allowed:
        raise FormatError(f"tensor {name} has type {dtype or entry.dtype}, expected {' or '.join(allowed)}")
    if entry.start % STORED[dtype][1].itemsize:
        raise FormatError(f"tensor {name} starts at byte {entry.start}, which is not aligned for {dtype}")
    return dtype


def _check_small_values(file: ModelFile) -> None:
    for name, dtype in file._dtypes.items():
        if dtype == "int8":
            scales = file._read(name + SCALE_SUFFIX)
            if not (np.isfinite(scales).all() and (scales >= 0).all()):
                raise FormatError(f"{file.path}: tensor {name}{SCALE_SUFFIX} holds a scale that is negative, NaN or infinite")
        elif file._entries[name].shape[:-1] in ((), (1,)) and not file.read(name).is_finite():
            raise FormatError(f"{file.path}: tensor {name} holds NaN or infinity")
