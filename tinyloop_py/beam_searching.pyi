from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .beam import Beam
from .pool import PrefixPool

_Tokens = npt.NDArray[np.integer[Any]] | Sequence[int] | Sequence[np.integer[Any]] | memoryview

class BeamSearching:
    def beam_search(
        self,
        prompt: _Tokens,
        num_beams: int = 4,
        max_tokens: int = 128,
        loops: int | None = None,
        cache_window: int = 0,
        *,
        length_penalty: float = 1.0,
        stop_tokens: Iterable[int] | None = None,
        pool: PrefixPool | None = None,
        namespace: str | None = None,
    ) -> list[Beam]: ...
