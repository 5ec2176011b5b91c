"""The weights of a Hugging Face folder: one safetensors file or several with an index, read piece by piece."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..errors import FormatError
from ..quantize import F32Array, row_blocks
from ..safetensors_header import HeaderEntry, read_header
from ..strict_json import first_of, load_object, shown
from ..weights import WeightTensor
from .source import SourceTensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OWN_TYPE = {"F32": "f32", "F64": "f32", "BF16": "bf16", "F16": "f16"}
_ELEMENT = {"F32": "<f4", "F64": "<f8", "BF16": "<u2", "F16": "<f2"}
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")  # computed from the config


def folder_tensors(folder: str) -> dict[str, FolderTensor]:
    """Every tensor of the folder by the source's name; nothing is read but the headers."""
    index = os.path.join(folder, INDEX)
    if not os.path.exists(index):
        path = os.path.join(folder, SINGLE)
        if not os.path.exists(path):
            raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX} (other weight formats are not read)")
        return {name: _tensor(path, name, entry) for name, entry in _entries(path).items() if not _DERIVED.fullmatch(name)}
    with open(index, "rb") as file:
        places = load_object(file.read(), INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise FormatError(f"{INDEX} has no weight_map")
    for file_name in places.values():
        if not isinstance(file_name, str) or os.path.basename(file_name) != file_name:
            raise FormatError(f"{INDEX} names the file {shown(file_name)}, expected a name in the same folder")
    tensors: dict[str, FolderTensor] = {}
    for file_name in sorted(set(places.values())):
        path = os.path.join(folder, file_name)
        for name, entry in _entries(path).items():
            if name in tensors:
                raise FormatError(f"tensor {shown(name)} is in {file_name} and in another file")
            tensors[name] = _tensor(path, name, entry)
            if places.pop(name, file_name) != file_name:
                raise FormatError(f"tensor {shown(name)} is in {file_name}, {INDEX} puts it elsewhere")
    if places:
        raise FormatError(f"tensor {first_of(list(places))} is missing in the files that {INDEX} names")
    return {name: tensor for name, tensor in tensors.items() if not _DERIVED.fullmatch(name)}


def drop_tied_head(tensors: MutableMapping[str, FolderTensor], head: str, embedding: str) -> None:
    """Remove a stored copy of the embedding that serves as the output head; FormatError where it is no copy."""
    if head not in tensors or embedding not in tensors:
        return
    pairs = zip(tensors[head].blocks(), tensors[embedding].blocks(), strict=False)
    if tensors[head].shape != tensors[embedding].shape or not all(np.array_equal(a, b, equal_nan=True) for a, b in pairs):
        raise FormatError(f"tensor {head} differs from {embedding}, though config.json ties them")
    del tensors[head]


def _entries(path: str) -> dict[str, HeaderEntry]:
    with open(path, "rb") as file:
        try:
            return read_header(file, os.fstat(file.fileno()).st_size)[0]
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from None


@dataclass(frozen=True)
class FolderTensor(SourceTensor):
    """One that lies in a safetensors file."""

    path: str
    entry: HeaderEntry

    def parts(self, rows: Mapping[str, tuple[int, int]], shape: tuple[int, ...]) -> dict[str, SourceTensor]:
        """Its parts under the names in `rows`, each given as (first, n) along the first axis; of more than two axes a part is a vector.

        FormatError where the tensor has another shape than `shape`.
        """
        if self.shape != shape:
            raise FormatError(f"tensor {self.source_name} has shape {list(self.shape)}, the config asks for {list(shape)}")
        n_cols, parts = math.prod(shape[1:]), {}
        for name, (first, n) in rows.items():
            blocks = partial(_read_rows, self.path, self.source_name, self.entry, first, n, n_cols)
            parts[name] = SourceTensor(name, (n, n_cols) if len(shape) == 2 else (n_cols,), self.dtype, self.nbytes * n // shape[0], blocks)
        return parts


def _tensor(path: str, name: str, entry: HeaderEntry) -> FolderTensor:
    if entry.dtype not in _OWN_TYPE:
        raise FormatError(f"tensor {shown(name)} has type {entry.dtype}, supported are {', '.join(_OWN_TYPE)}")
    n_rows, n_cols = (1, *entry.shape)[-2:] if len(entry.shape) in (1, 2) else (0, 0)  # no others are asked for whole
    blocks = partial(_read_rows, path, name, entry, 0, n_rows, n_cols)
    return FolderTensor(name, entry.shape, _OWN_TYPE[entry.dtype], entry.stop - entry.start, blocks, path, entry)


def _read_rows(path: str, name: str, entry: HeaderEntry, first: int, n: int, n_cols: int) -> Iterator[F32Array]:
    """Blocks of the rows first .. first + n - 1 of a tensor that has `n_cols` columns."""
    element = np.dtype(_ELEMENT[entry.dtype])
    with open(path, "rb") as file:
        file.seek(entry.start + first * n_cols * element.itemsize)
        for rows in row_blocks(n, n_cols):
            shape = (rows.stop - rows.start, n_cols)
            values = np.fromfile(file, element, shape[0] * shape[1])
            if values.size != shape[0] * shape[1]:
                raise FormatError(f"{path}: tensor {shown(name)} ends early; the file was changed while it was read")
            if entry.dtype == "BF16":
                yield WeightTensor(name, "bf16", shape, values).to_float32()
            else:
                yield values.astype(np.float32).reshape(shape)
