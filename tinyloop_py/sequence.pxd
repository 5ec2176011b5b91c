from libc.stdint cimport int32_t, int64_t

from .kv_prefix cimport KvPrefix, Span
from .pages cimport KvStore


cdef class Sequence:
    cdef readonly KvStore store
    cdef readonly int loops, window, n_tokens
    cdef readonly int64_t reserved_nbytes
    cdef int kind, stride, n_stages, own_first, n_pages
    cdef Sequence operands              # in h mode, where it shall be held: what `freeze` is asked of
    cdef int part_window[3]             # the widest window of a part's layers, 0 = full
    cdef int32_t *table                 # (n_stages, stride)
    cdef list spans                     # shared full pages before own_first

    cdef int32_t take(self, int stage) except -1
    cdef int take_like(self, const int32_t *table, int n_pages) except -1
    cdef void free_behind(self) noexcept
    cdef bint all_windowed(self) noexcept
    cdef void drop_spans(self, int limit) noexcept
    cdef Sequence fork(self)
    cdef int copy_last_page(self, Sequence source) except -1
    cdef Span take_over(self, int first_page, int n_pages)
    cdef int reserve(self, int n_positions, int max_rows) except -1
    cdef int grow(self, int n_positions) except -1
    cdef int advance(self, int n_positions) except -1
    cdef Span add_stages(self, int first_stage, int n_stages)
    cdef int adopt(self, KvPrefix prefix) except -1
    cdef int copy_tail(self, KvPrefix prefix) except -1
    cdef KvPrefix freeze(self, object final_x, object boundary_x)
    cdef void release(self) noexcept
