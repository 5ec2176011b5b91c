from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from typing_extensions import Self, disjoint_base

from .atomic_file import PathLike
from .config import ModelConfig
from .engine import Engine
from .generation import Generation
from .pool import PrefixPool
from .pool_client import PoolClient
from .resume_handle import ResumeHandle

_Tokens = npt.NDArray[np.integer[Any]] | Sequence[int] | Sequence[np.integer[Any]] | memoryview

@disjoint_base
class LoadedModel(PoolClient):
    def __init__(
        self,
        path: PathLike,
        max_seq_len: int = 2048,
        *,
        device: str = "auto",
        kv_mode: Literal["fp16", "bf16", "fp32", "int8", "int4", "h"] | None = None,
        threads: int | None = None,
        kv_budget: int | None = None,
    ) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
    @property
    def _engine(self) -> Engine: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def kv_mode(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def kv_nbytes(self) -> int: ...
    @property
    def kv_budget(self) -> int | None: ...
    @property
    def kv_clamped(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def numerics_id(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def _start(
        self,
        prompt: _Tokens,
        max_tokens: int = 128,
        loops: int | None = None,
        temperature: float = 1.0,
        top_k: int = 50,
        cache_window: int = 0,
        *,
        pool: PrefixPool | None = None,
        namespace: str | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        stop_tokens: Iterable[int] | None = None,
        run_prompt: bool = True,
        may_wait: bool = False,
    ) -> Generation: ...
    def _check_open(self, method: str) -> None: ...
    def _depend(self, dependent: PrefixPool | ResumeHandle) -> None: ...
    def _fingerprint(self) -> dict[str, Any]: ...
