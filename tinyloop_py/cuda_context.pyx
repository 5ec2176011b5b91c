"""The CUDA backend of a Context: device memory, weights copied in through pinned memory, work on one stream."""

cimport cython
from libc.stdint cimport int64_t, uintptr_t
from libc.string cimport memcpy

from .context cimport Context
from .library cimport Library
from .memory cimport AddressRange, Buffer

from .cuda_device import CudaDevice
from .cuda_memory import DeviceBuffer, DeviceRange, PinnedBuffer

cdef int64_t STAGE_NBYTES = 16 << 20  # of each of the pinned buffers that weights pass through
cdef int N_STAGES = 3
cdef int CUDA_ERROR_NOT_READY = 600


@cython.no_gc_clear
cdef class CudaContext(Context):
    """One device, through libtinyloop.so and cuda-python.

    Raises
    ------
    RuntimeError
        The device cannot be used: no or too old a driver, no such device, no code for it in this build.
    """

    def __init__(self, Library library, int device=0):
        self.device = CudaDevice(device)
        try:
            Context.__init__(self, library, 1, "best", device)
        except BaseException:
            self.device.close()
            raise
        self.stream = <void *><uintptr_t>self.device.stream
        self._launch = <launch_function><uintptr_t>self.device.address("cuGraphLaunch")
        self._query = <query_function><uintptr_t>self.device.address("cuStreamQuery")
        self._stages = []
        self._next_stage = 0

    def close(self):
        """Gives stream and staging memory back, after all work. Idempotent."""
        self.end_loading()
        self.destroy()
        self.device.close()

    # ---- memory

    def alloc(self, int64_t nbytes, str what) -> Buffer:
        return DeviceBuffer(self.device, nbytes, what)

    def alloc_range(self, int64_t nbytes) -> AddressRange:
        return DeviceRange(self.device, nbytes)

    def page_copy(self):
        return self.device.copy

    def free_nbytes(self):
        return self.device.free_nbytes()

    cdef int copy(self, uintptr_t to, uintptr_t source, int64_t nbytes) except -1:
        self.device.copy(to, source, nbytes)
        return 0

    cdef int wait(self) except -1:
        self.device.wait("the work before")
        return 0

    cdef int launch(self, uintptr_t graph) except -1:
        """Enqueues a graph of the device; other threads run meanwhile."""
        cdef int status
        with nogil:
            status = self._launch(<void *>graph, self.stream)
        if status:
            self.device.check_status(status, "launching a graph")
        return 0

    cdef bint works(self) noexcept nogil:
        """Whether the device is still at work; where not, or where the driver does not say, `device.is_idle` tells."""
        return self._query(self.stream) == CUDA_ERROR_NOT_READY

    # ---- loading weights: the host reads into one pinned buffer while another is copied

    cdef int expect(self, int64_t nbytes) except -1:
        if not self._stages:
            self._stages = [(PinnedBuffer(self.device, STAGE_NBYTES), self.device.make_event()) for _ in range(N_STAGES)]
        if self._landing is None or self._landing.nbytes < nbytes:
            self.device.wait("loading weights")  # what is packed from the old one
            self._landing = None
            self._landing = DeviceBuffer(self.device, nbytes, "a weight on its way")
        self._landed = 0
        return 0

    cdef uintptr_t readable(self, object array) except? 0:
        cdef uintptr_t source = array.__array_interface__["data"][0], pinned, to = self._landing.pointer + self._landed
        cdef int64_t nbytes = array.nbytes, at = 0, n
        self._landed += (nbytes + 255) // 256 * 256
        while at < nbytes:
            buffer, event = self._stages[self._next_stage]
            self._next_stage = (self._next_stage + 1) % N_STAGES
            self.device.wait_for(event)
            n = min(STAGE_NBYTES, nbytes - at)
            pinned = buffer.pointer
            with nogil:
                memcpy(<void *>pinned, <const void *>(source + at), n)  # reads the file where it is mapped
            self.device.copy(to + at, pinned, n)
            self.device.record(event)
            at += n
        return to

    def end_loading(self):
        """Waits for the weights and frees what they passed through. Idempotent."""
        if self._landing is None:
            return
        self.device.wait("loading weights")
        for _, event in self._stages:
            self.device.drop_event(event)
        self._stages = []
        self._landing = None
