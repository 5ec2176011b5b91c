from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .pool import PrefixPool

_Tokens = npt.NDArray[np.integer[Any]] | Sequence[int] | Sequence[np.integer[Any]] | memoryview

class Batching:
    def generate_batch(
        self,
        prompts: Iterable[_Tokens],
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
        seed: int | Sequence[int | None] | None = None,
        stop_tokens: Iterable[int] | None = None,
        pool: PrefixPool | None = None,
        namespace: str | None = None,
    ) -> list[list[int]]: ...
