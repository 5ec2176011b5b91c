"""KV that is shared: spans of full pages, and a prefix made of them.

A span is immutable and belongs to whoever refers to it: Python's reference count is the span's, and its pages go back
when the last holder lets go.
"""

cimport cython
from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset


@cython.final
@cython.no_gc_clear  # the store must outlive the pages
cdef class Span:
    """A run of pages over `n_stages` stages of a sequence from `first_stage` on: all of them, or those that a further depth added."""

    def __cinit__(self, KvStore store, int first_page, int n_pages, int n_stages, int kind=PAGES_KV, int first_stage=0):
        self.store = store
        self.kind = kind
        self.first_page = first_page
        self.n_pages = n_pages
        self.first_stage = first_stage
        self.n_stages = n_stages
        self.pages = <int32_t *>malloc(max(1, n_stages * n_pages) * sizeof(int32_t))
        if self.pages == NULL:
            raise MemoryError
        memset(self.pages, 0xff, n_stages * n_pages * sizeof(int32_t))

    def __dealloc__(self):
        cdef int i
        if self.pages == NULL:
            return
        for i in range(self.n_stages * self.n_pages):
            if self.pages[i] >= 0:
                self.store.give(space_of(self.first_stage + i // self.n_pages, self.kind), self.pages[i])
        free(self.pages)

    cdef int32_t page(self, int stage, int index) noexcept:
        """The page of a stage, -1 where the span holds none."""
        cdef int row = stage - self.first_stage
        return self.pages[row * self.n_pages + index] if 0 <= row < self.n_stages else -1

    def held(self):
        """(stage, page, index of the page in the sequence) of every page held."""
        cdef int stage, i
        return [
            (stage, self.page(stage, i), self.first_page + i)
            for stage in range(self.first_stage, self.first_stage + self.n_stages) for i in range(self.n_pages) if self.page(stage, i) >= 0
        ]


@cython.final
cdef class KvPrefix:
    """The immutable KV of `n_tokens` tokens run at a depth and window, with its last token's hidden rows.

    Its pages hold keys and values; in h mode the operands that they are rebuilt from (`kind`).
    """

    cdef int fill(self, int32_t *table, int n_stages, int stride) except -1:
        """Writes the pages that a later position may read into a page table (n_stages, stride), -1 elsewhere; the table borrows them.

        A shared span may hold pages of a windowed stage behind a gap: those are not read any more.
        """
        cdef Span span
        cdef int stage, page, last = pages_for(self.n_tokens)
        memset(table, 0xff, n_stages * stride * sizeof(int32_t))
        for span in (*self.spans, *(() if self.tail is None else (self.tail,))):
            for stage, page, index in span.held():
                if stage < n_stages:
                    table[stage * stride + <int>index] = page
        for stage in range(n_stages):
            page = last
            while page > 0 and table[stage * stride + page - 1] >= 0:
                page -= 1
            memset(table + stage * stride, 0xff, page * sizeof(int32_t))
        return 0

    def parts(self):
        """((part, nbytes), ...): spans may be shared with other prefixes, the rest is this one's own."""
        own = self.final_x.nbytes + self.boundary_x.nbytes + (self.tail.nbytes if self.tail is not None else 0)
        return (*((span, span.nbytes) for span in self.spans), (self, own))

    @property
    def nbytes(self):
        """Bytes of pages and hidden rows, shared ones included."""
        return sum(nbytes for _, nbytes in self.parts())
