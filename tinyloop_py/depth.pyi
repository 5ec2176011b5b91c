from typing_extensions import Self, disjoint_base

from .engine import Engine
from .kv_prefix import KvPrefix

@disjoint_base
class _Further:
    def __new__(cls, engine: Engine, base: KvPrefix, loops: int) -> Self: ...
