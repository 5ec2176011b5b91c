from libc.stdint cimport int32_t

from .cuda_lane cimport Lane
from .runner cimport Runner, Stepper
from .sampling cimport Sampling
from .sequence cimport Sequence


cdef class CudaStepper(Stepper):
    cdef object _runner
    cdef Lane lane                     # from `board` to `stop`
    cdef readonly Sequence seq
    cdef Sampling _sampling
    cdef const int32_t *_tokens        # the caller's, who keeps them
    cdef int _row, _first_pos, _first_serial, _n_left, _n_launched, _n_taken, _n_sent

    cdef int board(self, Lane lane, int row) except -1
    cdef int make_room(self, int n_steps) except -1


cdef bint fills(Lane lane, list steppers, int n_rows) except -1
cdef int launch_ahead(Lane lane, list steppers) except -1
