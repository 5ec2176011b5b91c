"""Decoding on a CUDA device: the whole step, draw and stop test included, is a graph, and steps are launched ahead of the
host, which reads their tokens from memory that the device writes to.

A lane is the device's state of one row and the graphs that step it; a stepper is one sequence's use of a lane. Everything is
in the order of one stream: a lane or a page that changes hands is written for its new owner after the old one's last step.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from .abi cimport TL_PAGE_POSITIONS, TL_RUN_ALL, TL_STAGE_CORE, tl_batch, tl_decode, tl_sampling
from .cuda_context cimport CudaContext
from .plan cimport Plan
from .runner cimport Runner, Stepper
from .sampling cimport Sampling
from .sequence cimport Sequence

from .cuda_memory import DeviceBuffer, PinnedBuffer

cdef int RING = 256          # drawn tokens that the host may lag behind
cdef int STEPS_OF_GRAPH = 4  # one launch costs the host as much as one step of a small model
cdef int AHEAD = 8           # steps launched and not read yet, at most
cdef int PAGES_AHEAD = 4     # pages taken at a time: the table goes over once for them
cdef int MAX_STOP = 256      # ids of stop tokens
cdef int SPINS = 1 << 14     # looks at a token's place before the device is asked whether it still works
cdef int LAST_SERIAL = 1 << 30

cdef extern from *:
    """
    #if defined(__x86_64__)
    #define tl_relax() __builtin_ia32_pause()
    #else
    #define tl_relax() ((void)0)
    #endif
    static int tl_spin(const volatile uint64_t *place, unsigned serial, int n) {
      for (int i = 0; i < n; i++) {
        if ((unsigned)(__atomic_load_n(place, __ATOMIC_ACQUIRE) >> 32) == serial) return 1;
        tl_relax();
      }
      return 0;
    }
    """
    int tl_spin(const void *place, unsigned int serial, int n) noexcept nogil


cdef inline int64_t padded(int64_t nbytes) noexcept:
    return (nbytes + 255) // 256 * 256


cdef class Lane:
    """One row of a depth and window on the device."""

    def __init__(self, Runner runner, int loops, int window):
        cdef Plan plan = runner.plan
        self.loops, self.window = loops, window
        self.device = (<CudaContext>plan.context).device
        self._runner = runner
        self._graphs = {}
        self._stride = plan.desc.table_stride
        self._n_stages = TL_STAGE_CORE + loops
        self._stop_at = padded(sizeof(Row))
        self._table_at = self._stop_at + MAX_STOP * sizeof(int32_t)
        self._ring_at = self._table_at + padded(self._n_stages * self._stride * sizeof(int32_t))
        self._memory = DeviceBuffer(self.device, self._ring_at, "the state of a decoding row")
        self._pinned = PinnedBuffer(self.device, self._ring_at + RING * sizeof(uint64_t), "the state of a decoding row")
        memset(<void *>self._pinned.pointer, 0, self._pinned.nbytes)
        self._copied = self.device.make_event()
        self.run_idle()

    def __dealloc__(self):
        try:
            for graph in self._graphs.values():
                self.device.drop_graph(graph)
            self.device.drop_event(self._copied)
        except Exception:  # the interpreter goes down, or `__init__` failed
            pass

    cdef int run_idle(self) except -1:
        """One step of no row: loads every kernel, which the driver may not do while a graph is recorded."""
        self.row().pos = -1
        self.row().table = self._memory.pointer + self._table_at
        self.device.copy(self._memory.pointer, self._pinned.pointer, self._table_at)
        self.device.record(self._copied)
        self.enqueue()
        return 0

    cdef Row *row(self) noexcept:
        return <Row *>self._pinned.pointer

    cdef int start(self, Sampling sampling, const int32_t *tokens, int n_tokens, int n_left) except -1:
        """Sends the row's state: its last token runs first, and draws begin after `serial`."""
        cdef Row *row = self.row()
        cdef int32_t *stop = <int32_t *>(self._pinned.pointer + self._stop_at)
        self.device.wait_for(self._copied)
        if self.serial > LAST_SERIAL:
            self.device.wait("decoding")
            memset(<void *>(self._pinned.pointer + self._ring_at), 0, RING * sizeof(uint64_t))
            self.serial = 0
        memset(row, 0, sizeof(Row))
        row.sampling = sampling.c
        row.sampling.n_history = 0
        row.sampling.history = NULL
        self.set_bias(&row.sampling)
        row.decode.size = sizeof(tl_decode)
        row.decode.n_drawn = self.serial
        row.decode.n_left = n_left
        for token in sampling.stop_tokens:
            stop[row.decode.n_stop] = token
            row.decode.n_stop += 1
        row.decode.stop = <const int32_t *>(self._memory.pointer + self._stop_at)
        if sampling.c.repetition_penalty != 1.0:
            self.set_history(tokens, n_tokens)
            row.decode.history = <int32_t *>self._history.pointer
        row.decode.out = <uint64_t *>(self._pinned.pointer + self._ring_at)
        row.decode.out_size = RING
        row.token = tokens[n_tokens - 1]
        row.pos = n_tokens - 1
        row.table = self._memory.pointer + self._table_at
        self.device.copy(self._memory.pointer, self._pinned.pointer, self._table_at)
        self.device.record(self._copied)
        return 0

    cdef int set_bias(self, tl_sampling *sampling) except -1:
        cdef int64_t nbytes = sampling.n_bias * sizeof(int32_t)
        cdef uintptr_t values
        if not nbytes:
            return 0
        if self._bias is None or self._bias.nbytes < 2 * padded(nbytes):
            self._bias = DeviceBuffer(self.device, 2 * padded(nbytes), "logit_bias")
        values = self._bias.pointer + padded(nbytes)
        self.device.copy(self._bias.pointer, <uintptr_t>sampling.bias_ids, nbytes)
        self.device.copy(values, <uintptr_t>sampling.bias_values, nbytes)
        sampling.bias_ids, sampling.bias_values = <const int32_t *>self._bias.pointer, <const float *>values
        return 0

    cdef int set_history(self, const int32_t *tokens, int n_tokens) except -1:
        if self._history is None:
            self._history = DeviceBuffer(self.device, (<Runner>self._runner).plan.desc.max_pos * sizeof(int32_t), "the penalty's history")
        self.device.copy(self._history.pointer, <uintptr_t>tokens, n_tokens * sizeof(int32_t))
        return 0

    cdef int send_pages(self, Sequence seq, int first, int end) except -1:
        """Sends the columns first .. end - 1 of the sequence's page table."""
        cdef int stage
        cdef int64_t width = (end - first) * sizeof(int32_t), pitch = self._stride * sizeof(int32_t), at = self._table_at + first * sizeof(int32_t)
        if not first:  # the pinned table may still be on its way for the lane's last sequence
            self.device.wait_for(self._copied)
        for stage in range(self._n_stages):
            memcpy(<void *>(self._pinned.pointer + at + stage * pitch), seq.table + stage * self._stride + first, width)
        self.device.copy_rows(self._memory.pointer + at, pitch, self._pinned.pointer + at, pitch, width, self._n_stages)
        self.device.record(self._copied)
        return 0

    cdef int launch(self, int n_steps) except -1:
        """Enqueues steps; the graph of each number of them is made once."""
        graph = self._graphs.get(n_steps)
        if graph is None:
            self._graphs[n_steps] = graph = self._record(n_steps)
        self.device.launch(graph)
        return 0

    def _record(self, int n_steps):
        self.device.begin_graph()
        try:
            for _ in range(n_steps):
                self.enqueue()
        except BaseException:
            self.device.abandon_graph()
            raise
        return self.device.end_graph()

    cdef int enqueue(self) except -1:
        """Enqueues one step of the row, whatever its state will be by then."""
        cdef tl_batch batch
        cdef Plan plan = (<Runner>self._runner).plan
        cdef Row *row = <Row *>self._memory.pointer  # of the device: only addresses are taken
        memset(&batch, 0, sizeof(batch))
        batch.size = sizeof(batch)
        batch.sections = TL_RUN_ALL
        batch.loop_end = self.loops
        batch.window = self.window
        batch.n_rows = batch.n_out = 1
        batch.token = &row.token
        batch.pos = &row.pos
        batch.seq = &row.seq
        batch.out_row = &row.out_row
        batch.page_table = <const int32_t *const *>&row.table
        batch.sampling = &row.sampling
        batch.decode = &row.decode
        plan.context.library.check(
            plan.context.library.f.plan_enqueue(plan.handle, &batch, plan.context.stream), "enqueueing a step"
        )
        return 0

    cdef int32_t wait_for(self, int serial) except -1:
        """The token of a draw, once it is there; the GIL is released meanwhile."""
        cdef const uint64_t *place = <const uint64_t *>(self._pinned.pointer + self._ring_at) + (serial - 1) % RING
        cdef bint found
        while True:
            with nogil:
                found = tl_spin(place, serial, SPINS)
            if found:
                return <int32_t>(place[0] & 0xffffffff)
            if self.device.is_idle("decoding") and not tl_spin(place, serial, 1):
                raise RuntimeError("CUDA decoding: the device is done and a token is missing")


cdef class CudaStepper(Stepper):
    """The sequence that a lane steps, from `begin` to `stop`."""

    def __init__(self, Runner runner, Lane lane):
        self._runner = runner
        self._lane = lane

    @staticmethod
    def takes(Sampling sampling):
        """Whether a lane has room for what a draw needs."""
        return len(sampling.stop_tokens) <= MAX_STOP

    cdef int begin(self, Sequence seq, Sampling sampling, const int32_t *tokens, int n_tokens, int n_left) except -1:
        self._seq = seq
        self._first_pos = n_tokens - 1
        self._n_left = n_left
        self._lane.start(sampling, tokens, n_tokens, n_left)
        self._first_serial = self._lane.serial
        self.launch_ahead()
        return 0

    cdef int launch_ahead(self) except -1:
        """Launches as many steps as may be ahead, with pages under the positions that they write. The engine's lock is held."""
        cdef int n, pages, last = self._first_pos + self._n_left, wanted
        while self._n_launched < self._n_left and self._n_launched - self._n_taken <= AHEAD - STEPS_OF_GRAPH:
            n = STEPS_OF_GRAPH if self._n_left - self._n_launched >= STEPS_OF_GRAPH else 1
            pages = (self._first_pos + self._n_launched + n + TL_PAGE_POSITIONS - 1) // TL_PAGE_POSITIONS
            if pages > self._n_sent:
                wanted = min((pages + PAGES_AHEAD - 1) * TL_PAGE_POSITIONS, last)
                self._seq.grow(wanted)
                self._lane.send_pages(self._seq, self._n_sent, self._seq.n_pages)
                self._n_sent = self._seq.n_pages
            self._lane.launch(n)
            self._n_launched += n
            self._lane.serial = self._first_serial + self._n_launched
        return 0

    cdef int32_t next(self) except -1:
        cdef Lane lane = self._lane
        cdef int32_t token
        if lane is None or self._n_taken == self._n_left:
            raise RuntimeError("this decoding has ended")
        if self._n_launched - self._n_taken <= AHEAD - STEPS_OF_GRAPH and self._n_launched < self._n_left:
            with self._runner.lock:
                self._runner.check_open()
                self.launch_ahead()
        token = lane.wait_for(self._first_serial + self._n_taken + 1)
        self._n_taken += 1
        self._seq.advance(self._first_pos + self._n_taken)
        return token

    cdef void stop(self) noexcept:
        lane, self._lane = self._lane, None
        if lane is not None:
            self._runner.take_back(lane)
