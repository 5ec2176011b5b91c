from threading import Lock

from typing_extensions import disjoint_base

from .cuda_device import CudaDevice
from .cuda_stepper import Lane
from .plan import Plan
from .runner import Runner

@disjoint_base
class CudaRunner(Runner):
    def __init__(self, plan: Plan, lock: Lock) -> None: ...
    @property
    def device(self) -> CudaDevice: ...
    @property
    def lock(self) -> Lock: ...
    def check_open(self) -> int: ...
    def take_back(self, lane: Lane) -> None: ...
