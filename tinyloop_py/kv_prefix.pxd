from libc.stdint cimport int32_t, int64_t

from .abi cimport TL_PAGE_POSITIONS, TL_STAGE_CORE
from .pages cimport KvStore


cdef enum:  # what a page holds
    PAGES_KV = 0
    PAGES_OPERANDS = 1


cdef enum:
    PAGE = TL_PAGE_POSITIONS


cdef inline int part_of(int stage) noexcept:
    """Prelude and coda are their own stages; every loop is a stage of the core."""
    return stage if stage < TL_STAGE_CORE else TL_STAGE_CORE


cdef inline int space_of(int stage, int kind) noexcept:
    """Index of the page space: those of keys and values, then those of operands."""
    return part_of(stage) + 3 * kind


cdef inline int pages_for(int n_positions) noexcept:
    return (n_positions + PAGE - 1) // PAGE


cdef class Span:
    cdef KvStore store
    cdef int kind
    cdef int first_page, n_pages, first_stage, n_stages
    cdef int32_t *pages                 # (n_stages, n_pages), -1 where there is none
    cdef readonly int64_t nbytes

    cdef int32_t page(self, int stage, int index) noexcept


cdef class KvPrefix:
    cdef readonly KvStore store
    cdef readonly int n_tokens, loops, window
    cdef int kind
    cdef readonly tuple spans           # full pages, in order of their ends; of two for a page, the later counts
    cdef readonly Span tail             # the partly filled last page, or None
    cdef readonly object final_x        # float32 (dim,): the last token's x before the final norm
    cdef readonly object boundary_x     # float32 (loops, dim): its x after every loop

    cdef int fill(self, int32_t *table, int n_stages, int stride) except -1
