from libc.stdint cimport int32_t, int64_t

from .abi cimport tl_batch
from .plan cimport Plan
from .sampling cimport Sampling
from .sequence cimport KvPrefix, Sequence


cdef class Engine:
    cdef readonly Plan plan
    cdef readonly object config
    cdef readonly int max_rows, max_out
    cdef object _lock
    cdef bint _closed
    cdef int32_t *_pos
    cdef int32_t *_seq

    cdef Sequence new_sequence(self, int loops, int window)
    cdef int step(self, Sequence seq, const int32_t *tokens, int n, tl_batch *want) except -1
    cdef int run_locked(self, tl_batch *batch) except -1
    cdef int prefill(self, Sequence seq, const int32_t *tokens, int n_tokens, tl_batch *want) except -1
    cdef int open(self, Sequence seq, KvPrefix base, int n_positions) except -1


cdef class Generation:
    cdef Engine engine
    cdef readonly Sampling sampling
    cdef Sequence seq
    cdef int32_t *tokens
    cdef readonly int n_prompt, n_tokens, max_tokens, n_cached
    cdef int32_t _drawn
    cdef bint _has_drawn
    cdef readonly str finish_reason

    cdef int start(self, KvPrefix prefix) except -1
    cdef int ask(self, tl_batch *want) except -1
    cdef int run_head(self, const float[::1] final_x, tl_batch *want) except -1
    cdef int finish(self, str reason) except -1
    cdef int next_token(self) except? -2
