"""Decoding on a CUDA device: a stepper is one sequence's use of a row of a lane.

The rows of a lane begin together and step together, so that all of them have as much ahead of the host; one that ends leaves.
Nobody joins: for others to come in, and for a smaller lane where half of the rows have left, what is ahead is taken first,
and then they begin together on another lane.
"""

from libc.stdint cimport int32_t

from .abi cimport TL_PAGE_POSITIONS
from .cuda_lane cimport Lane
from .runner cimport Runner, Stepper
from .sampling cimport Sampling
from .sequence cimport Sequence

cdef int PAGES_AHEAD = 4     # pages taken at a time: the table goes over once for them


cdef class CudaStepper(Stepper):
    """A sequence from its next draw on, on a lane from `board` to `stop`."""

    def __init__(self, Runner runner, Sequence seq, Sampling sampling):
        self._runner = runner
        self.seq = seq
        self._sampling = sampling

    def __dealloc__(self):
        self.stop()  # of a generation that was dropped

    cdef int board(self, Lane lane, int row) except -1:
        """Takes a row of a lane; the caller sends it to the device."""
        self._first_serial = lane.serial
        lane.set_row(row, self._sampling, self._tokens, self._first_pos + 1, self._n_left)
        self.lane, self._row = lane, row
        return 0

    cdef int make_room(self, int n_steps) except -1:
        """Has pages under the positions that further steps write."""
        cdef int last = self._first_pos + self._n_left
        cdef int end = min(self._first_pos + self._n_launched + n_steps, last)
        cdef int n_pages = (end + TL_PAGE_POSITIONS - 1) // TL_PAGE_POSITIONS
        if n_pages > self._n_sent:
            self.seq.grow(min((n_pages + PAGES_AHEAD - 1) * TL_PAGE_POSITIONS, last))
            self.lane.send_pages(self._row, self.seq, self._n_sent, self.seq.n_pages)
            self._n_sent = self.seq.n_pages
        return 0

    cdef bint low(self) noexcept:
        if self.lane is None:
            return True
        return self._n_launched < self._n_left and self.n_ahead <= self.lane.max_ahead - self.lane.steps_of_graph

    cdef int32_t take(self) except -1:
        cdef int32_t token
        if self.lane is None or self.n_ahead == 0:
            raise RuntimeError("nothing of this decoding is ahead")
        token = self.lane.wait_for(self._row, self._first_serial + self._n_taken + 1, &self.waited_ns)
        self._n_taken += 1
        self.n_ahead -= 1
        self.seq.advance(self._first_pos + self._n_taken)
        return token

    cdef void stop(self) noexcept:
        cdef Lane lane = self.lane
        self.lane = None
        self.n_ahead = 0
        if lane is not None and lane.leave(self._row) and self._runner is not None:
            self._runner.take_back(lane)


cdef bint fills(Lane lane, list steppers, int n_rows) except -1:
    """Whether a lane is the right one for steppers to go on together: it has `n_rows` rows, and steps all of them and no other."""
    cdef CudaStepper s
    if lane is None or lane.n_rows != n_rows or lane.n_used != len(steppers):
        return False
    for s in steppers:
        if s.lane is not lane:
            return False
    return True


cdef int launch_ahead(Lane lane, list steppers) except -1:
    """Launches as many steps as may be ahead of a lane's steppers. One that lacks a page gets an `error`, and leaves.

    The engine's lock is held.
    """
    cdef CudaStepper s
    cdef int n, left, ahead
    while True:
        left = ahead = 0
        for s in steppers:
            if s.lane is not None:
                left = max(left, s._n_left - s._n_launched)
                ahead = max(ahead, s.n_ahead)
        if left == 0 or ahead > lane.max_ahead - lane.steps_of_graph:
            return 0
        n = lane.steps_of_graph if left >= lane.steps_of_graph else 1
        for s in steppers:
            if s.lane is not None:
                try:
                    s.make_room(n)
                except Exception as error:
                    s.error = error
                    s.stop()
        if lane.n_used == 0:
            return 0
        lane.stop_rows()
        lane.serial += n  # before: draws of a launch that an exception cut off may yet come, and are nobody's
        try:
            lane.launch(n)
        except BaseException:  # whether it was launched or not: all begin anew from what was taken
            for s in steppers:
                s.stop()
            raise
        for s in steppers:
            if s.lane is not None:
                left = min(n, s._n_left - s._n_launched)
                s._n_launched += left
                s.n_ahead += left
