from libc.stdint cimport int32_t, int64_t

from .pages cimport KvStore


cdef class Span:
    cdef KvStore store
    cdef int first_page, n_pages, n_stages
    cdef int32_t *pages                 # (n_stages, n_pages), -1 where there is none
    cdef readonly int64_t nbytes

    cdef int32_t page(self, int stage, int index) noexcept


cdef class KvPrefix:
    cdef readonly KvStore store
    cdef readonly int n_tokens, loops, window
    cdef readonly tuple spans           # full pages, in order
    cdef readonly Span tail             # the partly filled last page, or None
    cdef readonly object final_x        # float32 (dim,): the last token's x before the final norm
    cdef readonly object boundary_x     # float32 (loops, dim): its x after every loop


cdef class Sequence:
    cdef readonly KvStore store
    cdef readonly int loops, window, n_tokens
    cdef readonly int64_t reserved_nbytes
    cdef int stride, n_stages, own_first, n_pages
    cdef int part_window[3]             # the widest window of a part's layers, 0 = full
    cdef int32_t *table                 # (n_stages, stride)
    cdef list spans                     # shared full pages before own_first

    cdef int32_t take(self, int part) except -1
    cdef void free_behind(self) noexcept
    cdef bint all_windowed(self) noexcept
    cdef void drop_spans(self, int limit) noexcept
    cdef Span take_over(self, int first_page, int n_pages)
    cdef int reserve(self, int n_positions, int max_rows) except -1
    cdef int grow(self, int n_positions) except -1
    cdef int advance(self, int n_positions) except -1
    cdef int adopt(self, KvPrefix prefix) except -1
    cdef int copy_tail(self, KvPrefix prefix) except -1
    cdef KvPrefix freeze(self, object final_x, object boundary_x)
    cdef void release(self) noexcept
