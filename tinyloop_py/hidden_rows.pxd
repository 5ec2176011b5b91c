from libc.stdint cimport int64_t

from .abi cimport tl_batch
from .memory cimport Buffer
from .pages cimport KvStore


cdef class HiddenRows:
    cdef KvStore store
    cdef readonly int n_tokens, dim
    cdef readonly Buffer x             # float32 (n_tokens, dim)
    cdef readonly Buffer e             # the same of the prelude's output, or None
    cdef readonly int64_t nbytes       # of what these rows alone hold
    cdef bint _counted

    cdef void write(self, tl_batch *want, int first) noexcept
    cdef void read(self, tl_batch *want, int first) noexcept
