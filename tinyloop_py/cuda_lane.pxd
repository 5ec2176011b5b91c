from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t

from .abi cimport tl_decode, tl_sampling
from .memory cimport Buffer
from .plan cimport Plan
from .sampling cimport Sampling
from .sequence cimport Sequence


cdef inline int64_t padded(int64_t nbytes) noexcept:
    return (nbytes + 255) // 256 * 256


cdef enum:
    MAX_STOP = 256           # ids of stop tokens of a row
    MAX_STEPS = 4            # of one graph


cdef struct LaneRows:
    # Where a lane's rows are, on the device or pinned: what its graphs read and write, (n_rows,) each where nothing else is said.
    tl_sampling *sampling
    tl_decode *decode
    int32_t *token
    int32_t *pos
    int32_t *index             # 0, 1, ..: a row's sequence, and its place at the head
    uintptr_t *table
    int32_t *stop              # (n_rows, MAX_STOP)
    int32_t *pages             # (n_rows, n_stages, stride): the page tables
    uint64_t *ring             # (n_rows, RING) drawn tokens; pinned alone


cdef class Lane:
    cdef readonly int loops, window, n_rows
    cdef readonly int steps_of_graph   # of the largest graph; the others have one step
    cdef readonly int max_ahead        # steps launched whose tokens the host has not taken, at most
    cdef object device
    cdef Plan _plan
    cdef uintptr_t _graphs[MAX_STEPS + 1]  # by the steps in it; 0 where none is made yet
    cdef object _copied                # event: the pinned rows have been read
    cdef Buffer _memory, _pinned       # LaneRows on the device, and the same pinned
    cdef LaneRows _there, _here
    cdef int64_t _head_nbytes          # of them before the page tables
    cdef list _history, _bias          # of each row on the device, where they are in use
    cdef int _stride, _n_stages
    cdef int serial                    # no draw so far has a higher one
    cdef int64_t _step_ns              # what a step takes the device, 0 where that is not known yet
    cdef int64_t _waited_at            # when the token of the draw `_waited_serial` came, for which the host waited
    cdef int _waited_serial
    cdef list left                     # rows that their stepper has left, and that may still be at work
    cdef int n_used                    # rows that a stepper has

    cdef int64_t lay_out(self, uintptr_t base, LaneRows *rows) noexcept
    cdef int clear(self) except -1
    cdef int set_row(self, int row, Sampling sampling, const int32_t *tokens, int n_tokens, int n_left) except -1
    cdef int set_bias(self, int row, tl_sampling *sampling) except -1
    cdef uintptr_t history_of(self, int row, const int32_t *tokens, int n_tokens) except 0
    cdef int send_rows(self) except -1
    cdef int send_pages(self, int row, Sequence seq, int first, int end) except -1
    cdef bint leave(self, int row) noexcept
    cdef int stop_rows(self) except -1
    cdef int launch(self, int n_steps) except -1
    cdef int enqueue(self, void *stream) except -1
    cdef int64_t pace(self, int serial) noexcept
    cdef void look_ahead(self) noexcept
    cdef int32_t wait_for(self, int row, int serial, int64_t *waited_ns) except -1
