from typing_extensions import disjoint_base

from .runner import Runner, Stepper
from .sampling import Sampling

@disjoint_base
class Lane:
    def __init__(self, runner: Runner, loops: int, window: int) -> None: ...
    @property
    def loops(self) -> int: ...
    @property
    def window(self) -> int: ...

@disjoint_base
class CudaStepper(Stepper):
    def __init__(self, runner: Runner, lane: Lane) -> None: ...
    @staticmethod
    def takes(sampling: Sampling) -> bool: ...
