from typing_extensions import Self, disjoint_base

from .plan import Plan

@disjoint_base
class StepGraphs:
    def __new__(cls, plan: Plan) -> Self: ...
    def drop(self, key: tuple[int, int, int, bool, bool]) -> None: ...
