"""What a converter reads: a config, tensors under tinyloop's names that are loaded piece by piece, and the text side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..config import ModelConfig
from ..errors import FormatError
from ..layout import tensor_shapes
from ..quantize import F32Array
from ..strict_json import first_of


@dataclass(frozen=True)
class SourceTensor:
    """One weight of the source."""

    source_name: str
    shape: tuple[int, ...]
    dtype: str  # the type it is stored in where none is asked for
    nbytes: int  # in the source, for the progress bar
    blocks: Callable[[], Iterator[F32Array]]  # float32 blocks of consecutive rows (n, n_in); a vector is one row


@dataclass(frozen=True)
class Source:
    """A model to convert."""

    config: ModelConfig
    tensors: Mapping[str, SourceTensor]
    tokenizer_json: str | None = None
    chat_template: str | None = None
    stop_ids: tuple[int, ...] = ()


def pick_tensors(config: ModelConfig, found: Mapping[str, SourceTensor], source_name: Callable[[str], str]) -> dict[str, SourceTensor]:
    """The source's tensors under tinyloop's names; FormatError names one that is missing, left over or of another shape."""
    shapes = tensor_shapes(config)
    names = {name: source_name(name) for name in shapes}
    if missing := [theirs for theirs in names.values() if theirs not in found]:
        raise FormatError(f"tensor {first_of(missing)} is missing")
    wanted = set(names.values())
    if extra := [theirs for theirs in found if theirs not in wanted]:
        raise FormatError(f"tensor {first_of(extra)} has no place in the model that the config describes")
    picked = {name: found[theirs] for name, theirs in names.items()}
    for name, tensor in picked.items():
        if tensor.shape != shapes[name]:
            raise FormatError(f"tensor {tensor.source_name} has shape {list(tensor.shape)}, the config asks for {list(shapes[name])}")
    return picked
