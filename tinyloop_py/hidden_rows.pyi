from typing import final

from typing_extensions import Self

from .context import Context
from .memory import Buffer
from .pages import KvStore

@final
class HiddenRows:
    def __new__(cls, context: Context, store: KvStore, n_tokens: int, dim: int, with_e: bool = False, e: Buffer | None = None) -> Self: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def x(self) -> Buffer: ...
    @property
    def e(self) -> Buffer | None: ...
    @property
    def nbytes(self) -> int: ...
