from .cuda_device import CudaDevice
from .memory import AddressRange, Buffer

class DeviceBuffer(Buffer):
    def __init__(self, device: CudaDevice, nbytes: int, what: str = "a buffer") -> None: ...

class PinnedBuffer(Buffer):
    def __init__(self, device: CudaDevice, nbytes: int, what: str = "a staging buffer") -> None: ...

class DeviceRange(AddressRange):
    def __init__(self, device: CudaDevice, nbytes: int) -> None: ...
