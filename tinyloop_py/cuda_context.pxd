from libc.stdint cimport int64_t, uintptr_t

from .context cimport Context
from .memory cimport Buffer

ctypedef int (*launch_function)(void *graph, void *stream) noexcept nogil
ctypedef int (*query_function)(void *stream) noexcept nogil


cdef class CudaContext(Context):
    cdef readonly object device
    cdef list _stages                  # (pinned buffer, event of the copy from it)
    cdef int _next_stage
    cdef Buffer _landing               # where a tensor lies on the device until it is packed
    cdef int64_t _landed               # bytes of it in use
    cdef launch_function _launch       # the driver's: what is called every few tokens goes through no Python object
    cdef query_function _query

    cdef int launch(self, uintptr_t graph) except -1
    cdef bint works(self) noexcept nogil
