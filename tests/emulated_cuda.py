"""The CUDA backend where no GPU is: the kernels on the emulator of tests/cuda_emulator, and a stand-in for cuda.bindings.

Device memory is host memory, work is done when it is enqueued, and a graph is a list of launches. What is not mapped cannot
be read, freed memory is poisoned, and what is never freed can be asked for.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEVICE_NBYTES = 1 << 32
GRANULARITY = 1 << 21
UNWRITTEN = 0xFF  # NaN in every float type
MAP_NORESERVE, MADV_DONTNEED = 0x4000, 4
EXPORTS = "{ global: tl_*; emulator_*; local: *; };\n"


def build() -> Path:
    """The emulator's library, compiled where it is stale."""
    sys.path.insert(0, str(ROOT))
    import build_native as b

    folder = ROOT / "build" / "cuda-emulator"
    folder.mkdir(parents=True, exist_ok=True)
    sources = [s for s in sorted((ROOT / "cuda").glob("*.cu")) if s.name != "host.cu"] + [ROOT / "tests" / "cuda_emulator" / "emulator.cpp"]
    headers = [h for pattern in ("cuda/*.h", "cuda/*.cuh", "include/*.h", "tests/cuda_emulator/*.h") for h in ROOT.glob(pattern)]
    flags = ["-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-strict-aliasing", "-DTL_EMULATOR"]
    flags += [f"-I{ROOT / 'include'}", f"-I{ROOT / 'cuda'}", f"-I{ROOT / 'tests' / 'cuda_emulator'}"]
    compiler = b.host_compiler()
    jobs = [b.Job((*compiler, *flags, "-x", "c++", "-c", str(s)), folder / f"{s.stem}.o", (s, *headers)) for s in sources]
    library = folder / "libtinyloop_emulated.so"
    if any(job.is_stale() for job in jobs) or not library.exists():
        b.compile_all(jobs)
        b.link([*compiler, "-shared", *(str(job.target) for job in jobs)], folder, library, EXPORTS)
    return library


class Status(enum.IntEnum):
    """cudaError_t and CUresult in one."""

    success = 0
    notReady = 600
    outOfMemory = 2
    invalidValue = 1


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_OK = (Status.success,)


class Device:
    """What the stand-in knows of its only device."""

    def __init__(self, library: Path) -> None:
        self.kernels = ctypes.CDLL(str(library))
        self.kernels.emulator_end_graph.restype = ctypes.c_void_p
        self.kernels.emulator_n_kernels.restype = ctypes.c_uint64
        for name in ("emulator_launch_graph", "emulator_drop_graph"):
            getattr(self.kernels, name).argtypes = [ctypes.c_void_p]
        self.nbytes = DEVICE_NBYTES
        self.allocated: dict[int, int] = {}  # device memory and pinned memory: address -> bytes
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.n_graphs = self.n_instantiated = self.n_launched = 0
        self.n_calls = 0  # of allocation, so that a test can see whether a warm path makes any
        # What the addresses of the driver's functions lead to; a test may put another `launch` or `query` in.
        self.functions = {
            b"cuGraphLaunch": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda graph, stream: self.launch(graph, stream)),
            b"cuStreamQuery": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda stream: self.query(stream)),
        }

    def used(self) -> int:
        """Bytes in use."""
        return sum(self.allocated.values()) + sum(self.mapped.values())

    def allocate(self, nbytes: int) -> tuple[Any, ...]:
        self.n_calls += 1
        if self.used() + nbytes > self.nbytes:
            return Status.outOfMemory, None
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        pointer = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        ctypes.memset(pointer, UNWRITTEN, size)
        self.allocated[pointer] = size
        return Status.success, pointer

    def deallocate(self, pointer: int) -> tuple[Any, ...]:
        _libc.munmap(pointer, self.allocated.pop(pointer))  # a use after this is a crash
        return _OK

    # ---- address ranges

    def reserve(self, nbytes: int, *_: Any) -> tuple[Any, ...]:
        assert nbytes % GRANULARITY == 0
        pointer = _libc.mmap(None, nbytes + GRANULARITY, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        aligned = -(-pointer // GRANULARITY) * GRANULARITY
        self.reserved[aligned] = nbytes
        return Status.success, aligned

    def release(self, pointer: int, nbytes: int) -> tuple[Any, ...]:
        assert self.reserved.pop(pointer) == nbytes
        assert not [p for p in self.mapped if pointer <= p < pointer + nbytes], "addresses go back while memory is mapped"
        _libc.munmap(pointer, nbytes)
        return _OK

    def create(self, nbytes: int, *_: Any) -> tuple[Any, ...]:
        self.n_calls += 1
        assert nbytes % GRANULARITY == 0
        return (Status.outOfMemory, None) if self.used() + nbytes > self.nbytes else (Status.success, nbytes)

    def map(self, pointer: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        assert (offset, flags, handle) == (0, 0, nbytes) and pointer not in self.mapped
        assert any(p <= pointer and pointer + nbytes <= p + n for p, n in self.reserved.items())
        self.mapped[pointer] = nbytes
        return _OK

    def set_access(self, pointer: int, nbytes: int, descriptions: list[Any], n: int) -> tuple[Any, ...]:
        assert len(descriptions) == n == 1 and self.mapped[pointer] == nbytes
        assert _libc.mprotect(pointer, nbytes, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        ctypes.memset(pointer, UNWRITTEN, nbytes)
        return _OK

    def unmap(self, pointer: int, nbytes: int) -> tuple[Any, ...]:
        assert self.mapped.pop(pointer) == nbytes
        _libc.madvise(pointer, nbytes, MADV_DONTNEED)
        assert _libc.mprotect(pointer, nbytes, 0) == 0
        return _OK

    # ---- work

    def copy(self, to: int, source: int, nbytes: int, *_: Any) -> tuple[Any, ...]:
        ctypes.memmove(to, source, nbytes)
        return _OK

    def copy_rows(self, to: int, to_pitch: int, source: int, source_pitch: int, width: int, height: int, *_: Any) -> tuple[Any, ...]:
        for i in range(height):
            ctypes.memmove(to + i * to_pitch, source + i * source_pitch, width)
        return _OK

    def fill(self, pointer: int, value: int, nbytes: int, stream: Any) -> tuple[Any, ...]:
        ctypes.memset(pointer, value, nbytes)
        return _OK

    def begin_graph(self, *_: Any) -> tuple[Any, ...]:
        self.kernels.emulator_begin_graph()
        return _OK

    def instantiate(self, graph: int, flags: int) -> tuple[Any, ...]:
        self.n_graphs += 1
        self.n_instantiated += 1
        return Status.success, graph

    def launch(self, graph: int, stream: Any) -> Status:
        self.n_launched += 1
        self.kernels.emulator_launch_graph(graph)
        return Status.success

    def address(self, name: bytes, version: int, flags: int) -> tuple[Any, ...]:
        return Status.success, ctypes.cast(self.functions[name], ctypes.c_void_p).value, 0

    def query(self, stream: Any) -> Status:
        return Status.success

    def drop(self, graph: int) -> tuple[Any, ...]:
        self.n_graphs -= 1
        self.kernels.emulator_drop_graph(graph)
        return _OK


def _modules(device: Device) -> tuple[ModuleType, ModuleType]:
    def done(*_: Any) -> tuple[Any, ...]:
        return _OK

    runtime, driver = ModuleType("cuda.bindings.runtime"), ModuleType("cuda.bindings.driver")
    runtime.__dict__.update(
        cudaGetDeviceCount=lambda: (Status.success, 1), cudaDriverGetVersion=lambda: (Status.success, 13000),
        cudaGetErrorString=lambda status: (Status.success, status.name.encode()), cudaGetLastError=done, cudaSetDevice=done,
        cudaStreamNonBlocking=1, cudaStreamCreateWithFlags=lambda flags: (Status.success, 1), cudaStreamSynchronize=done,
        cudaStreamDestroy=done, cudaStreamQuery=done,
        cudaMemGetInfo=lambda: (Status.success, device.nbytes - device.used(), device.nbytes),
        cudaMalloc=device.allocate, cudaFree=device.deallocate, cudaHostAllocPortable=1, cudaHostAllocMapped=2,
        cudaHostAlloc=lambda nbytes, flags: device.allocate(nbytes), cudaFreeHost=device.deallocate,
        cudaMemsetAsync=device.fill, cudaMemcpyAsync=device.copy, cudaMemcpy2DAsync=device.copy_rows,
        cudaMemcpyKind=SimpleNamespace(cudaMemcpyDefault=4),
        cudaEventDisableTiming=2, cudaEventCreateWithFlags=lambda flags: (Status.success, 1), cudaEventRecord=done, cudaEventSynchronize=done,
        cudaEventDestroy=done,
        cudaStreamCaptureMode=SimpleNamespace(cudaStreamCaptureModeThreadLocal=1),
        cudaStreamBeginCapture=device.begin_graph, cudaStreamEndCapture=lambda stream: (Status.success, device.kernels.emulator_end_graph()),
        cudaGraphInstantiate=device.instantiate, cudaGraphDestroy=done, cudaGraphExecDestroy=device.drop,
    )  # fmt: skip
    driver.__dict__.update(
        CUmemAllocationProp=lambda: SimpleNamespace(location=SimpleNamespace()), CUmemAccessDesc=lambda: SimpleNamespace(location=SimpleNamespace()),
        CUmemAllocationType=SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1), CUmemLocationType=SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1),
        CUmemAllocationGranularity_flags=SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0),
        CUmemAccess_flags=SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3),
        cuMemGetAllocationGranularity=lambda prop, option: (Status.success, GRANULARITY),
        cuMemAddressReserve=device.reserve, cuMemAddressFree=device.release, cuMemCreate=device.create, cuMemMap=device.map, cuMemRelease=done,
        cuMemSetAccess=device.set_access, cuMemUnmap=device.unmap, cuGetProcAddress=device.address, CUresult=Status,
        cuGetErrorString=lambda status: (Status.success, status.name.encode()),
    )  # fmt: skip
    return runtime, driver


def installed() -> Device | None:
    """The stand-in's device, where this process runs on it."""
    return getattr(sys.modules.get("cuda.bindings.runtime"), "emulated_device", None)


def install() -> Device:
    """Builds the emulator and puts it where the CUDA library and cuda.bindings are looked for, in this process."""
    library = build()
    device = Device(library)
    runtime, driver = _modules(device)
    runtime.emulated_device = device  # type: ignore[attr-defined]
    for name in ("cuda", "cuda.bindings"):
        package = sys.modules.setdefault(name, ModuleType(name))
        package.__path__ = getattr(package, "__path__", [])  # type: ignore[attr-defined]
    bindings = sys.modules["cuda.bindings"]
    for name, module in (("runtime", runtime), ("driver", driver)):
        sys.modules[f"cuda.bindings.{name}"] = module
        setattr(bindings, name, module)
    os.environ["TINYLOOP_CUDA_LIBRARY"] = str(library)
    return device
