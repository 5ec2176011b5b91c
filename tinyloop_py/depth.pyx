"""The KV of one prompt at several depths.

A stage depends on those before it alone, so a deeper prefix is the shallower one's pages, by reference, and the stages of the
further loops; the coda, whose keys depend on the depth, is run again.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

from .abi cimport (
    TL_PAGE_POSITIONS, TL_RUN_CODA, TL_RUN_CORE, TL_RUN_HEAD, TL_RUN_PRELUDE, TL_STAGE_CODA, TL_STAGE_CORE, tl_batch,
)
from .engine cimport Engine
from .hidden_rows cimport HiddenRows
from .kv_prefix cimport KvPrefix, Span
from .sequence cimport Sequence
from .signals cimport check_signals

cdef int PAGE = TL_PAGE_POSITIONS


cdef HiddenRows new_rows(Engine engine, int n_tokens, HiddenRows like):
    """Room for the rows of a prompt; those of e are `like`'s where given."""
    c = engine.config
    keep_e = c.inject != "none" and c.n_prelude > 0
    return HiddenRows(engine.plan.context, engine.plan.store, n_tokens, c.dim, keep_e, None if like is None else like.e)


cdef KvPrefix deepen(Engine engine, const int32_t[::1] tokens, KvPrefix base, HiddenRows rows, int loops, HiddenRows deeper):
    """Runs the loops from base.loops to `loops` over a prompt whose rows are kept; `deeper` takes the new ones, where given.

    The result holds keys and values, in h mode too.
    """
    cdef _Further further = _Further(engine, base, loops)
    cdef int first, n = base.n_tokens
    base = engine.with_kv(base)
    try:
        further.open(base)
        for first in range(0, n, engine.max_rows):
            further.step(&tokens[first], first, min(engine.max_rows, n - first), rows, deeper)
            check_signals()
        further.boundary_x[:base.loops] = base.boundary_x
        return further.seq.freeze(further.final_x, further.boundary_x)
    except BaseException:
        further.seq.release()
        raise


cdef KvPrefix shallow(Engine engine, KvPrefix base, int loops):
    """The prefix of a model without a coda at fewer loops: the same pages, and the x that was kept at that boundary."""
    cdef KvPrefix prefix = KvPrefix.__new__(KvPrefix)
    cdef tl_batch want
    cdef int32_t zero = 0
    cdef const int32_t *no_pages = &zero
    final_x = np.empty(engine.config.dim, np.float32)
    boundary_x = base.boundary_x[:loops].copy()
    cdef float[::1] final_view = final_x
    cdef float[:, ::1] boundary_view = boundary_x
    memset(&want, 0, sizeof(want))
    want.sections = TL_RUN_CODA | TL_RUN_HEAD  # a coda without layers: the loop norm of kind "last", where the model has it
    want.n_rows = want.n_out = 1
    want.token = want.pos = want.seq = want.out_row = &zero
    want.page_table = &no_pages
    want.x_in = &boundary_view[loops - 1, 0]
    want.final_x = &final_view[0]
    with engine._lock:
        engine.run_locked(&want)
    prefix.store = base.store
    prefix.kind = base.kind
    prefix.n_tokens = base.n_tokens
    prefix.loops = loops
    prefix.window = base.window
    prefix.spans = base.spans
    prefix.tail = base.tail
    prefix.final_x = final_x
    prefix.boundary_x = boundary_x
    return prefix


cdef class _Further:
    """A prompt's sequence while further stages run over it."""

    cdef Engine engine
    cdef Sequence seq
    cdef Span core, coda               # the new stages' full pages; coda is None for a model without one
    cdef int loop_begin, loop_end
    cdef object final_x, boundary_x

    def __cinit__(self, Engine engine, KvPrefix base, int loops):
        self.engine = engine
        self.loop_begin, self.loop_end = base.loops, loops
        self.seq = engine.new_sequence(loops, base.window)
        self.final_x = np.empty(engine.config.dim, np.float32)
        self.boundary_x = np.empty((loops, engine.config.dim), np.float32)

    cdef int open(self, KvPrefix base) except -1:
        """Shares the base's pages, and has the store promise those of the new stages."""
        cdef int64_t nbytes = 0
        cdef Span span
        self.seq.adopt(base)
        self.core = self.seq.add_stages(TL_STAGE_CORE + self.loop_begin, self.loop_end - self.loop_begin)
        if self.engine.config.n_coda:
            self.coda = self.seq.add_stages(TL_STAGE_CODA, 1)
        for span in (self.core, self.coda):
            if span is not None:
                nbytes += span.n_stages * self.resident_pages(span) * self.seq.store.page_nbytes(self.part(span))
        self.seq.store.reserve(nbytes)
        self.seq.reserved_nbytes += nbytes
        self.seq.reserve(base.n_tokens, self.engine.max_rows)
        self.seq.copy_tail(base)
        return 0

    cdef int part(self, Span span) noexcept:
        return min(span.first_stage, TL_STAGE_CORE)

    cdef int resident_pages(self, Span span) noexcept:
        """Pages of one of its stages that are held at a time."""
        cdef int window = self.seq.part_window[self.part(span)]
        return min(span.n_pages, (window + self.engine.max_rows) // PAGE + 2) if window else span.n_pages

    cdef int step(self, const int32_t *tokens, int first, int n, HiddenRows rows, HiddenRows deeper) except -1:
        """Runs the new stages over `n` tokens from `first` on."""
        cdef tl_batch want
        cdef int i
        cdef int32_t last = n - 1
        cdef const int32_t *table = self.seq.table
        cdef float[::1] final_view = self.final_x
        cdef float[:, ::1] boundary_view = self.boundary_x
        memset(&want, 0, sizeof(want))
        rows.read(&want, first)
        if deeper is not None:
            deeper.write(&want, first)
            want.e_out = NULL  # shared with `rows`
        want.sections = TL_RUN_CORE | TL_RUN_CODA
        if self.engine.config.inject != "none" and rows.e is None:
            want.sections |= TL_RUN_PRELUDE  # without layers: the embedding is e
        if first + n == self.seq.n_tokens:
            want.sections |= TL_RUN_HEAD
            want.n_out = 1
            want.out_row = &last
            want.final_x = &final_view[0]
            want.boundary_x = &boundary_view[self.loop_begin, 0]
        want.loop_begin, want.loop_end = self.loop_begin, self.loop_end
        want.window = self.seq.window
        want.n_rows = n
        want.token = tokens
        with self.engine._lock:
            self.engine.check_open()
            for i in range(n):
                self.engine._pos[i] = first + i
            want.pos = self.engine._pos
            want.seq = self.engine._seq
            want.page_table = &table
            self.grow(self.core, first, first + n)
            self.grow(self.coda, first, first + n)
            self.engine.run_locked(&want)
            self.free_behind(self.core, first + n)
            self.free_behind(self.coda, first + n)
        return 0

    cdef int grow(self, Span span, int first, int end) except -1:
        """Takes the full pages of the positions from `first` to `end` that a span still lacks."""
        cdef int row, page, i, part
        if span is None:
            return 0
        part = self.part(span)
        for page in range(first // PAGE, min((end + PAGE - 1) // PAGE, span.n_pages)):
            for row in range(span.n_stages):
                i = row * span.n_pages + page
                if span.pages[i] < 0:
                    span.pages[i] = self.seq.take(span.first_stage + row)
                    span.nbytes += self.seq.store.page_nbytes(part)
                    self.seq.table[(span.first_stage + row) * self.seq.stride + page] = span.pages[i]
        return 0

    cdef void free_behind(self, Span span, int n_positions) noexcept:
        """Gives back the pages of a windowed part that no position from `n_positions` on reads."""
        cdef int row, page, i, part
        cdef int64_t nbytes
        if span is None or not self.seq.part_window[self.part(span)]:
            return
        part = self.part(span)
        nbytes = self.seq.store.page_nbytes(part)
        for page in range(min((n_positions - self.seq.part_window[part] + 1) // PAGE, span.n_pages)):
            for row in range(span.n_stages):
                i = row * span.n_pages + page
                if span.pages[i] >= 0:
                    self.seq.store.give(part, span.pages[i])
                    span.pages[i] = -1
                    span.nbytes -= nbytes
                    self.seq.table[(span.first_stage + row) * self.seq.stride + page] = -1
                    self.seq.store.reserved_nbytes += nbytes  # the promise to this call stands
                    self.seq.reserved_nbytes += nbytes
