from libc.stdint cimport int32_t

from .abi cimport tl_batch, tl_sampling
from .engine cimport Engine
from .generation cimport Generation


cdef class StepRows:
    cdef Engine engine
    cdef int n_rows, n_seqs, n_out
    cdef int32_t *token                # (max_rows,)
    cdef int32_t *pos
    cdef int32_t *seq
    cdef const int32_t **table         # (max_rows,), by sequence
    cdef int32_t *out_row              # (max_out,)
    cdef int32_t *drawn
    cdef tl_sampling *sampling
    cdef object _all_logits            # float32 (max_out, vocab_size) once a generation keeps its logits

    cdef int add(self, Generation generation, int n) except -1
    cdef int run(self, int loops, int window, bint keep_logits) except -1
    cdef int deliver(self, list parts, list counts) except -1


cdef int run_group(list generations, int max_rows) except -1
