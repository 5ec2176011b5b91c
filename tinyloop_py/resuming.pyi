from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .pool import PrefixPool
from .resume_handle import ResumeHandle

_Tokens = npt.NDArray[np.integer[Any]] | Sequence[int] | Sequence[np.integer[Any]] | memoryview

class Resuming:
    def build_resume_handle(
        self, prompt: _Tokens, loops: int | None = None, cache_window: int = 0, *, pool: PrefixPool | None = None, namespace: str | None = None
    ) -> ResumeHandle: ...
    def resume_generate(
        self,
        handle: ResumeHandle,
        loops: int | None = None,
        max_tokens: int = 128,
        temperature: float = 1.0,
        top_k: int = 50,
        *,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        stop_tokens: Iterable[int] | None = None,
    ) -> list[int]: ...
