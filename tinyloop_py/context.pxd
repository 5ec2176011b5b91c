from libc.stdint cimport int64_t, uintptr_t

from .abi cimport tl_context, tl_matrix
from .library cimport Library
from .memory cimport Buffer


cdef class PackedMatrix:
    cdef tl_matrix matrix
    cdef readonly Buffer buffer


cdef class Context:
    cdef readonly Library library
    cdef tl_context *handle
    cdef void *stream                  # what the library enqueues to; NULL on the CPU
    cdef readonly str name
    cdef readonly str numerics_id
    cdef readonly int n_threads
    cdef int _pid

    cdef void destroy(self) noexcept
    cdef int expect(self, int64_t nbytes) except -1
    cdef uintptr_t readable(self, object array) except? 0
    cdef int copy(self, uintptr_t to, uintptr_t source, int64_t nbytes) except -1
    cdef int wait(self) except -1
