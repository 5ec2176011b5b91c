from libc.stdint cimport int32_t

from .abi cimport tl_batch
from .hidden_rows cimport HiddenRows
from .kv_prefix cimport KvPrefix
from .plan cimport Plan
from .runner cimport Runner
from .sequence cimport Sequence
from .step_lock cimport StepLock


cdef class Engine:
    cdef readonly Plan plan
    cdef readonly Runner runner
    cdef readonly object config
    cdef readonly int max_rows, max_out
    cdef StepLock _lock
    cdef bint _closed, _is_freed
    cdef int _pid
    cdef list _layer_windows           # (part, the own window of each of its layers)
    cdef int32_t *_pos
    cdef int32_t *_seq
    cdef object _lockstep              # the rows of steps over several generations; lockstep.pyx

    cdef Sequence new_sequence(self, int loops, int window, int kind=*)
    cdef int rebuild(self, Sequence seq, KvPrefix prefix) except -1
    cdef int rebuild_rows(self, Sequence seq, const int32_t *operands, int section, int first, int n) except -1
    cdef KvPrefix with_kv(self, KvPrefix prefix)
    cdef int step(self, Sequence seq, const int32_t *tokens, int n, tl_batch *want) except -1
    cdef int check_open(self) except -1
    cdef int check_process(self) except -1
    cdef int run_locked(self, tl_batch *batch) except -1
    cdef int prefill(self, Sequence seq, const int32_t *tokens, int n_tokens, tl_batch *want, HiddenRows rows=*) except -1
    cdef int open(self, Sequence seq, KvPrefix base, int n_positions) except -1
