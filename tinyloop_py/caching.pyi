from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .prefix_cache import PrefixCache
from .token_stream import TokenStream

_Tokens = npt.NDArray[np.integer[Any]] | Sequence[int] | Sequence[np.integer[Any]] | memoryview

class PrefixCaching:
    def build_prefix_cache(self, tokens: _Tokens, loops: int | None = None, cache_window: int = 0) -> PrefixCache: ...
    def generate_from_prefix_cache(
        self,
        cache: PrefixCache,
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
        suffix: _Tokens | None = None,
    ) -> list[int]: ...
    def stream_from_prefix_cache(
        self,
        cache: PrefixCache,
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
        suffix: _Tokens | None = None,
        logprobs: int = 0,
    ) -> TokenStream: ...
