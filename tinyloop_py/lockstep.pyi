from typing_extensions import Self, disjoint_base

from .engine import Engine
from .generation import Generation

def step_generations(generations: list[Generation], max_rows: int = 0) -> list[int | None]: ...

@disjoint_base
class StepRows:
    def __new__(cls, engine: Engine) -> Self: ...
