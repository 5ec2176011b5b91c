from typing_extensions import disjoint_base

from .context import Context
from .cuda_device import CudaDevice
from .library import Library

@disjoint_base
class CudaContext(Context):
    def __init__(self, library: Library, device: int = 0) -> None: ...
    @property
    def device(self) -> CudaDevice: ...
