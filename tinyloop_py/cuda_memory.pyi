from typing_extensions import Self, disjoint_base

from .cuda_device import CudaDevice
from .memory import AddressRange, Buffer

@disjoint_base
class DeviceBuffer(Buffer):
    def __new__(cls, device: CudaDevice, nbytes: int, what: str = "a buffer") -> Self: ...

@disjoint_base
class PinnedBuffer(Buffer):
    def __new__(cls, device: CudaDevice, nbytes: int, what: str = "a staging buffer") -> Self: ...

@disjoint_base
class DeviceRange(AddressRange):
    def __new__(cls, device: CudaDevice, nbytes: int) -> Self: ...
