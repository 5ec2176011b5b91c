"""KV of one sequence: shared spans of full pages, then pages of its own.

A hit refers to a prefix's spans, copies its page table and copies one partly filled page.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from .abi cimport TL_STAGE_CORE
from .kv_prefix cimport PAGE, PAGES_KV, KvPrefix, Span, pages_for, part_of, space_of

from .errors import OutOfMemoryError

cdef int64_t MAX_TABLE = 1 << 27  # entries of a page table: 512 MiB


@cython.final
@cython.no_gc_clear
cdef class Sequence:
    """A growing sequence: `reserve`, then per step `grow` (pages for new positions), run, `advance` (positions written).

    Parameters
    ----------
    stride
        Pages in a row of the page table, for the longest sequence of the model.
    part_windows
        Of prelude, coda and core: the widest window among the layers, 0 where one is full.
    kind
        What its pages hold: keys and values, or operands. In h mode a sequence of the latter goes beside one of the former
        (`operands`) where what is run shall be held.
    """

    def __cinit__(self, KvStore store, int loops, int window, int stride, tuple part_windows, int kind=PAGES_KV):
        cdef int part
        self.store = store
        self.kind = kind
        self.loops = loops
        self.window = window
        self.stride = stride
        self.n_stages = TL_STAGE_CORE + loops
        self.spans = []
        for part in range(3):
            self.part_window[part] = part_windows[part]
        if <int64_t>loops * stride > MAX_TABLE:
            raise OutOfMemoryError(
                f"out of memory: the page table of {loops} loops over {stride} pages each is too large; take fewer loops or a smaller max_seq_len"
            )
        self.table = <int32_t *>malloc(<size_t>self.n_stages * stride * sizeof(int32_t))
        if self.table == NULL:
            raise MemoryError
        memset(self.table, 0xff, <size_t>self.n_stages * stride * sizeof(int32_t))

    def __dealloc__(self):
        if self.table == NULL:  # it was never made
            return
        self.release()
        free(self.table)

    cdef int reserve(self, int n_positions, int max_rows) except -1:
        """Has the store promise every page up to `n_positions`; a windowed part needs what stays resident at a time."""
        cdef int stage, n, part
        cdef int64_t nbytes = 0
        for stage in range(self.n_stages):
            part = part_of(stage)
            n = pages_for(n_positions) - self.n_pages
            if self.part_window[part]:
                n = min(n, pages_for(self.part_window[part] + max_rows) + 1)
            nbytes += n * self.store.page_nbytes(space_of(stage, self.kind))
        self.store.reserve(nbytes)
        self.reserved_nbytes += nbytes
        return 0

    cdef int32_t take(self, int stage) except -1:
        cdef int space = space_of(stage, self.kind)
        cdef int32_t page = self.store.take(space)
        cdef int64_t nbytes = self.store.page_nbytes(space)
        if self.reserved_nbytes >= nbytes:
            self.reserved_nbytes -= nbytes
            self.store.unreserve(nbytes)
        return page

    cdef int grow(self, int n_positions) except -1:
        """Takes the pages that positions below `n_positions` still lack; an error leaves the sequence as it was grown so far."""
        cdef int stage, page
        cdef int last = pages_for(n_positions)
        for page in range(self.n_pages, last):
            for stage in range(self.n_stages):
                if self.store.page_nbytes(part_of(stage)) and self.table[stage * self.stride + page] < 0:
                    self.table[stage * self.stride + page] = self.take(stage)
            self.n_pages = page + 1
        return 0

    cdef int take_like(self, const int32_t *table, int n_pages) except -1:
        """Takes pages wherever another table of the same depth and stride has one; an error leaves what was taken so far."""
        cdef int stage, page
        for page in range(n_pages):
            self.n_pages = page + 1
            for stage in range(self.n_stages):
                if table[stage * self.stride + page] >= 0:
                    self.table[stage * self.stride + page] = self.take(stage)
        return 0

    cdef int advance(self, int n_positions) except -1:
        """Counts positions as written, and frees pages that no later position can read."""
        self.n_tokens = n_positions
        if self.part_window[0] or self.part_window[1] or self.part_window[2]:
            self.free_behind()
        return 0

    cdef void free_behind(self) noexcept:
        cdef int stage, page, limit, part, space, behind_all = self.n_pages
        cdef int32_t *row
        cdef int64_t nbytes
        for stage in range(self.n_stages):
            part = part_of(stage)
            space = space_of(stage, self.kind)
            nbytes = self.store.page_nbytes(space)
            if not nbytes:
                continue
            # The next position p = n_tokens reads from p - window + 1 on.
            limit = (self.n_tokens - self.part_window[part] + 1) // PAGE if self.part_window[part] else 0
            behind_all = min(behind_all, max(limit, 0))
            row = self.table + stage * self.stride
            for page in range(limit - 1, self.own_first - 1, -1):
                if row[page] < 0:
                    break
                self.store.give(space, row[page])
                row[page] = -1
                self.store.reserved_nbytes += nbytes  # the promise to this call stands
                self.reserved_nbytes += nbytes
        self.drop_spans(behind_all)

    cdef bint all_windowed(self) noexcept:
        """Whether no layer reads further back than some window."""
        cdef int part
        for part in range(3):
            if self.store.page_nbytes(part) and not self.part_window[part]:
                return False
        return True

    cdef void drop_spans(self, int limit) noexcept:
        cdef Span span
        cdef int stage
        while self.spans:
            span = self.spans[0]
            if span.first_page + span.n_pages > limit:
                return
            for stage in range(self.n_stages):
                memset(self.table + stage * self.stride + span.first_page, 0xff, span.n_pages * sizeof(int32_t))
            del self.spans[0]

    cdef int adopt(self, KvPrefix prefix) except -1:
        """Starts an empty sequence from a prefix's full pages, by reference; takes no memory. Depths may differ: what both have is taken."""
        cdef Span span
        cdef int row
        self.spans = list(prefix.spans)
        for span in prefix.spans:
            for row in range(min(span.n_stages, self.n_stages - span.first_stage)):
                memcpy(
                    self.table + (span.first_stage + row) * self.stride + span.first_page, span.pages + row * span.n_pages,
                    span.n_pages * sizeof(int32_t),
                )
        self.own_first = self.n_pages = prefix.n_tokens // PAGE
        return 0

    cdef Span add_stages(self, int first_stage, int n_stages):
        """After `adopt`: an empty span beside the full pages, for stages that are still to be run over them."""
        cdef Span span = Span(self.store, 0, self.own_first, n_stages, self.kind, first_stage)
        cdef int stage
        for stage in range(first_stage, first_stage + n_stages):
            memset(self.table + stage * self.stride, 0xff, self.own_first * sizeof(int32_t))
        self.spans.append(span)
        return span

    cdef int copy_tail(self, KvPrefix prefix) except -1:
        """After `adopt`: copies the prefix's partly filled page, so that its tokens are all here."""
        cdef int stage
        if prefix.tail is not None:
            self.grow(prefix.n_tokens)
            for stage in range(self.n_stages):
                if prefix.tail.page(stage, 0) >= 0:
                    self.store.copy_page(space_of(stage, self.kind), prefix.tail.page(stage, 0), self.table[stage * self.stride + self.own_first])
        self.n_tokens = prefix.n_tokens
        return 0

    cdef Span take_over(self, int first_page, int n_pages):
        """Moves own pages into a span."""
        cdef Span span = Span(self.store, first_page, n_pages, self.n_stages, self.kind)
        cdef int stage, page
        cdef int32_t *row
        for stage in range(self.n_stages):
            row = self.table + stage * self.stride + first_page
            for page in range(n_pages):
                span.pages[stage * n_pages + page] = row[page]
                if row[page] >= 0:
                    span.nbytes += self.store.page_nbytes(space_of(stage, self.kind))
                row[page] = -1
        return span

    cdef Sequence fork(self):
        """Another sequence on the same tokens that refers to the full pages, own ones become shared; takes no memory yet."""
        cdef int n_full = self.n_tokens // PAGE
        cdef int stage
        cdef Span span
        cdef Sequence other = Sequence(
            self.store, self.loops, self.window, self.stride, (self.part_window[0], self.part_window[1], self.part_window[2])
        )
        if n_full > self.own_first:
            span = self.take_over(self.own_first, n_full - self.own_first)
            for stage in range(self.n_stages):
                memcpy(self.table + stage * self.stride + span.first_page, span.pages + stage * span.n_pages, span.n_pages * sizeof(int32_t))
            self.spans.append(span)
            self.own_first = n_full
        for stage in range(self.n_stages):
            memcpy(other.table + stage * self.stride, self.table + stage * self.stride, n_full * sizeof(int32_t))
        other.spans = list(self.spans)
        other.own_first = other.n_pages = n_full
        return other

    cdef int copy_last_page(self, Sequence source) except -1:
        """After `fork`: copies the source's partly filled page, so that its tokens are all here."""
        cdef int stage, at
        self.grow(source.n_tokens)
        for stage in range(self.n_stages):
            at = stage * self.stride + self.own_first
            if self.n_pages > self.own_first and source.table[at] >= 0:
                self.store.copy_page(part_of(stage), source.table[at], self.table[at])
        self.n_tokens = source.n_tokens
        return 0

    cdef KvPrefix freeze(self, object final_x, object boundary_x):
        """Ends the sequence and gives what it holds as a prefix."""
        cdef KvPrefix prefix = KvPrefix.__new__(KvPrefix)
        cdef int first, n_full = self.n_tokens // PAGE
        cdef Span span
        cdef int n_each = 1 if self.all_windowed() else max(1, n_full - self.own_first)  # what slides page by page goes page by page
        spans = list(self.spans)
        for first in range(self.own_first, n_full, n_each):
            span = self.take_over(first, n_each)
            if span.nbytes:
                spans.append(span)
        prefix.tail = self.take_over(n_full, 1) if self.n_tokens % PAGE else None
        prefix.store = self.store
        prefix.kind = self.kind
        prefix.n_tokens = self.n_tokens
        prefix.loops = self.loops
        prefix.window = self.window
        prefix.spans = tuple(spans)
        prefix.final_x = final_x
        prefix.boundary_x = boundary_x
        self.spans = []
        self.release()
        return prefix

    cdef void release(self) noexcept:
        """Lets go of every page and of the rest of the promise, its operands' too. Idempotent."""
        cdef int stage, page
        cdef int32_t *row
        for stage in range(self.n_stages):
            row = self.table + stage * self.stride
            for page in range(self.own_first, min(self.n_pages + 1, self.stride)):  # one more: a page that `grow` left half taken
                if row[page] >= 0:
                    self.store.give(space_of(stage, self.kind), row[page])
            memset(row, 0xff, self.stride * sizeof(int32_t))
        self.own_first = self.n_pages = 0
        self.spans = []
        self.store.unreserve(self.reserved_nbytes)
        self.reserved_nbytes = 0
        if self.operands is not None:
            self.operands.release()
