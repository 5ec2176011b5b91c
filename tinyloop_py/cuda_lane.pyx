"""Rows on a CUDA device that step together: their state, and the graphs that step it, draw and stop test included.

What is launched once runs without the host, which reads the drawn tokens from pinned memory that the device writes to. Everything is
in the order of one stream: a lane or a page that changes hands is written for its new owner after the old one's last step.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from .abi cimport TL_RUN_ALL, TL_STAGE_CORE, tl_batch, tl_decode, tl_sampling
from .cuda_context cimport CudaContext
from .plan cimport Plan
from .sampling cimport Sampling
from .sequence cimport Sequence

from .errors import BackendError

from .cuda_memory import DeviceBuffer, PinnedBuffer

cdef int RING = 256          # drawn tokens of a row that the host may lag behind
cdef int SPINS = 1 << 14     # looks at a token's place before the device is asked whether it still works
cdef int N_ASKED = 64        # times that it is, before Python may act on a signal: some 50 ms
cdef int LAST_SERIAL = 1 << 30
cdef int64_t COVER_NS = 4000000  # of work that is launched beyond the step that runs: as late as the host may come

cdef extern from *:
    """
    #include <time.h>
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
    static int64_t now_ns(void) {
      struct timespec now;
      clock_gettime(CLOCK_MONOTONIC, &now);
      return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
    }
    """
    int tl_spin(const void *place, unsigned int serial, int n) noexcept nogil
    int64_t now_ns() noexcept nogil


cdef class Lane:
    """Rows of a depth and window.

    Parameters
    ----------
    n_rows
        Rows of every step; those that no sequence uses do nothing.
    """

    def __init__(self, Plan plan, int loops, int window, int n_rows):
        cdef int64_t nbytes
        cdef int row
        self.loops, self.window, self.n_rows = loops, window, n_rows
        self.steps_of_graph = MAX_STEPS if n_rows == 1 else 1
        self.max_ahead = 2 * MAX_STEPS if n_rows == 1 else 4
        self.device = (<CudaContext>plan.context).device
        self._plan = plan
        self._history, self._bias = [None] * n_rows, [None] * n_rows
        self.left = []
        self._stride = plan.desc.table_stride
        self._n_stages = TL_STAGE_CORE + loops
        nbytes = self.lay_out(0, &self._there)
        self._memory = DeviceBuffer(self.device, <int64_t><uintptr_t>self._there.ring, "the state of decoding rows")
        self._pinned = PinnedBuffer(self.device, nbytes, "the state of decoding rows")
        self.lay_out(self._memory.pointer, &self._there)
        self.lay_out(self._pinned.pointer, &self._here)
        memset(<void *>self._pinned.pointer, 0, nbytes)
        for row in range(n_rows):
            self._here.index[row] = row
            self._here.table[row] = <uintptr_t>(self._there.pages + <int64_t>row * self._n_stages * self._stride)
        self._copied = self.device.make_event()
        self.clear()
        self.send_rows()
        self.enqueue(plan.context.stream)  # loads every kernel, which the driver may not do while a graph is recorded

    def __dealloc__(self):
        try:
            for n_steps in range(MAX_STEPS + 1):
                if self._graphs[n_steps]:
                    self.device.drop_graph(self._graphs[n_steps])
            self.device.drop_event(self._copied)
        except Exception:  # the interpreter goes down, or `__init__` failed
            pass

    cdef int64_t lay_out(self, uintptr_t base, LaneRows *rows) noexcept:
        """Has `rows` point into memory at `base`, and gives the bytes it takes; without the ring, what lies before it."""
        cdef int64_t n = self.n_rows, at = base
        rows.sampling = <tl_sampling *>at
        at += padded(n * sizeof(tl_sampling))
        rows.decode = <tl_decode *>at
        at += padded(n * sizeof(tl_decode))
        rows.table = <uintptr_t *>at
        at += padded(n * sizeof(uintptr_t))
        rows.token, rows.pos, rows.index = <int32_t *>at, <int32_t *>at + n, <int32_t *>at + 2 * n
        at += padded(3 * n * sizeof(int32_t))
        rows.stop = <int32_t *>at
        at += n * MAX_STOP * sizeof(int32_t)
        self._head_nbytes = at - base
        rows.pages = <int32_t *>at
        at += padded(n * self._n_stages * self._stride * sizeof(int32_t))
        rows.ring = <uint64_t *>at
        return at + n * RING * sizeof(uint64_t) - base

    # ---- who steps

    cdef int clear(self) except -1:
        """Before rows are set: none is at work, once what is enqueued has read the pinned ones."""
        cdef int row
        self.device.wait_for(self._copied)
        if self.serial > LAST_SERIAL:
            self.device.wait("decoding")
            memset(self._here.ring, 0, self.n_rows * RING * sizeof(uint64_t))
            self.serial = 0
        for row in range(self.n_rows):
            self._here.pos[row] = -1
        self.left = []
        self._waited_serial = -1  # the device may have had nothing to do
        return 0

    cdef int set_row(self, int row, Sampling sampling, const int32_t *tokens, int n_tokens, int n_left) except -1:
        """Sets a row's state: its last token runs first, and draws begin after `serial`."""
        cdef tl_sampling *asked = self._here.sampling + row
        cdef tl_decode *decode = self._here.decode + row
        cdef int32_t *stop = self._here.stop + row * MAX_STOP
        asked[0] = sampling.c
        asked.n_history = 0
        asked.history = NULL
        self.set_bias(row, asked)
        memset(decode, 0, sizeof(tl_decode))
        decode.size = sizeof(tl_decode)
        decode.n_drawn = self.serial
        decode.n_left = n_left
        for token in sampling.stop_tokens:
            stop[decode.n_stop] = token
            decode.n_stop += 1
        decode.stop = self._there.stop + row * MAX_STOP
        if sampling.c.repetition_penalty != 1.0:
            decode.history = <int32_t *>self.history_of(row, tokens, n_tokens)
        decode.out = self._here.ring + row * RING
        decode.out_size = RING
        self._here.token[row] = tokens[n_tokens - 1]
        self._here.pos[row] = n_tokens - 1
        self.n_used += 1
        return 0

    cdef int set_bias(self, int row, tl_sampling *sampling) except -1:
        cdef int64_t nbytes = sampling.n_bias * sizeof(int32_t)
        cdef Buffer bias = self._bias[row]
        cdef uintptr_t values
        if not nbytes:
            return 0
        if bias is None or bias.nbytes < 2 * padded(nbytes):
            self._bias[row] = bias = DeviceBuffer(self.device, 2 * padded(nbytes), "logit_bias")
        values = bias.pointer + padded(nbytes)
        self.device.copy(bias.pointer, <uintptr_t>sampling.bias_ids, nbytes)
        self.device.copy(values, <uintptr_t>sampling.bias_values, nbytes)
        sampling.bias_ids, sampling.bias_values = <const int32_t *>bias.pointer, <const float *>values
        return 0

    cdef uintptr_t history_of(self, int row, const int32_t *tokens, int n_tokens) except 0:
        cdef Buffer history = self._history[row]
        if history is None:
            self._history[row] = history = DeviceBuffer(self.device, self._plan.desc.max_pos * sizeof(int32_t), "the penalty's history")
        self.device.copy(history.pointer, <uintptr_t>tokens, n_tokens * sizeof(int32_t))
        return history.pointer

    cdef int send_rows(self) except -1:
        """Sends the state of all rows that was set."""
        self.device.copy(self._memory.pointer, self._pinned.pointer, self._head_nbytes)
        self.device.record(self._copied)
        return 0

    cdef int send_pages(self, int row, Sequence seq, int first, int end) except -1:
        """Sends the columns first .. end - 1 of a row's page table, which the pinned table has not had since `clear`."""
        cdef int64_t width = (end - first) * sizeof(int32_t), pitch = self._stride * sizeof(int32_t)
        cdef int64_t at = <int64_t>row * self._n_stages * self._stride + first
        cdef int stage
        for stage in range(self._n_stages):
            memcpy(self._here.pages + at + stage * self._stride, seq.table + stage * self._stride + first, width)
        self.device.copy_rows(<uintptr_t>(self._there.pages + at), pitch, <uintptr_t>(self._here.pages + at), pitch, width, self._n_stages)
        self.device.record(self._copied)
        return 0

    cdef bint leave(self, int row) noexcept:
        """A row's stepper goes; steps launched so far still run. Whether that was the last of them."""
        self.left.append(row)
        self.n_used -= 1
        return self.n_used == 0

    cdef int stop_rows(self) except -1:
        """Has the rows that were left do nothing in what is launched from here on."""
        cdef int row
        while self.left:
            row = self.left[len(self.left) - 1]
            self._here.pos[row] = -1
            self.device.copy(<uintptr_t>(self._there.pos + row), <uintptr_t>(self._here.pos + row), sizeof(int32_t))
            self.device.record(self._copied)
            self.left.pop()
        return 0

    # ---- steps

    cdef int launch(self, int n_steps) except -1:
        """Enqueues steps; the graph of each number of them is made once."""
        if not self._graphs[n_steps]:
            self._graphs[n_steps] = self._record(n_steps)
        return (<CudaContext>self._plan.context).launch(self._graphs[n_steps])

    def _record(self, int n_steps):
        cdef uintptr_t stream
        try:
            stream = self.device.begin_graph()
            for _ in range(n_steps):
                self.enqueue(<void *>stream)
        except BaseException:
            self.device.abandon_graph()
            raise
        return self.device.end_graph()

    cdef int enqueue(self, void *stream) except -1:
        """Enqueues one step of the rows, whatever their state will be by then."""
        cdef tl_batch batch
        cdef LaneRows *there = &self._there
        memset(&batch, 0, sizeof(batch))
        batch.size = sizeof(batch)
        batch.sections = TL_RUN_ALL
        batch.loop_end = self.loops
        batch.window = self.window
        batch.n_rows = batch.n_out = self.n_rows
        batch.token = there.token
        batch.pos = there.pos
        batch.seq = batch.out_row = there.index
        batch.page_table = <const int32_t *const *>there.table
        batch.sampling = there.sampling
        batch.decode = there.decode
        self._plan.context.library.check(
            self._plan.context.library.f.plan_enqueue(self._plan.handle, &batch, stream), "enqueueing a step"
        )
        return 0

    cdef int64_t pace(self, int serial) noexcept:
        """A token was waited for and is there: two in a row tell how long a step takes. The time, in ns."""
        cdef int64_t now = now_ns(), step_ns = now - self._waited_at
        if serial == self._waited_serial + 1 and step_ns > 0:
            self._step_ns = step_ns if self._step_ns == 0 else (7 * self._step_ns + step_ns) // 8
            self.look_ahead()
        self._waited_serial, self._waited_at = serial, now
        return now

    cdef void look_ahead(self) noexcept:
        """Has as much ahead as covers a late host. More would only be in the way of who comes next, or be run for nothing."""
        cdef int64_t n = 1 + (COVER_NS + self._step_ns - 1) // self._step_ns
        if self.n_rows == 1:
            self.max_ahead = <int>min(n, 2 * MAX_STEPS)
            self.steps_of_graph = MAX_STEPS if n >= 6 else 2 if n >= 3 else 1  # several in a launch divide what it costs the host
        else:
            self.max_ahead = <int>min(n, 4)

    cdef int32_t wait_for(self, int row, int serial, int64_t *waited_ns) except -1:
        """The token of a row's draw, once it is there; the GIL is released while it is not, and that time is added to `waited_ns`."""
        cdef const uint64_t *place = self._here.ring + row * RING + (serial - 1) % RING
        cdef CudaContext context = <CudaContext>self._plan.context
        cdef bint found = tl_spin(place, serial, 1)
        cdef int64_t begin
        if not found:
            begin = now_ns()
            while not found:
                with nogil:
                    for _ in range(N_ASKED):
                        found = tl_spin(place, serial, SPINS)
                        if found or not context.works():
                            break
                if not found and self.device.is_idle("decoding") and not tl_spin(place, serial, 1):
                    raise BackendError("CUDA decoding: the device is done and a token is missing")
            waited_ns[0] += self.pace(serial) - begin
        return <int32_t>(place[0] & 0xffffffff)
