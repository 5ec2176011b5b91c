"""Model: the public class, put together from families of methods over a loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .batching import Batching
from .beam_searching import BeamSearching
from .caching import PrefixCaching
from .generating import Generating
from .loaded_model import LoadedModel
from .pooling import Pooling
from .restoring import Restoring
from .resuming import Resuming
from .streaming import Streaming

if TYPE_CHECKING:
    from .atomic_file import PathLike


class Model(Generating, Streaming, Batching, BeamSearching, Pooling, PrefixCaching, Resuming, Restoring, LoadedModel):
    """A looped language model, loaded from a `.tinyloop` file.

    A context manager; `close` frees everything. Several threads may call one model: a step is run at a time.

    Parameters
    ----------
    path : str, bytes or path
        The model file.
    max_seq_len : int
        Most tokens of one sequence, prompt and output.
    device : {"auto", "cpu", "cuda", "cuda:N"}
        "auto" is the first CUDA device, or the CPU where none can be used (docs/cuda.md).
    kv_mode : {"fp16", "bf16", "fp32", "int8", "int4", "h"}, optional
        How keys and values are held (docs/kv-modes.md); None takes it from the environment (`TINYLOOP_KV_H_MODE`,
        `TINYLOOP_KV_INT8`, `TINYLOOP_KV_INT4`), else fp16.
    threads : int, optional
        CPU threads, None for the cores that this process may use. The number never changes a result.
    kv_budget : int, optional
        Bytes of KV pages that may be in use at a time.

    Attributes
    ----------
    config : ModelConfig
        What the model is made of.
    path, device, kv_mode, max_seq_len
        The file, and what was chosen: "cpu" or "cuda:N", the mode, the most tokens of a sequence.
    nbytes : int
        Bytes of the weights.
    chat_template : str or None
        The file's chat template, a Jinja text.
    stop_ids : tuple of int
        The file's stop ids, which `stop_tokens=None` stands for.
    closed : bool
        Whether `close` was called.

    Raises
    ------
    FileNotFoundError, FormatError
        There is no such file, or it is not a sound model file; FormatError is a ValueError.
    TypeError, ValueError, RuntimeError
        An argument is not of its kind, or the device cannot be used.
    """

    __slots__ = ()

    def __init__(
        self,
        path: PathLike,
        max_seq_len: int = 2048,
        *,
        device: str = "auto",
        kv_mode: Literal["fp16", "bf16", "fp32", "int8", "int4", "h"] | None = None,
        threads: int | None = None,
        kv_budget: int | None = None,
    ) -> None:
        super().__init__(path, max_seq_len, device=device, kv_mode=kv_mode, threads=threads, kv_budget=kv_budget)
