"""cuda.bindings, in this one module: a device with its stream, memory, events and graphs.

Every method raises what a failing call stands for: OutOfMemoryError with what was asked and what is free, else BackendError.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .errors import BackendError, OutOfMemoryError

OUT_OF_MEMORY = 2  # of cudaError_t and CUresult alike
NOT_READY = 600
NO_DRIVER, NO_DEVICE, NOT_INITIALIZED = 35, 100, 3
STICKY = (700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721)  # after these the process's context is of no more use


DRIVER_FILES = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")


class NoDeviceError(RuntimeError):
    """There is no NVIDIA driver, or it sees no device."""


def gpu_is_there() -> bool:
    """Whether an NVIDIA driver has a GPU that is not hidden from this process, as far as files tell: for who cannot ask the driver."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() in ("", "-1")
    return not hidden and any(os.path.exists(path) for path in DRIVER_FILES)


def import_bindings() -> tuple[Any, Any]:
    """cuda.bindings' driver and runtime, or a RuntimeError that says what to install."""
    try:
        from cuda.bindings import driver, runtime
    except ImportError as error:
        raise RuntimeError(f"cuda-python does not import ({error}): install it with pip install cuda-python") from None
    return driver, runtime


class CudaDevice:
    """One device, and a stream that all of a model's work goes through in order.

    Parameters
    ----------
    ordinal
        Of the device, from 0.

    Raises
    ------
    RuntimeError
        The driver is too old or does not start, or there is no such device; NoDeviceError where there is no driver or no device at all.
    """

    def __init__(self, ordinal: int) -> None:
        self.driver, self.runtime = import_bindings()
        self.ordinal = ordinal
        self._pid = os.getpid()
        try:
            status, n_devices = self.runtime.cudaGetDeviceCount()
        except RuntimeError as error:  # the driver's library is missing
            raise NoDeviceError(f"no NVIDIA driver answers: {error}") from None
        if int(status):
            raise self._why_unusable(status)
        if not 0 <= ordinal < n_devices:
            raise RuntimeError(f"there is no CUDA device {ordinal}: this machine has {n_devices}")
        self.use()
        r = self.runtime
        self.stream = int(self.check(r.cudaStreamCreateWithFlags(r.cudaStreamNonBlocking), "making a stream"))
        self._recorder = 0  # the stream that graphs are recorded on, once there is one
        self._granularity = 0

    def _why_unusable(self, status: Any) -> RuntimeError:
        """The error for a driver that is missing or too old, or that does not start."""
        if int(status) == NO_DRIVER:
            _, version = self.runtime.cudaDriverGetVersion()
            if not version:
                return NoDeviceError("no NVIDIA driver is installed")
            supported = f"CUDA {version // 1000}.{version % 1000 // 10}"
            return RuntimeError(f"the NVIDIA driver is too old for this cuda-python: it supports {supported}; update it")
        if int(status) == NO_DEVICE:
            return NoDeviceError("the NVIDIA driver sees no device")
        return RuntimeError(f"the NVIDIA driver answers {self._text(status)}{self._hint(status)}")

    def _hint(self, status: Any) -> str:
        """What a status stands for beyond its own text."""
        if int(status) == NOT_INITIALIZED:
            return "; after a fork the child cannot use what its parent has started: start it by spawn, or before the parent opens a model"
        return "; the device's state is lost for this process: start a new one" if int(status) in STICKY else ""

    def _text(self, status: Any) -> str:
        name = getattr(status, "name", str(status))
        _, text = self.runtime.cudaGetErrorString(status) if name.startswith("cuda") else self.driver.cuGetErrorString(status)
        return f"{name} ({text.decode() if isinstance(text, bytes) else text})"

    def check(self, result: tuple[Any, ...], doing: str, asked: int | None = None) -> Any:
        """The value of a call of cuda.bindings, or the error that its status stands for; `asked` is in bytes."""
        status, *values = result
        if int(status):
            if int(status) == OUT_OF_MEMORY:
                self.runtime.cudaGetLastError()
                raise self.out_of_memory(doing, asked)
            raise BackendError(f"CUDA failed at {doing}: {self._text(status)}{self._hint(status)}")
        return values[0] if len(values) == 1 else tuple(values)

    def out_of_memory(self, what: str, asked: int | None) -> OutOfMemoryError:
        """The error for device memory that is not there."""
        free = self.free_nbytes()
        wants = f"{what} needs more memory than there is" if asked is None else f"{what} needs {asked:,} bytes of device memory"
        return OutOfMemoryError(f"out of memory: {wants}" + ("" if free is None else f"; the device has {free:,} bytes free"))

    def address(self, name: str) -> int:
        """Where a function of the driver lies, for calls without Python; their statuses go to `check_status`."""
        found = self.driver.cuGetProcAddress(name.encode(), 12000, 0)
        return int(self.check(found, f"looking for the driver's {name}")[0])

    def check_status(self, status: int, doing: str) -> None:
        """Raises what the status of a function of `address` stands for, where it is a failure."""
        self.check((self.driver.CUresult(status),), doing)

    def use(self) -> None:
        """Makes the device this thread's: before calls that name neither stream nor device."""
        self.check(self.runtime.cudaSetDevice(self.ordinal), "choosing the device")

    @property
    def is_own(self) -> bool:
        """Whether this process may give back what it holds: not a forked child, nor an interpreter that goes down, modules first."""
        return os.getpid() == self._pid and not sys.is_finalizing()

    def free_nbytes(self) -> int | None:
        """Bytes of device memory that are free, or None where the driver does not say."""
        status, free, _ = self.runtime.cudaMemGetInfo()
        return None if int(status) else int(free)

    def total_nbytes(self) -> int:
        """Bytes of device memory, 0 where the driver does not say."""
        status, _, total = self.runtime.cudaMemGetInfo()
        return 0 if int(status) else int(total)

    def close(self) -> None:
        """Waits for the work and gives the stream back. Idempotent."""
        if self.stream and self.is_own:
            self.runtime.cudaStreamSynchronize(self.stream)
            self.runtime.cudaStreamDestroy(self.stream)
            if self._recorder:
                self.runtime.cudaStreamDestroy(self._recorder)
        self.stream = self._recorder = 0

    # ---- memory

    def malloc(self, nbytes: int, what: str) -> int:
        """Zeroed device memory."""
        self.use()
        pointer = int(self.check(self.runtime.cudaMalloc(nbytes), what, nbytes))
        self.zero(pointer, nbytes)
        return pointer

    def free(self, pointer: int) -> None:
        """Gives memory of `malloc` back, after the work that may use it. Never raises."""
        if self.is_own:
            self.runtime.cudaFree(pointer)

    def pin(self, nbytes: int, what: str) -> int:
        """Host memory that the device can read and write at the same address."""
        self.use()
        r = self.runtime
        return int(self.check(r.cudaHostAlloc(nbytes, r.cudaHostAllocPortable | r.cudaHostAllocMapped), what, nbytes))

    def unpin(self, pointer: int) -> None:
        """Gives memory of `pin` back. Never raises."""
        if self.is_own:
            self.runtime.cudaFreeHost(pointer)

    def zero(self, pointer: int, nbytes: int) -> None:
        """Enqueues clearing device memory."""
        self.check(self.runtime.cudaMemsetAsync(pointer, 0, nbytes, self.stream), "clearing memory")

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Enqueues a copy between any two places; host memory that is not pinned is read before this returns."""
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyDefault
        self.check(self.runtime.cudaMemcpyAsync(to, source, nbytes, kind, self.stream), "copying")

    def copy_rows(self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, n_rows: int) -> None:
        """Enqueues a copy of `n_rows` pieces of `width` bytes that lie a pitch apart."""
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyDefault
        self.check(self.runtime.cudaMemcpy2DAsync(to, to_pitch, source, source_pitch, width, n_rows, kind, self.stream), "copying")

    # ---- order

    def wait(self, doing: str) -> None:
        """Waits for all that is enqueued; the error names what was being done."""
        self.check(self.runtime.cudaStreamSynchronize(self.stream), doing)

    def is_idle(self, doing: str) -> bool:
        """Whether all that is enqueued is done."""
        (status,) = self.runtime.cudaStreamQuery(self.stream)
        if int(status) == NOT_READY:
            return False
        self.check((status,), doing)
        return True

    def make_event(self) -> Any:
        """An event without timing."""
        return self.check(self.runtime.cudaEventCreateWithFlags(self.runtime.cudaEventDisableTiming), "making an event")

    def record(self, event: Any) -> None:
        """Marks this place in the stream."""
        self.check(self.runtime.cudaEventRecord(event, self.stream), "recording an event")

    def wait_for(self, event: Any) -> None:
        """Waits until the stream has passed an event; one never recorded is passed."""
        self.check(self.runtime.cudaEventSynchronize(event), "waiting for a copy")

    def drop_event(self, event: Any) -> None:
        """Gives an event back. Never raises."""
        if self.is_own:
            self.runtime.cudaEventDestroy(event)

    # ---- graphs

    def begin_graph(self) -> int:
        """A stream that records what is enqueued on it instead of running it; what other threads enqueue elsewhere runs."""
        r = self.runtime
        if not self._recorder:
            self.use()
            self._recorder = int(self.check(r.cudaStreamCreateWithFlags(r.cudaStreamNonBlocking), "making a stream"))
        mode = r.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.check(r.cudaStreamBeginCapture(self._recorder, mode), "beginning a graph")
        return self._recorder

    def end_graph(self) -> int:
        """The recorded work, ready to be launched: what the function at `address("cuGraphLaunch")` takes."""
        graph = self.check(self.runtime.cudaStreamEndCapture(self._recorder), "recording a graph")
        try:
            return int(self.check(self.runtime.cudaGraphInstantiate(graph, 0), "making a graph"))
        finally:
            self.runtime.cudaGraphDestroy(graph)

    def abandon_graph(self) -> None:
        """Ends a recording that failed."""
        status, graph = self.runtime.cudaStreamEndCapture(self._recorder)
        if not int(status) and graph:
            self.runtime.cudaGraphDestroy(graph)
        self.runtime.cudaGetLastError()

    def drop_graph(self, graph: int) -> None:
        """Gives a graph back. Never raises."""
        if self.is_own:
            self.runtime.cudaGraphExecDestroy(graph)

    # ---- address ranges

    def _physical(self) -> Any:
        """What a piece of physical memory of this device is asked for with."""
        d = self.driver
        prop = d.CUmemAllocationProp()
        prop.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self.ordinal
        return prop

    @property
    def granularity(self) -> int:
        """Bytes that physical memory is mapped by."""
        if not self._granularity:
            self.use()
            option = self.driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            self._granularity = int(self.check(self.driver.cuMemGetAllocationGranularity(self._physical(), option), "asking for the granularity"))
        return self._granularity

    def reserve_addresses(self, nbytes: int) -> int:
        """Address space without memory, a multiple of the granularity."""
        self.use()
        return int(self.check(self.driver.cuMemAddressReserve(nbytes, 0, 0, 0), "the address space for KV pages", nbytes))

    def release_addresses(self, pointer: int, nbytes: int) -> None:
        """Gives address space back. Never raises."""
        if self.is_own:
            self.driver.cuMemAddressFree(pointer, nbytes)

    def map_memory(self, pointer: int, nbytes: int) -> None:
        """Puts zeroed physical memory behind reserved addresses."""
        self.use()
        d = self.driver
        handle = self.check(d.cuMemCreate(nbytes, self._physical(), 0), "the KV cache", nbytes)
        try:
            self.check(d.cuMemMap(pointer, nbytes, 0, handle, 0), "mapping KV pages", nbytes)
        finally:
            d.cuMemRelease(handle)  # the mapping keeps it
        try:
            access = d.CUmemAccessDesc()
            access.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = self.ordinal
            access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self.check(d.cuMemSetAccess(pointer, nbytes, [access], 1), "mapping KV pages", nbytes)
            self.zero(pointer, nbytes)
        except BaseException:
            d.cuMemUnmap(pointer, nbytes)
            raise

    def unmap_memory(self, pointer: int, nbytes: int) -> None:
        """Gives the memory behind addresses back, after all work that may use it. Never raises."""
        if self.is_own:
            self.runtime.cudaStreamSynchronize(self.stream)
            self.driver.cuMemUnmap(pointer, nbytes)
