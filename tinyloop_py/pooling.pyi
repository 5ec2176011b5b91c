from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .pool import PrefixPool

_Tokens = npt.NDArray[np.integer[Any]] | Sequence[int] | Sequence[np.integer[Any]] | memoryview

class Pooling:
    def generate_with_pool(
        self,
        pool: PrefixPool,
        prompt: _Tokens,
        max_tokens: int = 128,
        loops: int | None = None,
        temperature: float = 1.0,
        top_k: int = 50,
        cache_window: int = 0,
        *,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        stop_tokens: Iterable[int] | None = None,
        namespace: str | None = None,
    ) -> list[int]: ...
    def register_prefix(
        self,
        pool: PrefixPool | None,
        tokens: _Tokens,
        loops: int | None = None,
        cache_window: int = 0,
        *,
        namespace: str | None = None,
        pin: bool = False,
    ) -> int: ...
