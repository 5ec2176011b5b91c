from libc.stdint cimport int32_t

from .abi cimport tl_sampling


cdef class Sampling:
    cdef tl_sampling c
    cdef int32_t[::1] _bias_ids
    cdef float[::1] _bias_values
    cdef readonly frozenset stop_tokens

    cdef int _set_bias(self, object bias, int vocab_size) except -1
    cdef bint stops(self, int32_t token) noexcept
