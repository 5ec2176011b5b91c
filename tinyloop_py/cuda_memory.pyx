"""Memory of a CUDA device: buffers, pinned host buffers, and address ranges with physical memory mapped on demand."""

cimport cython
from libc.stdint cimport int64_t

from .memory cimport AddressRange, Buffer

cdef int64_t WARM_SHARE = 32  # of a device's memory that free pages of a part keep: mapping takes the host longer than filling takes a prompt
cdef int64_t MAP_STEP = 32 << 20  # physical memory comes in pieces of this size, or of the device's granularity where that is larger


@cython.no_gc_clear  # the device must outlive its memory
cdef class DeviceBuffer(Buffer):
    """Zeroed device memory."""

    cdef object device

    def __cinit__(self, device, int64_t nbytes, str what="a buffer"):
        self.device = device
        self.nbytes = max(nbytes, 1)
        self.pointer = device.malloc(self.nbytes, what)

    def __dealloc__(self):
        if self.pointer:
            try:
                self.device.free(self.pointer)
            except Exception:  # the interpreter goes down
                pass


@cython.no_gc_clear
cdef class PinnedBuffer(Buffer):
    """Host memory that copies run from without a stop, and that the device can write to."""

    cdef object device

    def __cinit__(self, device, int64_t nbytes, str what="a staging buffer"):
        self.device = device
        self.nbytes = max(nbytes, 1)
        self.pointer = device.pin(self.nbytes, what)

    def __dealloc__(self):
        if self.pointer:
            try:
                self.device.unpin(self.pointer)
            except Exception:
                pass


@cython.no_gc_clear
cdef class DeviceRange(AddressRange):
    """Address space of a device. Memory is mapped by whole pieces, each as long as any page that touches it is in use."""

    cdef object device
    cdef list _n_users       # of each piece
    cdef int64_t _piece

    def __cinit__(self, device, int64_t nbytes):
        cdef int64_t grain = device.granularity
        self.device = device
        self._piece = (min(MAP_STEP, max(nbytes, 1)) + grain - 1) // grain * grain
        self.nbytes = (nbytes + self._piece - 1) // self._piece * self._piece
        self._n_users = []
        self.warm_nbytes = device.total_nbytes() // WARM_SHARE
        self.pointer = device.reserve_addresses(self.nbytes)

    def __dealloc__(self):
        try:
            self.close()
        except Exception:
            pass

    cpdef int commit(self, int64_t nbytes) except -1:
        """Has memory behind the bytes from `committed` to `nbytes`, which count as one page in use."""
        if nbytes <= self.committed:
            return 0
        if nbytes > self.nbytes or not self.pointer:
            raise self.device.out_of_memory("the KV cache", nbytes)
        self.restore(self.committed, nbytes - self.committed)
        self.committed = nbytes
        return 0

    cpdef int restore(self, int64_t offset, int64_t nbytes) except -1:
        cdef int64_t first = offset // self._piece, last = (offset + nbytes - 1) // self._piece, i
        while len(self._n_users) <= last:
            self._n_users.append(0)
        for i in range(first, last + 1):
            if self._n_users[i] == 0:
                try:
                    self.device.map_memory(self.pointer + i * self._piece, self._piece)
                except BaseException:
                    self.leave(first, i)
                    raise
            self._n_users[i] += 1
        return 0

    cpdef int discard(self, int64_t offset, int64_t nbytes) except -1:
        self.leave(offset // self._piece, (offset + nbytes - 1) // self._piece + 1)
        return 0

    cdef void leave(self, int64_t first, int64_t end) noexcept:
        """One user less of the pieces first .. end - 1."""
        cdef int64_t i
        for i in range(first, end):
            self._n_users[i] -= 1
            if self._n_users[i] == 0:
                self.device.unmap_memory(self.pointer + i * self._piece, self._piece)

    cpdef int close(self) except -1:
        cdef int64_t i
        if self.pointer:
            for i in range(len(self._n_users)):
                if self._n_users[i]:
                    self.device.unmap_memory(self.pointer + i * self._piece, self._piece)
            self.device.release_addresses(self.pointer, self.nbytes)
            self._n_users = []
            self.pointer = 0
        return 0
