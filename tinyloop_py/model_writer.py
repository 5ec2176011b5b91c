"""Writing `.tinyloop` files: `ModelWriter` tensor by tensor, `save_model` in one call."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .atomic_file import AtomicFile, PathLike
from .config import ModelConfig
from .errors import FormatError
from .file_metadata import HEADER_CRC32, FileMetadata, check_stop_ids, crc_text, header_crc32, to_text_map
from .layout import SCALE_SUFFIX, matrix_shapes, scale_shapes, tensor_shapes
from .model_file import check_fused
from .quantize import F32Array, check_group_size, quantize_rows, row_blocks
from .safetensors_header import HeaderEntry, header_bytes
from .strict_json import first_of, shown
from .tokenizer_json import tokenizer_text
from .weights import STORED, WeightTensor, float_bits, stored_nbytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ModelWriter:
    """Writes a `.tinyloop` file one weight at a time, in any order, in the memory of some rows.

    The file appears under its name on `close`, complete, or not at all: leaving the ``with`` block by an exception, or
    `abort`, removes what was written, and a file that was there before stays.

    Parameters
    ----------
    dtypes
        Type of every matrix, by name, or one for all: "f32", "bf16", "f16" or "int8". Vectors (norms, biases, the
        exit gate) are always float32.
    group_size
        Columns that share an int8 scale, a multiple of 64; None: one scale a row.
    tokenizer
        A `tokenizers.Tokenizer` or its JSON.
    """

    def __init__(
        self, path: PathLike, config: ModelConfig, dtypes: Mapping[str, str] | str, *, group_size: int | None = None,
        tokenizer: Tokenizer | str | None = None, chat_template: str | None = None, stop_ids: Sequence[int] = (),
    ) -> None:  # fmt: skip
        _check_text_arguments(config, chat_template)
        self.config = config
        self._shapes = tensor_shapes(config)
        self._dtypes = _stored_types(config, dtypes)
        self._group_size = _checked_group_size(group_size, self._dtypes)
        text = None if tokenizer is None else tokenizer_text(tokenizer, config.vocab_size)
        self._meta = FileMetadata(config, text, chat_template, check_stop_ids(_stop_id_list(stop_ids), config), self._group_size)
        self._places = self._plan()
        self._crc32 = dict.fromkeys(self._places, 0)
        self._written: set[str] = set()
        self._closed = False
        head, self._data_start = self._header()
        self._file = AtomicFile(path, self._data_start + sum(stop - start for _, _, start, stop in self._places.values()))
        assert len(head) == self._data_start

    @property
    def names(self) -> tuple[str, ...]:
        """Every weight to write, in layout order."""
        return tuple(self._shapes)

    def write(self, name: str, value: npt.ArrayLike | WeightTensor) -> None:
        """Store a weight: an array (see `WeightTensor.of`) or a `WeightTensor`. One of the stored type (and groups) is copied."""
        weight = value if isinstance(value, WeightTensor) else WeightTensor.of(value, name)
        self._check_shape(name, weight.shape)
        if weight.dtype == "int8" and self._dtypes[name] == "int8" and weight.group_size == self._group_size:
            assert weight.scales is not None
            self._begin(name)
            self._put(name, 0, weight.data)
            self._put(name + SCALE_SUFFIX, 0, weight.scales)
            return
        if weight.dtype != "int8" and weight.dtype == self._dtypes[name]:
            self._begin(name)
            self._copy(name, weight)
            return
        self.write_blocks(name, (weight.rows_float32(rows) for rows in row_blocks(weight.n_rows, weight.shape[-1])))

    def write_blocks(self, name: str, blocks: Iterable[F32Array]) -> None:
        """Store a weight from float32 blocks of consecutive rows ``(n, n_in)``; a vector is one row."""
        shape = self._shape(name)
        self._begin(name)
        n_rows = shape[0] if len(shape) > 1 else 1
        row = 0
        for block in blocks:
            if block.ndim != 2 or block.shape[1] != shape[-1] or row + block.shape[0] > n_rows:
                raise FormatError(f"tensor {name}: rows of shape {list(block.shape)} after row {row}, expected {list(shape)} in all")
            self._put_rows(name, row, block)
            row += block.shape[0]
        if row != n_rows:
            raise FormatError(f"tensor {name}: {row} rows, expected {n_rows}")

    def close(self) -> None:
        """Complete the file and give it its name (once); FormatError names a weight that was not written."""
        if self._closed:
            return
        if missing := [name for name in self._shapes if name not in self._written]:
            self.abort()
            raise FormatError(f"tensor {first_of(missing)} is missing")
        try:
            self._meta = replace(self._meta, tensor_crc32={name: crc_text(crc) for name, crc in self._crc32.items()})
            head, data_start = self._header()
            assert data_start == self._data_start
            self._file.write(0, head)
            self._file.commit()
            self._closed = True
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove what was written; nothing happens after `close`."""
        self._closed = True
        self._file.abort()

    def __enter__(self) -> ModelWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _plan(self) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
        """Stored tensor -> (header type, shape, start, stop): wide elements first, so that every tensor is aligned."""
        stored: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, dtype in self._dtypes.items():
            stored[name] = (dtype, self._shapes[name])
            if dtype == "int8":
                scale_name, shape = scale_shapes(name, self._shapes[name], self._group_size)
                stored[scale_name] = ("f32", shape)
        places: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        end = 0
        for name, (dtype, shape) in sorted(stored.items(), key=lambda item: -STORED[item[1][0]][1].itemsize):
            start, end = end, end + stored_nbytes(dtype, shape)
            places[name] = (STORED[dtype][0], shape, start, end)
        return places

    def _header(self) -> tuple[bytes, int]:
        sums = self._meta.tensor_crc32 or dict.fromkeys(self._places, crc_text(0))
        text = to_text_map(replace(self._meta, tensor_crc32=sums))
        entries = {name: HeaderEntry(*place) for name, place in self._places.items()}
        text[HEADER_CRC32] = header_crc32(entries, text, 0)
        head = header_bytes(self._places, text)
        return head, len(head)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise FormatError(f"tensor {shown(name)} does not belong to a model of this config")
        return self._shapes[name]

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if shape != self._shape(name):
            raise FormatError(f"tensor {name} has shape {list(shape)}, the config asks for {list(self._shape(name))}")

    def _begin(self, name: str) -> None:
        if name in self._written:
            raise ValueError(f"tensor {name} was written already")
        self._written.add(name)

    def _copy(self, name: str, weight: WeightTensor) -> None:
        """The bits of a float weight, which must be finite."""
        data = weight.data.reshape(weight.n_rows, -1)
        for rows in row_blocks(*data.shape):
            values = data[rows]
            if not ((values & 0x7F80) != 0x7F80).all() if weight.dtype == "bf16" else not np.isfinite(values).all():
                raise FormatError(f"tensor {name} holds NaN or infinity")
            self._put(name, rows.start * data.shape[1], values)

    def _put_rows(self, name: str, row: int, block: F32Array) -> None:
        dtype = self._dtypes[name]
        if not np.isfinite(block).all():
            raise FormatError(f"tensor {name} holds NaN or infinity")
        if dtype == "int8":
            values, scales = quantize_rows(block, self._group_size)
            self._put(name, row * block.shape[1], values)
            self._put(name + SCALE_SUFFIX, row * scales[:1].size, scales)
            return
        values = float_bits(block, dtype)
        if dtype == "f16" and not np.isfinite(values).all():
            raise FormatError(f"tensor {name} reaches {np.abs(block).max():g}, beyond float16's 65504; use bf16 or f32")
        if dtype == "bf16" and ((values & 0x7F80) == 0x7F80).any():
            raise FormatError(f"tensor {name} reaches {np.abs(block).max():g}, beyond what bfloat16 holds")
        self._put(name, row * block.shape[1], values)

    def _put(self, stored_name: str, element: int, values: npt.NDArray[Any]) -> None:
        start = self._data_start + self._places[stored_name][2]
        self._file.write(start + element * values.itemsize, values)
        self._crc32[stored_name] = zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, self._crc32[stored_name])


def save_model(
    path: PathLike, config: ModelConfig, tensors: Mapping[str, npt.ArrayLike | WeightTensor],
    tokenizer: Tokenizer | str | None = None, *,
    chat_template: str | None = None, stop_ids: Sequence[int] = (), dtype: str | None = None, group_size: int | None = None,
) -> None:  # fmt: skip
    """Write a model file, over an existing one if need be; that one stays as it was if anything fails.

    Parameters
    ----------
    tensors
        Every tensor of `layout.tensor_shapes(config)` by name: arrays of float32, float16, float64, ml_dtypes'
        bfloat16, or `WeightTensor` (``WeightTensor.bf16(bits)`` for bfloat16 bits; those of a `ModelFile` are copied).
    dtype
        Type of the matrices, "f32", "bf16", "f16" or "int8"; None keeps each as it is. Vectors are stored in float32.
    group_size
        With int8: columns that share a scale, a multiple of 64; None: one scale a row.

    Raises
    ------
    FormatError
        A tensor is missing, extra, not finite or of another shape, a stop id is outside the vocabulary; it is named.
    """
    _check_text_arguments(config, chat_template)
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must map names to arrays, got {type(tensors).__name__}")
    if not isinstance(dtype, str | None):
        raise TypeError(f"dtype must be one of {', '.join(STORED)}, or None, got {type(dtype).__name__}")
    expected = tensor_shapes(config)
    if missing := [name for name in expected if name not in tensors]:
        raise FormatError(f"tensor {first_of(missing)} is missing")
    if extra := [name for name in tensors if name not in expected]:
        raise FormatError(f"tensor {first_of(extra)} does not belong to a model of this config")
    dtypes: Mapping[str, str] | str
    if dtype is None:
        weights = {name: _as_weight(name, tensors[name]) for name in matrix_shapes(config)}
        dtypes = {name: weight.dtype for name, weight in weights.items()}
        group_size = _common_group_size(weights.values(), group_size)
    else:
        dtypes = dtype
    with ModelWriter(path, config, dtypes, group_size=group_size, tokenizer=tokenizer, chat_template=chat_template, stop_ids=stop_ids) as writer:
        for name in writer.names:
            writer.write(name, tensors[name])


def _check_text_arguments(config: ModelConfig, chat_template: str | None) -> None:
    if not isinstance(config, ModelConfig):
        raise TypeError(f"config must be a ModelConfig, got {type(config).__name__}")
    if not isinstance(chat_template, str | None):
        raise TypeError(f"chat_template must be a str or None, got {type(chat_template).__name__}")


def _stop_id_list(stop_ids: Iterable[int]) -> list[int]:
    if isinstance(stop_ids, str | bytes | Mapping) or not isinstance(stop_ids, Iterable):
        raise TypeError(f"stop_ids must be a sequence of token ids, got {type(stop_ids).__name__}")
    ids = []
    for i, stop_id in enumerate(stop_ids):
        if isinstance(stop_id, bool | np.bool_) or not hasattr(stop_id, "__index__"):
            raise TypeError(f"stop_ids[{i}] must be an int, got {type(stop_id).__name__}")
        ids.append(operator.index(stop_id))
    return ids


def _as_weight(name: str, value: npt.ArrayLike | WeightTensor) -> WeightTensor:
    return value if isinstance(value, WeightTensor) else WeightTensor.of(value, name)


def _common_group_size(weights: Iterable[WeightTensor], group_size: int | None) -> int | None:
    sizes = {weight.group_size for weight in weights if weight.dtype == "int8"}
    if group_size is None and len(sizes) > 1:
        raise ValueError(f"int8 tensors of group sizes {', '.join(map(str, sizes))}: a file has one; choose it with group_size")
    return next(iter(sizes), None) if group_size is None else group_size


def _stored_types(config: ModelConfig, dtypes: Mapping[str, str] | str) -> dict[str, str]:
    """Name -> type of every weight, in layout order."""
    matrices = matrix_shapes(config)
    chosen = {name: dtypes if isinstance(dtypes, str) else dtypes[name] for name in matrices}
    for name, dtype in chosen.items():
        if dtype not in STORED:
            raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(STORED)}" + ("" if isinstance(dtypes, str) else f" (tensor {name})"))
    check_fused(config, chosen)
    return {name: chosen.get(name, "f32") for name in tensor_shapes(config)}


def _checked_group_size(group_size: int | None, dtypes: Mapping[str, str]) -> int | None:
    check_group_size(group_size)
    if group_size is not None and "int8" not in dtypes.values():
        raise ValueError(f"group_size = {group_size} needs dtype int8")
    return group_size
