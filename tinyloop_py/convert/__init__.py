"""Conversion of Hugging Face folders and GGUF files to `.tinyloop` files, a few rows of one tensor at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..atomic_file import PathLike
from ..config import ModelConfig
from ..errors import FormatError
from ..file_metadata import FORMAT
from ..layout import matrix_shapes
from ..model_writer import ModelWriter
from ..quantize import F32Array
from ..safetensors_header import read_header
from .gguf_file import is_gguf
from .gguf_model import open_gguf
from .huggingface import open_folder
from .source import Source, SourceTensor

Progress = Callable[[int, int, str], None]  # source bytes done, source bytes in all, the tensor at hand


def convert(
    src: PathLike, dst: PathLike, *, dtype: str | None = None, group_size: int | None = None,
    loops: int | None = None, max_loops: int | None = None, tokenizer: bool = True, progress: Progress | None = None,
) -> ModelConfig:  # fmt: skip
    """Convert a Hugging Face folder or a GGUF file; an existing `.tinyloop` file is replaced, when the new one is complete.

    Parameters
    ----------
    dtype
        "f32", "bf16", "f16" or "int8" for the matrices; None: the source's own (bf16 where that is quantised).
    group_size
        With int8: columns that share a scale, a multiple of 64; None: one scale a row.
    loops, max_loops
        Default depth and greatest depth to record; a plain model has 1 and 1, a looped one the depth of its training and four times as much.
    tokenizer
        False: convert without tokenizer and chat template.

    Raises
    ------
    FormatError
        The source is damaged, or of an architecture or with a field that is not supported; it is named.
    FileNotFoundError, OSError
        A file or folder is missing, or the disk is full; nothing is left behind.
    """
    source = open_source(os.fsdecode(src), tokenizer)
    config = with_depth(source.config, loops, max_loops)
    check_target(os.fsdecode(dst))
    dtypes = {name: dtype or source.tensors[name].dtype for name in matrix_shapes(config)}
    counted = _Counter(sum(tensor.nbytes for tensor in source.tensors.values()), progress or (lambda done, total, name: None))
    with ModelWriter(
        dst, config, dtypes, group_size=group_size, tokenizer=source.tokenizer_json, chat_template=source.chat_template, stop_ids=source.stop_ids
    ) as writer:
        for name in writer.names:
            writer.write_blocks(name, counted.blocks(name, source.tensors[name]))
    return config


def open_source(src: str, with_tokenizer: bool = True) -> Source:
    """The source of a path, by what lies there."""
    if os.path.isdir(src):
        return open_folder(src, with_tokenizer)
    if is_gguf(src):
        return open_gguf(src, with_tokenizer)
    if not os.path.exists(src):
        raise FileNotFoundError(f"{src} does not exist")
    raise FormatError(f"{src} is neither a Hugging Face folder nor a GGUF file")


def with_depth(config: ModelConfig, loops: int | None, max_loops: int | None) -> ModelConfig:
    """The config with another default and greatest depth; what the model was trained at stays."""
    default = config.default_loops if loops is None else loops
    if max_loops is None:
        max_loops = max(config.max_loops or 1, default)
    return replace(config, default_loops=default, max_loops=max_loops)


def check_target(dst: str) -> None:
    """FormatError where `dst` is a file that is not tinyloop's: it is not ours to replace."""
    if dst.endswith(".tinyloop") or not os.path.isfile(dst):
        return
    try:
        with open(dst, "rb") as file:
            ours = read_header(file, os.fstat(file.fileno()).st_size)[1].get("format") == FORMAT
    except FormatError:
        ours = False
    if not ours:
        raise FormatError(f"{dst} exists and is no .tinyloop file; choose another name or remove it")


class _Counter:
    """Reports how much of the source is done as its blocks pass."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def blocks(self, name: str, tensor: SourceTensor) -> Iterator[F32Array]:
        n_values = math.prod(tensor.shape)
        start = self._done
        seen = 0
        for block in tensor.blocks():
            yield block
            seen += block.size
            self._done = start + tensor.nbytes * seen // n_values
            self._progress(self._done, self._total, name)
