from .abi cimport tl_context, tl_matrix
from .library cimport Library
from .memory cimport Buffer


cdef class PackedMatrix:
    cdef tl_matrix matrix
    cdef readonly Buffer buffer


cdef class Context:
    cdef readonly Library library
    cdef tl_context *handle
    cdef readonly str name
    cdef readonly str numerics_id
    cdef readonly int n_threads
    cdef int _pid

    cdef void destroy(self) noexcept
