"""Running a model's plan in bounded steps, one sequence a step; lockstep.pyx runs many in one.

The lock covers one step. A step that fails leaves its sequence as it was, and everything held stays usable.
"""

from time import perf_counter

import numpy as np

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from posix.unistd cimport getpid
from libc.string cimport memset

from .abi cimport (
    TL_PAGE_POSITIONS, TL_RUN_CODA, TL_RUN_CORE, TL_RUN_HEAD, TL_RUN_PRELUDE, TL_RUN_REBUILD, TL_STAGE_CODA, TL_STAGE_CORE, TL_STAGE_PRELUDE,
    tl_batch,
)
from .cuda_context cimport CudaContext
from .cuda_runner cimport CudaRunner
from .hidden_rows cimport HiddenRows
from .kv_prefix cimport PAGES_KV, PAGES_OPERANDS, KvPrefix
from .plan cimport Plan
from .runner cimport Runner
from .sampling cimport Sampling
from .sequence cimport Sequence
from .signals cimport check_signals
from .step_lock cimport StepLock


cdef class Engine:
    """One model's plan and the lock around it."""

    def __cinit__(self, Plan plan, config):
        self.plan = plan
        self.config = config
        self.max_rows = plan.desc.max_rows
        self.max_out = plan.desc.max_out
        self._lock = StepLock()
        self._pid = getpid()
        self._layer_windows, first = [], 0
        for part, n in ((TL_STAGE_PRELUDE, config.n_prelude), (TL_STAGE_CORE, config.n_core), (TL_STAGE_CODA, config.n_coda)):
            self._layer_windows.append((part, [config.window(layer) for layer in range(first, first + n)]))
            first += n
        self.runner = CudaRunner(plan) if isinstance(plan.context, CudaContext) else Runner(plan)
        n = max(self.max_rows, self.max_out)
        self._pos = <int32_t *>malloc(n * sizeof(int32_t))
        self._seq = <int32_t *>malloc(n * sizeof(int32_t))
        if self._pos == NULL or self._seq == NULL:
            raise MemoryError
        memset(self._seq, 0, n * sizeof(int32_t))

    def __dealloc__(self):
        free(self._pos)
        free(self._seq)

    def close(self):
        """Waits for the step that runs and frees everything; later steps raise. Idempotent.

        From inside a step, by a signal's handler or a finaliser, it only has later steps raise: closing again frees.
        """
        self._closed = True  # before the lock, which a call that steps on and on may take again and again
        if self._lock.is_mine():
            return
        with self._lock:
            if not self._is_freed:
                self._is_freed = True
                self.runner.close()
                self.plan.close()
                self.plan.context.close()

    cdef Sequence new_sequence(self, int loops, int window, int kind=PAGES_KV):
        return Sequence(self.plan.store, loops, window, self.plan.desc.table_stride, self.part_windows(window), kind)

    def part_windows(self, int window):
        """Of prelude, coda, core: the widest window of the part's layers under a cache_window, 0 where one is full."""
        widest = [0, 0, 0]
        for part, own in self._layer_windows:
            merged = [min(w, window) if w and window else w or window for w in own]
            widest[part] = max(merged) if merged and all(merged) else 0
        return tuple(widest)

    def kv_nbytes_for(self, int n_tokens, int loops, int window, KvPrefix base=None):
        """Bytes of KV pages and hidden rows that a prefix of `n_tokens` adds; its full pages from `base` are there already.

        Under a window, which lets pages go, `base` counts for nothing: the answer is at most too large.
        """
        cdef int64_t nbytes = (loops + 1) * self.config.dim * 4
        windows = self.part_windows(window)
        cdef int n_shared = 0 if base is None or any(windows) else base.n_tokens // TL_PAGE_POSITIONS
        for part, w in enumerate(windows):
            n = -(-n_tokens // TL_PAGE_POSITIONS) - n_shared
            if w:
                n -= max(0, n_tokens - w + 1) // TL_PAGE_POSITIONS
            nbytes += n * self.plan.store.page_nbytes(part + 3 * self.plan.keeps_operands) * (loops if part == TL_STAGE_CORE else 1)
        return nbytes

    cdef int check_process(self) except -1:
        """A forked child has the model but not its threads."""
        if getpid() != self._pid:
            raise RuntimeError("the tinyloop.Model was made before this process forked; make the model in the child")
        return 0

    cdef int check_open(self) except -1:
        if self._closed:
            raise RuntimeError("tinyloop.Model is closed; a call that was running cannot go on")
        return 0

    cdef int run_locked(self, tl_batch *batch) except -1:
        """Runs a batch; the lock is held."""
        self.check_open()
        batch.size = sizeof(tl_batch)
        return self.runner.run(batch)

    cdef int step(self, Sequence seq, const int32_t *tokens, int n, tl_batch *want) except -1:
        """Runs the next `n` (<= max_rows) tokens of a sequence; `want` says what of the rows is asked for."""
        cdef int i, first = seq.n_tokens
        cdef const int32_t *table = seq.table
        cdef const int32_t *operands = NULL
        with self._lock:
            self.check_open()
            seq.grow(first + n)
            for i in range(n):
                self._pos[i] = first + i
            want.n_rows = n
            want.sections |= TL_RUN_PRELUDE | TL_RUN_CORE | TL_RUN_CODA
            want.loop_begin, want.loop_end = 0, seq.loops
            want.window = seq.window
            want.token = tokens
            want.pos = self._pos
            want.seq = self._seq
            want.page_table = &table
            if seq.operands is not None:
                seq.operands.grow(first + n)
                operands = seq.operands.table
                want.operand_table = &operands
            self.run_locked(want)
            seq.advance(first + n)
            if seq.operands is not None:
                seq.operands.advance(first + n)
        return check_signals()

    cdef int prefill(self, Sequence seq, const int32_t *tokens, int n_tokens, tl_batch *want, HiddenRows rows=None) except -1:
        """Runs tokens[seq.n_tokens:n_tokens] in steps; `want` applies to the last row. Every token's x goes to `rows`, where given."""
        cdef tl_batch plain
        cdef int n
        cdef int32_t last
        while n_tokens - seq.n_tokens > self.max_rows:
            memset(&plain, 0, sizeof(plain))
            if rows is not None:
                rows.write(&plain, seq.n_tokens)
            self.step(seq, tokens + seq.n_tokens, self.max_rows, &plain)
        n = n_tokens - seq.n_tokens
        last = n - 1
        if want.n_out:
            want.out_row = &last
        if rows is not None:
            rows.write(want, seq.n_tokens)
        self.step(seq, tokens + seq.n_tokens, n, want)
        return 0

    def build_prefix(self, const int32_t[::1] tokens, int loops, int window, KvPrefix base=None, HiddenRows rows=None) -> KvPrefix:
        """Runs tokens (1 or more) and keeps their KV.

        `base` is a prefix of them to go on from; or `rows` takes the x of every token.
        """
        cdef Sequence seq = self.new_sequence(loops, window)
        cdef tl_batch want
        cdef KvPrefix prefix
        final_x = np.empty(self.config.dim, np.float32)
        boundary_x = np.empty((loops, self.config.dim), np.float32)
        cdef float[::1] final_view = final_x
        cdef float[:, ::1] boundary_view = boundary_x
        if self.plan.keeps_operands:
            seq.operands = self.new_sequence(loops, window, PAGES_OPERANDS)
            if base is not None and base.kind == PAGES_KV:
                base = None  # its operands are not there to be held
        try:
            self.open(seq, base, tokens.shape[0])
            memset(&want, 0, sizeof(want))
            want.sections = TL_RUN_HEAD  # final_x comes from there; no logits are asked for
            want.n_out = 1
            want.final_x = &final_view[0]
            want.boundary_x = &boundary_view[0, 0]
            self.prefill(seq, &tokens[0], tokens.shape[0], &want, rows)
            prefix = (seq if seq.operands is None else seq.operands).freeze(final_x, boundary_x)
        finally:
            seq.release()
        return prefix

    cdef int open(self, Sequence seq, KvPrefix base, int n_positions) except -1:
        """Gives a new sequence its base, and the store's promise for all it may need."""
        if base is not None and base.kind == PAGES_KV:
            seq.adopt(base)
        seq.reserve(n_positions, self.max_rows)
        if seq.operands is not None:
            if base is not None:
                seq.operands.adopt(base)
            seq.operands.reserve(n_positions, self.max_rows)
            if base is not None:
                seq.operands.copy_tail(base)
        if base is not None and base.kind == PAGES_KV:
            seq.copy_tail(base)
        elif base is not None:
            self.rebuild(seq, base)
        return 0

    cdef int rebuild(self, Sequence seq, KvPrefix prefix) except -1:
        """Gives an empty sequence the keys and values of a prefix that holds operands: by the products that gave them first."""
        cdef int stride = self.plan.desc.table_stride, part, first
        cdef int32_t *operands = <int32_t *>malloc(seq.n_stages * stride * sizeof(int32_t))
        if operands == NULL:
            raise MemoryError
        try:
            prefix.fill(operands, seq.n_stages, stride)
            with self._lock:
                self.check_open()
                seq.take_like(operands, (prefix.n_tokens + TL_PAGE_POSITIONS - 1) // TL_PAGE_POSITIONS)
            for part, section in ((TL_STAGE_PRELUDE, TL_RUN_PRELUDE), (TL_STAGE_CORE, TL_RUN_CORE), (TL_STAGE_CODA, TL_RUN_CODA)):
                first = 0
                while first < prefix.n_tokens and operands[part * stride + first // TL_PAGE_POSITIONS] < 0:  # behind the window, or no such part
                    first += TL_PAGE_POSITIONS
                while first < prefix.n_tokens:
                    self.rebuild_rows(seq, operands, section, first, min(self.max_rows, prefix.n_tokens - first))
                    first += self.max_rows
            seq.n_tokens = prefix.n_tokens
        finally:
            free(operands)
        return 0

    cdef int rebuild_rows(self, Sequence seq, const int32_t *operands, int section, int first, int n) except -1:
        cdef tl_batch batch
        cdef int i
        cdef const int32_t *table = seq.table
        memset(&batch, 0, sizeof(batch))
        with self._lock:
            for i in range(n):
                self._pos[i] = first + i
            batch.n_rows = n
            batch.sections = TL_RUN_REBUILD | section
            batch.loop_end = seq.loops
            batch.pos = self._pos
            batch.seq = self._seq
            batch.page_table = &table
            batch.operand_table = &operands
            self.run_locked(&batch)
        check_signals()
        return 0

    cdef KvPrefix with_kv(self, KvPrefix prefix):
        """The prefix with pages of keys and values, built again where it holds operands."""
        cdef Sequence seq
        if prefix.kind == PAGES_KV:
            return prefix
        seq = self.new_sequence(prefix.loops, prefix.window)
        try:
            self.open(seq, prefix, prefix.n_tokens)
            return seq.freeze(prefix.final_x, prefix.boundary_x)
        finally:
            seq.release()

    def logits(self, const int32_t[::1] tokens, int loops, int window, bint last_only):
        """Logits of every position, or of the last, float32 (n, vocab_size)."""
        cdef Sequence seq = self.new_sequence(loops, window)
        cdef int n = tokens.shape[0], first
        cdef tl_batch want
        out = np.empty((1 if last_only else n, self.config.vocab_size), np.float32)
        cdef float[:, ::1] view = out
        cdef int32_t[::1] rows = np.arange(self.max_out, dtype=np.int32)
        try:
            seq.reserve(n, self.max_rows)
            if last_only:
                memset(&want, 0, sizeof(want))
                want.sections = TL_RUN_HEAD
                want.n_out = 1
                want.logits = &view[0, 0]
                self.prefill(seq, &tokens[0], n, &want)
            else:
                for first in range(0, n, self.max_out):
                    memset(&want, 0, sizeof(want))
                    want.sections = TL_RUN_HEAD
                    want.n_out = min(self.max_out, n - first)
                    want.out_row = &rows[0]
                    want.logits = &view[first, 0]
                    self.step(seq, &tokens[first], want.n_out, &want)
        finally:
            seq.release()
        return out

    def time_rows(self, const int32_t[::1] tokens, int first, int loops):
        """Seconds of one step that runs these rows at positions from `first` on, their keys and values before it unspecified.

        For benchmarks: the work of a hit, or of a call, without what leads to it.
        """
        cdef Sequence seq = self.new_sequence(loops, 0)
        cdef tl_batch want
        cdef int32_t last = tokens.shape[0] - 1
        cdef int32_t drawn
        cdef Sampling greedy = Sampling(0.0, 0, 1.0, 0.0, 1.0, None, 0, (), self.config.vocab_size)
        try:
            seq.reserve(first + tokens.shape[0], self.max_rows)
            seq.grow(first + tokens.shape[0])
            seq.n_tokens = first
            memset(&want, 0, sizeof(want))
            want.sections = TL_RUN_HEAD
            want.n_out = 1
            want.out_row = &last
            want.sampling = &greedy.c
            want.sampled = &drawn
            begin = perf_counter()
            self.step(seq, &tokens[0], tokens.shape[0], &want)
            return perf_counter() - begin
        finally:
            seq.release()
