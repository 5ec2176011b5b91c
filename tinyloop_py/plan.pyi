from typing import Final

from typing_extensions import disjoint_base

from .config import ModelConfig
from .context import Context
from .packing import Weights
from .pages import KvStore

BLOCK_NORMS: Final[dict[str, int]]
ACTIVATIONS: Final[dict[str, int]]
STATE_INITS: Final[dict[str, int]]
KV_TYPES: Final[dict[str, int]]
QK_NORMS: Final[dict[str, int]]
PARTS: Final[tuple[tuple[str, int], ...]]

@disjoint_base
class Plan:
    def __init__(
        self,
        context: Context,
        config: ModelConfig,
        weights: Weights,
        kv_dtype: str,
        max_rows: int,
        max_out: int,
        max_pos: int,
        kv_budget: int | None = None,
        keep_operands: bool = False,
    ) -> None: ...
    @property
    def context(self) -> Context: ...
    @property
    def store(self) -> KvStore: ...
    @property
    def weights(self) -> Weights: ...
    @property
    def keeps_operands(self) -> bool: ...
    @property
    def scratch_nbytes(self) -> int: ...
    @property
    def n_clamped(self) -> int: ...
    def close(self) -> None: ...
