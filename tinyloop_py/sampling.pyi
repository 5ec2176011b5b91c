from collections.abc import Iterable, Mapping

from typing_extensions import disjoint_base

@disjoint_base
class Sampling:
    def __init__(
        self,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        logit_bias: Mapping[int, float] | None,
        seed: int | None,
        stop_tokens: Iterable[int],
        vocab_size: int,
    ) -> None: ...
    @property
    def seed(self) -> int: ...
    @property
    def stop_tokens(self) -> frozenset[int]: ...
