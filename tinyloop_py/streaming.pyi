from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .pool import PrefixPool
from .text_stream import TextStream
from .token_stream import TokenStream

_Tokens = npt.NDArray[np.integer[Any]] | Sequence[int] | Sequence[np.integer[Any]] | memoryview

class Streaming:
    def generate_stream(
        self,
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
        pool: PrefixPool | None = None,
        namespace: str | None = None,
        logprobs: int = 0,
    ) -> TokenStream: ...
    def stream_text(
        self,
        prompt: str | _Tokens,
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
        pool: PrefixPool | None = None,
        namespace: str | None = None,
        logprobs: int = 0,
        stop: str | Iterable[str] | None = None,
        skip_special_tokens: bool = True,
    ) -> TextStream: ...
