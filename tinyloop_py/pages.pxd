from libc.stdint cimport int32_t, int64_t, uintptr_t

from .memory cimport AddressRange


cdef class PageSpace:
    cdef AddressRange _range
    cdef readonly int64_t page_nbytes
    cdef readonly int64_t capacity     # pages that the range has addresses for
    cdef readonly int64_t n_used
    cdef int64_t _n_seen               # pages handed out at least once: the committed ones
    cdef list _warm, _cold             # free pages, with memory and without
    cdef int64_t _warm_limit

    cdef int32_t take(self) except -1
    cdef void give(self, int32_t page) noexcept
    cdef void cool(self, int32_t page) noexcept
    cdef int64_t warm_nbytes(self) noexcept


cdef class KvStore:
    cdef readonly tuple spaces         # PageSpace or None of prelude, coda, core; then of their operands
    cdef readonly object budget        # bytes, or None
    cdef readonly bint closed
    cdef readonly int64_t used_nbytes  # pages, and hidden rows beside them
    cdef readonly int64_t peak_nbytes
    cdef readonly int64_t reserved_nbytes  # promised to running calls and not taken yet
    cdef object _free_nbytes, _copy
    cdef public object owner           # called for the model whose store this is; None once that is gone
    cdef public object fault           # called before a page is taken; tests raise from it

    cdef int32_t take(self, int part) except -1
    cdef void give(self, int part, int32_t page) noexcept
    cdef int64_t warm_nbytes(self) noexcept
    cdef void cool(self) noexcept
    cdef int hold(self, int64_t nbytes) except -1
    cdef void let_go(self, int64_t nbytes) noexcept
    cpdef int reserve(self, int64_t nbytes) except -1
    cdef void unreserve(self, int64_t nbytes) noexcept
    cdef int64_t page_nbytes(self, int part) noexcept
    cdef int copy_page(self, int part, int32_t source, int32_t target) except -1
    cdef uintptr_t page_pointer(self, int part, int32_t page) noexcept
