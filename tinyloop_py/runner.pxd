from libc.stdint cimport int32_t, int64_t

from .abi cimport tl_batch, tl_matrix
from .plan cimport Plan
from .sampling cimport Sampling
from .sequence cimport Sequence


cdef class Runner:
    cdef readonly Plan plan

    cdef int run(self, tl_batch *batch) except -1
    cdef int read_page(self, int part, int32_t page, void *keys, void *values) except -1
    cdef int write_page(self, int part, int32_t page, const void *keys, const void *values) except -1
    cdef int read_operands(self, int part, int32_t page, void *operands) except -1
    cdef int write_operands(self, int part, int32_t page, const void *operands) except -1
    cdef bint runs_ahead(self, Sampling sampling) noexcept
    cdef int64_t operand_row_nbytes(self, const tl_matrix *weight) noexcept
    cdef Stepper stepper(self, Sequence seq, Sampling sampling, const int32_t *tokens, int n_tokens, int n_left)
    cdef int begin(self, list steppers) except -1
    cdef bint go_on(self, list steppers) except -1


cdef class Stepper:
    cdef readonly int n_ahead          # draws that were launched and not taken
    cdef readonly object error         # why it alone could not go on, or None
    cdef readonly int64_t waited_ns    # of the host, for tokens that were not there yet

    cdef bint low(self) noexcept
    cdef int32_t take(self) except -1
    cdef void stop(self) noexcept
