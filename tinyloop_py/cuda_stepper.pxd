from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t

from .abi cimport tl_decode, tl_sampling
from .memory cimport Buffer
from .runner cimport Stepper
from .sampling cimport Sampling
from .sequence cimport Sequence


cdef struct Row:
    # What a lane's graph reads and writes of its row, at the head of the lane's device memory.
    tl_sampling sampling
    tl_decode decode
    int32_t token, pos, seq, out_row
    uintptr_t table


cdef class Lane:
    cdef readonly int loops, window
    cdef object device, _runner
    cdef dict _graphs                  # steps in it -> graph
    cdef object _copied                # event: the pinned row has been read
    cdef Buffer _memory                # on the device: Row, stop ids, page table
    cdef Buffer _pinned                # the same layout, and the ring of drawn tokens
    cdef Buffer _history, _bias        # on the device, where they are in use
    cdef int64_t _stop_at, _table_at, _ring_at
    cdef int _stride, _n_stages
    cdef int serial                    # no draw so far has a higher one

    cdef Row *row(self) noexcept
    cdef int start(self, Sampling sampling, const int32_t *tokens, int n_tokens, int n_left) except -1
    cdef int set_bias(self, tl_sampling *sampling) except -1
    cdef int set_history(self, const int32_t *tokens, int n_tokens) except -1
    cdef int send_pages(self, Sequence seq, int first, int end) except -1
    cdef int run_idle(self) except -1
    cdef int enqueue(self) except -1
    cdef int launch(self, int n_steps) except -1
    cdef int32_t wait_for(self, int serial) except -1


cdef class CudaStepper(Stepper):
    cdef object _runner
    cdef Lane _lane
    cdef Sequence _seq
    cdef int _first_serial, _n_left, _n_launched, _n_taken, _n_sent, _first_pos

    cdef int begin(self, Sequence seq, Sampling sampling, const int32_t *tokens, int n_tokens, int n_left) except -1
    cdef int launch_ahead(self) except -1
