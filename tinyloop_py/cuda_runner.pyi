from typing_extensions import disjoint_base

from .cuda_device import CudaDevice
from .cuda_lane import Lane
from .plan import Plan
from .runner import Runner

@disjoint_base
class CudaRunner(Runner):
    def __init__(self, plan: Plan) -> None: ...
    @property
    def device(self) -> CudaDevice: ...
    def take_back(self, lane: Lane) -> None: ...
