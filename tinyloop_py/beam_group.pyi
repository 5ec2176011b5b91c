from typing_extensions import Self, disjoint_base

from .engine import Engine

@disjoint_base
class BeamGroup:
    def __new__(cls, engine: Engine, n_beams: int) -> Self: ...
