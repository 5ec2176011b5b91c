from libc.stdint cimport int32_t, int64_t

from .abi cimport tl_batch, tl_matrix
from .plan cimport Plan
from .sampling cimport Sampling
from .sequence cimport Sequence


cdef class Runner:
    cdef readonly Plan plan
    cdef readonly bint keeps_hidden_rows  # whether batches hand x and e of every row out, and go on from them

    cdef int run(self, tl_batch *batch) except -1
    cdef int read_page(self, int part, int32_t page, void *keys, void *values) except -1
    cdef int write_page(self, int part, int32_t page, const void *keys, const void *values) except -1
    cdef int read_operands(self, int part, int32_t page, void *operands) except -1
    cdef int write_operands(self, int part, int32_t page, const void *operands) except -1
    cdef int64_t operand_row_nbytes(self, const tl_matrix *weight) noexcept
    cdef Stepper stepper(self, Sequence seq, Sampling sampling, const int32_t *tokens, int n_tokens, int n_left)


cdef class Stepper:
    cdef int32_t next(self) except -1
    cdef void stop(self) noexcept
