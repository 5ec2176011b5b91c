from libc.stdint cimport int64_t

from .context cimport Context
from .memory cimport Buffer


cdef class CudaContext(Context):
    cdef readonly object device
    cdef list _stages                  # (pinned buffer, event of the copy from it)
    cdef int _next_stage
    cdef Buffer _landing               # where a tensor lies on the device until it is packed
    cdef int64_t _landed               # bytes of it in use
