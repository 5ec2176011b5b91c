"""The sequences of one beam search: they share the pages of their common stem, and step in one batch.

The store promises pages to all of them together: what a dying beam alone held goes back to that promise, not to other calls.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from .abi cimport TL_PAGE_POSITIONS, TL_RUN_ALL, TL_STAGE_CORE, tl_batch
from .engine cimport Engine
from .generation cimport Generation
from .sequence cimport Sequence
from .signals cimport check_signals

cdef int PAGE = TL_PAGE_POSITIONS


cdef class BeamGroup:
    """Live beams in rank order; a beam's index is its row."""

    def __cinit__(self, Engine engine, int n_beams):
        cdef int i
        self.engine = engine
        self.store = engine.plan.store
        self.seqs = []
        self._token = <int32_t *>malloc(n_beams * sizeof(int32_t))
        self._pos = <int32_t *>malloc(n_beams * sizeof(int32_t))
        self._row = <int32_t *>malloc(n_beams * sizeof(int32_t))
        self._table = <const int32_t **>malloc(n_beams * sizeof(int32_t *))
        if not (self._token and self._pos and self._row and self._table):
            raise MemoryError
        for i in range(n_beams):
            self._row[i] = i

    def __dealloc__(self):
        free(self._token)
        free(self._pos)
        free(self._row)
        free(self._table)

    cdef int64_t beams_nbytes(self, Sequence seq, int n_beams, int n_prompt, int n_total) except -1:
        """Bytes that the beams may need beyond the prompt's full pages and what one sequence is promised.

        Under a window, a beam holds the pages of its window, and shared spans that are let go of as a whole: one more window.
        """
        cdef int64_t nbytes = 0
        cdef int stage, part, n, window, n_seqs
        for stage in range(seq.n_stages):
            part = min(stage, TL_STAGE_CORE)
            n = (n_total + PAGE - 1) // PAGE - n_prompt // PAGE
            window = seq.part_window[part]
            n_seqs = n_beams if window else n_beams - 1
            if window:
                n = min(n, 2 * ((window + PAGE - 1) // PAGE + 2))
            nbytes += <int64_t>n_seqs * n * self.store.page_nbytes(part)
        return nbytes

    cdef int promise(self, Generation prompt, int n_beams) except -1:
        """Before the prompt runs: has the store promise what all beams may need; under "lru" a pool gives idle entries up for it."""
        cdef int64_t nbytes = self.beams_nbytes(prompt.seq, n_beams, prompt.n_prompt, prompt.n_prompt + prompt.max_tokens)
        while True:
            try:
                self.store.reserve(nbytes)
                break
            except BaseException as error:
                if not prompt.make_room(error):
                    raise
        self.promised_nbytes = nbytes
        return 0

    cdef int take_prompt(self, Generation prompt) except -1:
        """The first beam: the sequence of a prompt that has run."""
        cdef Sequence seq = prompt.seq
        prompt.seq = self.engine.new_sequence(seq.loops, seq.window)
        self.seqs.append(seq)
        self.promised_nbytes += seq.reserved_nbytes
        seq.reserved_nbytes = 0
        return 0

    cdef int select(self, list parents) except -1:
        """Beam i goes on from what was beam parents[i]; those that none goes on from end first, so that their pages serve the forks."""
        cdef list old = self.seqs, n_children = [0] * len(self.seqs)
        cdef int64_t used_nbytes = self.store.used_nbytes
        cdef Sequence seq
        for parent in parents:
            n_children[parent] += 1
        for i in range(len(old)):
            if n_children[i] == 0:
                seq = old[i]
                seq.release()
        self.regain(used_nbytes)
        self.seqs = []
        try:
            for parent in parents:
                n_children[parent] -= 1
                self.seqs.append(old[parent] if n_children[parent] == 0 else self.fork(old[parent]))
        except BaseException:
            self.seqs += [old[i] for i in range(len(old)) if n_children[i] > 0]  # for `close`
            raise
        return 0

    cdef Sequence fork(self, Sequence seq):
        cdef Sequence other = seq.fork()
        other.reserved_nbytes, self.promised_nbytes = self.promised_nbytes, 0
        try:
            other.copy_last_page(seq)
        finally:
            self.promised_nbytes, other.reserved_nbytes = other.reserved_nbytes, 0
        return other

    cdef int run(self, const int32_t[::1] tokens, float[:, ::1] logits) except -1:
        """Runs one token for every beam; row i of `logits` is what follows beam i."""
        cdef int first, n = tokens.shape[0]
        for first in range(0, n, self.engine.max_out):
            self.run_rows(tokens, first, min(self.engine.max_out, n - first), logits)
        check_signals()
        return 0

    cdef int run_rows(self, const int32_t[::1] tokens, int first, int n, float[:, ::1] logits) except -1:
        cdef Sequence seq
        cdef tl_batch want
        cdef int i
        memset(&want, 0, sizeof(want))
        with self.engine._lock:
            self.engine.check_open()
            for i in range(n):
                seq = self.seqs[first + i]
                self.grow(seq)
                self._token[i] = tokens[first + i]
                self._pos[i] = seq.n_tokens
                self._table[i] = seq.table
            want.sections = TL_RUN_ALL
            want.loop_begin, want.loop_end = 0, seq.loops
            want.window = seq.window
            want.n_rows = want.n_out = n
            want.token, want.pos = self._token, self._pos
            want.seq = want.out_row = self._row
            want.page_table = self._table
            want.logits = &logits[first, 0]
            self.engine.run_locked(&want)
            for i in range(n):
                self.advance(self.seqs[first + i])
        return 0

    cdef int grow(self, Sequence seq) except -1:
        """Takes the page of a beam's next position where it lacks one."""
        seq.reserved_nbytes, self.promised_nbytes = self.promised_nbytes, 0
        try:
            seq.grow(seq.n_tokens + 1)
        finally:
            self.promised_nbytes, seq.reserved_nbytes = seq.reserved_nbytes, 0
        return 0

    cdef int advance(self, Sequence seq) except -1:
        """Counts a position as written; pages that fall behind the window return to the group's promise."""
        cdef int64_t used_nbytes = self.store.used_nbytes
        seq.advance(seq.n_tokens + 1)
        self.store.unreserve(seq.reserved_nbytes)  # own pages: `regain` counts them with the spans
        seq.reserved_nbytes = 0
        return self.regain(used_nbytes)

    cdef int regain(self, int64_t used_nbytes) except -1:
        """What was freed since `used_nbytes` were in use is promised to the group again."""
        cdef int64_t freed = used_nbytes - self.store.used_nbytes
        if not self.store.closed and freed > 0:
            self.store.reserved_nbytes += freed
            self.promised_nbytes += freed
        return 0

    cdef int close(self) except -1:
        """Ends every beam and the promise. Idempotent."""
        cdef Sequence seq
        for seq in self.seqs:
            seq.release()
        self.seqs = []
        self.store.unreserve(self.promised_nbytes)
        self.promised_nbytes = 0
        return 0
