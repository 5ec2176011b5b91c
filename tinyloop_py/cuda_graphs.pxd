from libc.stdint cimport int32_t

from .abi cimport tl_batch, tl_sampling
from .plan cimport Plan


cdef class StepGraphs:
    cdef object device
    cdef Plan _plan
    cdef dict _graphs                  # what addresses and launches depend on -> graph, or None where there was no memory for it
    cdef int32_t *_token               # (most rows of a graph,)
    cdef int32_t *_pos
    cdef int32_t *_index               # 0, 1, ..
    cdef int32_t *_seq
    cdef tl_sampling *_sampling

    cdef bint pad(self, tl_batch *batch) noexcept
    cdef int run(self, const tl_batch *batch) except -1
    cdef object record(self, const tl_batch *batch)
    cdef int enqueue(self, const tl_batch *batch, void *stream) except -1
    cdef int clear(self) except -1


cdef int rows_for(Plan plan, int n) noexcept
