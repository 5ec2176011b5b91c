"""Memory that a backend computes on: buffers, and reserved address ranges that get memory on demand.

Host memory is here; the CUDA backend derives its own from `Buffer` and `AddressRange`.
"""

from libc.stdint cimport int64_t, uintptr_t
from posix.mman cimport (
    MADV_DONTNEED, MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PROT_NONE, PROT_READ, PROT_WRITE, madvise, mmap,
    mprotect, munmap,
)

import os

from .errors import OutOfMemoryError

cdef int64_t OS_PAGE = os.sysconf("SC_PAGE_SIZE")
cdef int64_t COMMIT_STEP = 1 << 24  # a range grows by whole steps, so that the kernel is asked rarely
cdef int64_t HUGE_PAGE = 1 << 21
cdef int64_t ARENA_CHUNK = 1 << 25
cdef int64_t SMALLEST_RANGE = 16 << 20
cdef int64_t WARM_NBYTES = 64 << 20


def free_host_memory() -> int | None:
    """Bytes that the system could hand out, or None where it does not say."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def host_out_of_memory(what: str, asked: int) -> OutOfMemoryError:
    """The error for host memory that the system refused."""
    free = free_host_memory()
    known = "" if free is None else f"; the system has {free:,} bytes free"
    return OutOfMemoryError(f"out of memory: {what} needs {asked:,} bytes of host memory{known}")


cdef class Buffer:
    """`nbytes` of memory at `pointer`, freed with the object."""


cdef class HostBuffer(Buffer):
    """Zeroed host memory, page-aligned; large ones begin on a huge page, and lie in huge pages where the system gives them."""

    def __cinit__(self, int64_t nbytes, str what="a buffer"):
        self.nbytes = max(nbytes, 1)
        cdef int64_t slack = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
        cdef void *p = mmap(NULL, self.nbytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        if p == MAP_FAILED:
            raise host_out_of_memory(what, nbytes)
        self._mapped = <uintptr_t>p
        self._mapped_nbytes = self.nbytes + slack
        self.pointer = self._mapped
        if slack:
            self.pointer = (self._mapped + HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE
            madvise(<void *>self.pointer, self.nbytes, MADV_HUGEPAGE)

    def __dealloc__(self):
        if self._mapped:
            munmap(<void *>self._mapped, self._mapped_nbytes)


cdef class SubBuffer(Buffer):
    """A part of another buffer, which it keeps."""


cdef class Arena:
    """Many buffers side by side in few large allocations: weights one after the other, so that huge pages hold them.

    Parameters
    ----------
    alloc
        Called with (nbytes, what) for each large allocation.
    """

    def __init__(self, alloc):
        self._alloc = alloc
        self._chunk = None
        self._used = 0

    def alloc(self, int64_t nbytes, str what) -> Buffer:
        """`nbytes` of zeroed memory on a 64-byte boundary."""
        cdef SubBuffer part = SubBuffer.__new__(SubBuffer)
        if self._chunk is None or self._used + nbytes > self._chunk.nbytes:
            self._chunk = self._alloc(max(nbytes, ARENA_CHUNK), what)
            self._used = 0
        part.parent = self._chunk
        part.pointer = self._chunk.pointer + self._used
        part.nbytes = nbytes
        self._used += (nbytes + 63) // 64 * 64
        return part


cdef class AddressRange:
    """`nbytes` of address space at `pointer`, of which the first `committed` have memory."""

    cpdef int commit(self, int64_t nbytes) except -1:
        """Gives the first `nbytes` memory that reads as zero; OutOfMemoryError where the range or the system has no more."""
        raise TypeError("an AddressRange of no backend")

    cpdef int discard(self, int64_t offset, int64_t nbytes) except -1:
        """Lets the memory of a committed part go where that is possible, until `restore`."""
        return 0

    cpdef int restore(self, int64_t offset, int64_t nbytes) except -1:
        """Has memory behind a discarded part again, zero or as it was; OutOfMemoryError where there is none."""
        return 0

    cpdef int close(self) except -1:
        """Gives address space and memory back. Idempotent."""
        return 0


cdef class HostRange(AddressRange):
    """Address space of this process."""

    def __cinit__(self, int64_t nbytes):
        self.warm_nbytes = WARM_NBYTES
        self.nbytes = (nbytes + OS_PAGE - 1) // OS_PAGE * OS_PAGE
        cdef void *p = mmap(NULL, self.nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        while p == MAP_FAILED and self.nbytes >= SMALLEST_RANGE:  # a limit on address space (ulimit -v): take part of what it leaves
            self.nbytes = self.nbytes // 4 // OS_PAGE * OS_PAGE
            p = mmap(NULL, self.nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if p == MAP_FAILED:
            raise host_out_of_memory("the address space for KV pages", self.nbytes)
        self.pointer = <uintptr_t>p
        madvise(p, self.nbytes, MADV_HUGEPAGE)

    def __dealloc__(self):
        if self.pointer:
            munmap(<void *>self.pointer, self.nbytes)

    cpdef int commit(self, int64_t nbytes) except -1:
        if nbytes <= self.committed:
            return 0
        if nbytes > self.nbytes or not self.pointer:
            raise host_out_of_memory("the KV cache", nbytes)
        cdef int64_t wanted = min((nbytes + COMMIT_STEP - 1) // COMMIT_STEP * COMMIT_STEP, self.nbytes)
        if mprotect(<char *>self.pointer + self.committed, wanted - self.committed, PROT_READ | PROT_WRITE) != 0:
            raise host_out_of_memory("the KV cache", wanted - self.committed)
        self.committed = wanted
        return 0

    cpdef int discard(self, int64_t offset, int64_t nbytes) except -1:
        cdef int64_t begin = (offset + OS_PAGE - 1) // OS_PAGE * OS_PAGE
        cdef int64_t end = (offset + nbytes) // OS_PAGE * OS_PAGE
        if self.pointer and begin < end:
            madvise(<char *>self.pointer + begin, end - begin, MADV_DONTNEED)
        return 0

    cpdef int close(self) except -1:
        if self.pointer:
            munmap(<void *>self.pointer, self.nbytes)
            self.pointer = 0
        return 0
