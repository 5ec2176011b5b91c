from typing_extensions import disjoint_base

from .runner import Runner, Stepper
from .sampling import Sampling
from .sequence import Sequence

@disjoint_base
class CudaStepper(Stepper):
    def __init__(self, runner: Runner, seq: Sequence, sampling: Sampling) -> None: ...
    @property
    def seq(self) -> Sequence: ...
