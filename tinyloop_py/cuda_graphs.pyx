"""Batches that the host waits for and that come again, as graphs: one row of each of some sequences, for beams and wherever logits are
asked for; and some rows of one sequence, as behind a prefix that a pool held.

Rows are filled up to a power of two by rows that do nothing, so that few graphs serve all numbers. Rows that step by themselves
have graphs of their own (cuda_lane.pyx).
"""

from libc.stdint cimport int32_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from .abi cimport TL_RUN_ALL, tl_batch, tl_sampling, tl_status
from .cuda_context cimport CudaContext
from .plan cimport Plan

from .errors import OutOfMemoryError

cdef int MAX_GRAPHS = 32
cdef int PROMPT_ROWS = 128  # of one sequence; with more, kernels take longer than their launches


cdef int power_of_two(int n) noexcept:
    """The first one that is not below n."""
    cdef int rows = 1
    while rows < n:
        rows *= 2
    return rows


cdef int rows_for(Plan plan, int n) noexcept:
    """Rows of a graph for `n` <= max_out sequences."""
    return min(power_of_two(n), plan.desc.max_out)


cdef int rows_of(Plan plan, const tl_batch *batch) noexcept:
    """Rows of the graph of a batch, 0 where it has none."""
    cdef int i, n = batch.n_rows, rows = 0
    cdef bint steps = batch.n_out == n
    if batch.sections != TL_RUN_ALL or batch.loop_begin or batch.operand_table != NULL:
        return 0
    if batch.final_x != NULL or batch.boundary_x != NULL or batch.x_in != NULL or batch.x_out != NULL or batch.e_out != NULL:
        return 0
    if steps and 1 <= n <= plan.desc.max_out:
        rows = rows_for(plan, n)
    elif 1 < n <= PROMPT_ROWS and batch.n_out <= 1:
        rows = min(power_of_two(n), plan.desc.max_rows)
    for i in range(n if rows else 0):
        if batch.seq[i] != (i if steps else 0):
            return 0
    return rows


cdef class StepGraphs:
    """Graphs of a plan; the arrays of their batches stay where they were when a graph was made, until `clear`."""

    def __cinit__(self, Plan plan):
        cdef int i, n = max(plan.desc.max_out, PROMPT_ROWS)
        self.device = (<CudaContext>plan.context).device
        self._plan = plan
        self._graphs = {}
        self._token = <int32_t *>calloc(n, sizeof(int32_t))
        self._pos = <int32_t *>calloc(n, sizeof(int32_t))
        self._index = <int32_t *>calloc(n, sizeof(int32_t))
        self._seq = <int32_t *>calloc(n, sizeof(int32_t))
        self._sampling = <tl_sampling *>calloc(n, sizeof(tl_sampling))
        if not (self._token and self._pos and self._index and self._seq and self._sampling):
            raise MemoryError
        for i in range(n):
            self._index[i] = i

    def __dealloc__(self):
        free(self._token)
        free(self._pos)
        free(self._index)
        free(self._seq)
        free(self._sampling)
        try:
            self.clear()
        except Exception:  # the interpreter goes down
            pass

    cdef bint pad(self, tl_batch *batch) noexcept:
        """Has a batch of host arrays that comes again run as many rows as its graph has; False where it is none."""
        cdef int i, n = batch.n_rows, rows = rows_of(self._plan, batch)
        if not rows:
            return False
        memcpy(self._token, batch.token, n * sizeof(int32_t))
        memcpy(self._pos, batch.pos, n * sizeof(int32_t))
        memcpy(self._seq, batch.seq, n * sizeof(int32_t))
        for i in range(n, rows):
            self._token[i], self._pos[i], self._seq[i] = 0, -1, 0
        batch.token, batch.pos, batch.seq, batch.n_rows = self._token, self._pos, self._seq, rows
        if batch.n_out != n:
            return True
        if batch.sampling != NULL:
            memcpy(self._sampling, batch.sampling, n * sizeof(tl_sampling))
            for i in range(n, rows):
                memset(self._sampling + i, 0, sizeof(tl_sampling))
                self._sampling[i].size = sizeof(tl_sampling)
                self._sampling[i].top_p = self._sampling[i].repetition_penalty = 1.0
            batch.sampling = self._sampling
        batch.out_row, batch.n_out = self._index, rows
        return True

    cdef int run(self, const tl_batch *batch) except -1:
        """Enqueues a padded batch whose arrays are on the device. The first of its kind loads the kernels, which a recording may not; its
        graph is made while the device runs it."""
        cdef object graph, key  # of declared types: Cython's inference of C tuples does not end here
        key = (batch.n_rows, batch.n_out, batch.loop_end, batch.window, batch.sampling != NULL, batch.logits != NULL)
        graph = self._graphs.get(key)
        if graph is not None:
            return (<CudaContext>self._plan.context).launch(graph)
        self.enqueue(batch, self._plan.context.stream)
        self._graphs[key] = self.record(batch)
        if len(self._graphs) > MAX_GRAPHS:
            self.drop(next(iter(self._graphs)))
        return 0

    cdef object record(self, const tl_batch *batch):
        """A graph of the batch, or None where there is no memory for it."""
        cdef uintptr_t stream
        try:
            try:
                stream = self.device.begin_graph()
                self.enqueue(batch, <void *>stream)
            except BaseException:
                self.device.abandon_graph()
                raise
            return self.device.end_graph()
        except OutOfMemoryError:
            return None

    cdef int enqueue(self, const tl_batch *batch, void *stream) except -1:
        cdef tl_status status
        with nogil:
            status = self._plan.context.library.f.plan_enqueue(self._plan.handle, batch, stream)
        self._plan.context.library.check(status, "running the model")
        return 0

    def drop(self, key):
        """Lets one graph go."""
        graph = self._graphs.pop(key)
        if graph is not None:
            self.device.drop_graph(graph)

    cdef int clear(self) except -1:
        """Lets all graphs go: the arrays move."""
        for key in list(self._graphs):
            self.drop(key)
        return 0
