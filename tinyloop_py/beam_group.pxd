from libc.stdint cimport int32_t, int64_t

from .engine cimport Engine
from .generation cimport Generation
from .pages cimport KvStore
from .sequence cimport Sequence


cdef class BeamGroup:
    cdef Engine engine
    cdef KvStore store
    cdef list seqs                     # a Sequence for each live beam
    cdef int64_t promised_nbytes       # what the store still promises to all of them together
    cdef int32_t *_token
    cdef int32_t *_pos
    cdef int32_t *_row
    cdef const int32_t **_table

    cdef int64_t beams_nbytes(self, Sequence seq, int n_beams, int n_prompt, int n_total) except -1
    cdef int promise(self, Generation prompt, int n_beams) except -1
    cdef int take_prompt(self, Generation prompt) except -1
    cdef int select(self, list parents) except -1
    cdef Sequence fork(self, Sequence seq)
    cdef int run(self, const int32_t[::1] tokens, float[:, ::1] logits) except -1
    cdef int run_rows(self, const int32_t[::1] tokens, int first, int n, float[:, ::1] logits) except -1
    cdef int grow(self, Sequence seq) except -1
    cdef int advance(self, Sequence seq) except -1
    cdef int regain(self, int64_t used_nbytes) except -1
    cdef int close(self) except -1
