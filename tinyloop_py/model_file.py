"""Reading `.tinyloop` files: mapped into memory, checked whole before anything is used."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from .atomic_file import PathLike, file_kind
from .config import ModelConfig
from .errors import FormatError
from .file_metadata import HEADER_CRC32, FileMetadata, crc_text, from_text_map, header_crc32
from .fingerprint import weights_id
from .layout import SCALE_SUFFIX, layer_names, matrix_shapes, scale_shapes, tensor_shapes
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
            mapping = mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ)
        opened = ModelFile(path, meta, entries, dtypes, mapping, (status.st_dev, status.st_ino, nbytes, status.st_mtime_ns))
        try:
            _check_small_values(opened)
        except BaseException:
            opened.close()
            raise
        return opened
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


class ModelFile:
    """An open `.tinyloop` file. Tensors are views of the mapping and stay readable after `close` for as long as they are held.

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

    def tensor(self, name: str) -> WeightTensor:
        """The weight called `name`, uncopied; KeyError where the model has none of that name."""
        dtype, entry = self._dtypes[name], self._entries[name]
        if dtype != "int8":
            return WeightTensor(name, dtype, entry.shape, self._view(name, dtype))
        scales = self._view(name + SCALE_SUFFIX, "f32").reshape(self._entries[name + SCALE_SUFFIX].shape)
        return WeightTensor(name, dtype, entry.shape, self._view(name, dtype), scales, self.group_size)

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
            data = self._view(name, DTYPE_OF[entry.dtype])
            if name in self._crc32 and crc_text(zlib.crc32(data.view(np.uint8).data)) != self._crc32[name]:
                raise FormatError(f"{self.path}: tensor {name} is damaged: its checksum is not {shown(self._crc32[name])}")
            if name not in self._crc32 and name in self._dtypes and not self.tensor(name).is_finite():
                raise FormatError(f"{self.path}: tensor {name} holds NaN or infinity")

    def weights_id(self, read: bool = False) -> str | None:
        """A fingerprint of all weights, from the checksums in the file; where it lacks one, from the bytes if `read`, else None."""
        sums = dict(self._crc32)
        if missing := [name for name in self._entries if name not in sums]:
            if not read:
                return None
            sums |= {name: crc_text(zlib.crc32(self._view(name, DTYPE_OF[self._entries[name].dtype]).view(np.uint8).data)) for name in missing}
        return weights_id(sums, {name: (entry.dtype, entry.shape) for name, entry in self._entries.items()}, self.group_size)

    def close(self) -> None:
        """Let go of the mapping; it is unmapped when the last tensor taken from it is gone."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # views are still held
                mapping.close()

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

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
    for weight in file:
        if weight.scales is not None:
            if not (np.isfinite(weight.scales).all() and (weight.scales >= 0).all()):
                raise FormatError(f"tensor {weight.name}{SCALE_SUFFIX} holds a scale that is negative, NaN or infinite")
        elif weight.n_rows == 1 and not weight.is_finite():
            raise FormatError(f"tensor {weight.name} holds NaN or infinity")
