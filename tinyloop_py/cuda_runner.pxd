from libc.stdint cimport int32_t, int64_t, uintptr_t

from .abi cimport tl_batch
from .cuda_graphs cimport StepGraphs
from .cuda_lane cimport Lane
from .memory cimport Buffer
from .runner cimport Runner


cdef class CudaRunner(Runner):
    cdef readonly object device
    cdef object _copied                # event: the staging buffer has been read
    cdef Buffer _staging               # pinned: the arrays of a batch, side by side
    cdef Buffer _inputs                # the same on the device
    cdef Buffer _outputs               # what a batch writes
    cdef Buffer _transit               # a page in the canonical layout; None until one is asked for
    cdef bint _writes                  # else `put` only counts
    cdef int64_t _used, _out_used
    cdef StepGraphs _graphs            # of steps that the host waits for
    cdef dict _lanes                   # (loops, window, rows) -> idle lanes

    cdef Lane lane(self, int loops, int window, int n_rows)
    cdef uintptr_t put(self, const void *source, int64_t nbytes) noexcept
    cdef uintptr_t room(self, int64_t nbytes) noexcept
    cdef int lay_inputs(self, const tl_batch *batch, tl_batch *there) except -1
    cdef uintptr_t transit(self, int64_t nbytes) except 0
    cdef int size_page(self, int part, int64_t *key_nbytes, int64_t *value_nbytes) except -1
    cdef const int32_t *const *put_tables(self, const int32_t *const *source, int n, int64_t nbytes) noexcept
    cdef int lay_sampling(self, const tl_batch *batch, int64_t first) except -1
    cdef int lay_outputs(self, const tl_batch *batch, tl_batch *there) except -1
    cdef int fetch(self, void *to, const void *source, int64_t nbytes) except -1
