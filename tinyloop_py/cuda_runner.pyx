"""Running batches on a CUDA device: their arrays go over in one copy, what they ask for comes back before `run` returns."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from .abi cimport TL_F32, TL_PAGE_POSITIONS, TL_RUN_CORE, TL_STAGE_CORE, tl_batch, tl_matrix, tl_sampling
from .cuda_context cimport CudaContext
from .cuda_graphs cimport StepGraphs, rows_for
from .cuda_lane cimport MAX_STOP, Lane, padded
from .cuda_stepper cimport CudaStepper, fills, launch_ahead
from .library cimport Library
from .plan cimport Plan
from .runner cimport Runner, Stepper
from .sampling cimport Sampling
from .sequence cimport Sequence

from .cuda_memory import DeviceBuffer, PinnedBuffer

cdef int MAX_IDLE_LANES = 16


cdef class CudaRunner(Runner):
    """A plan on a CUDA device."""

    def __init__(self, Plan plan):
        Runner.__init__(self, plan)
        self.device = (<CudaContext>plan.context).device
        self._copied = self.device.make_event()
        self._graphs = StepGraphs(plan)
        self._lanes = {}

    def close(self):
        if self._lanes is None:
            return
        self._lanes = None
        self.device.wait("the last steps")
        self.device.drop_event(self._copied)
        self._graphs.clear()
        self._staging = self._inputs = self._outputs = self._transit = None

    # ---- a batch

    cdef int run(self, tl_batch *batch) except -1:
        cdef tl_batch whole = batch[0], there
        cdef bint repeats = self._graphs.pad(&whole)
        self.lay_outputs(&whole, &there)
        self._writes = False
        self.lay_inputs(&whole, &there)
        self.device.wait_for(self._copied)  # the batch before this one has been read
        if self._inputs is None or self._inputs.nbytes < self._used:
            self.device.wait("running the model")
            self._graphs.clear()
            self._staging = self._inputs = None
            self._staging = PinnedBuffer(self.device, 2 * self._used, "the arrays of a step")
            self._inputs = DeviceBuffer(self.device, 2 * self._used, "the arrays of a step")
        self._writes = True
        self.lay_inputs(&whole, &there)
        if self._used:
            self.device.copy(self._inputs.pointer, self._staging.pointer, self._used)
            self.device.record(self._copied)
        if repeats:
            self._graphs.run(&there)
        else:
            self._graphs.enqueue(&there, self.plan.context.stream)
        if batch.n_out:
            self.fetch(batch.sampled, there.sampled, batch.n_out * sizeof(int32_t))
            self.fetch(batch.final_x, there.final_x, <int64_t>batch.n_out * self.plan.desc.dim * 4)
            self.fetch(batch.boundary_x, there.boundary_x, <int64_t>(batch.loop_end - batch.loop_begin) * batch.n_out * self.plan.desc.dim * 4)
            self.fetch(batch.logits, there.logits, <int64_t>batch.n_out * self.plan.desc.vocab_size * 4)
            self.device.wait("running the model")
        return 0

    cdef uintptr_t put(self, const void *source, int64_t nbytes) noexcept:
        """Adds an array to the copy, and gives its address on the device; NULL stays NULL."""
        cdef uintptr_t at = 0
        if source == NULL:
            return 0
        if self._writes:
            memcpy(<uint8_t *>self._staging.pointer + self._used, source, nbytes)
            at = self._inputs.pointer + self._used
        self._used += padded(nbytes)
        return at

    cdef int lay_inputs(self, const tl_batch *batch, tl_batch *there) except -1:
        """Puts every array that a batch reads, and has `there` point to them: those that a graph knows first, so that they stay in place."""
        cdef int i, n_seqs = 0, n_rows = batch.n_rows, stride = self.plan.desc.table_stride
        cdef int64_t table_nbytes = <int64_t>(TL_STAGE_CORE + batch.loop_end) * stride * sizeof(int32_t), sampling
        self._used = 0
        there.token = <const int32_t *>self.put(batch.token if n_rows else NULL, n_rows * sizeof(int32_t))
        there.pos = <const int32_t *>self.put(batch.pos if n_rows else NULL, n_rows * sizeof(int32_t))
        there.seq = <const int32_t *>self.put(batch.seq if n_rows else NULL, n_rows * sizeof(int32_t))
        there.out_row = <const int32_t *>self.put(batch.out_row if batch.n_out else NULL, batch.n_out * sizeof(int32_t))
        sampling = self._used
        there.sampling = <const tl_sampling *>self.put(batch.sampling, batch.n_out * sizeof(tl_sampling))
        for i in range(n_rows):
            n_seqs = max(n_seqs, batch.seq[i] + 1)
        there.page_table = self.put_tables(batch.page_table, n_seqs, table_nbytes)
        if not batch.sections & TL_RUN_CORE:
            there.x_in = <const float *>self.put(batch.x_in, <int64_t>(n_rows or batch.n_out) * self.plan.desc.dim * 4)
        there.operand_table = self.put_tables(batch.operand_table, n_seqs, table_nbytes)
        if batch.sampling != NULL:
            self.lay_sampling(batch, sampling)
        return 0

    cdef const int32_t *const *put_tables(self, const int32_t *const *source, int n, int64_t nbytes) noexcept:
        """Adds the page tables of n sequences, of so many bytes each."""
        cdef int i
        cdef int64_t tables = self._used
        cdef uintptr_t at = self.put(source if n else NULL, n * sizeof(void *)), table
        for i in range(0 if source == NULL else n):
            table = self.put(source[i], nbytes)
            if self._writes:
                (<uintptr_t *>(self._staging.pointer + tables))[i] = table
        return <const int32_t *const *>at

    cdef int lay_sampling(self, const tl_batch *batch, int64_t first) except -1:
        """Puts the arrays of the samplings, and their addresses to where those are put."""
        cdef const tl_sampling *asked
        cdef tl_sampling *copy
        cdef uintptr_t ids, values, history
        cdef bint counted
        cdef int i
        for i in range(batch.n_out):
            asked = batch.sampling + i
            ids = self.put(asked.bias_ids if asked.n_bias else NULL, asked.n_bias * sizeof(int32_t))
            values = self.put(asked.bias_values if asked.n_bias else NULL, asked.n_bias * sizeof(float))
            counted = asked.repetition_penalty != 1.0 and asked.n_history > 0
            history = self.put(asked.history if counted else NULL, asked.n_history * sizeof(int32_t))
            if self._writes:
                copy = <tl_sampling *>(self._staging.pointer + first) + i
                copy.bias_ids, copy.bias_values, copy.history = <const int32_t *>ids, <const float *>values, <const int32_t *>history
                if not counted:
                    copy.n_history = 0
        return 0

    cdef uintptr_t room(self, int64_t nbytes) noexcept:
        """The next part of the outputs."""
        cdef int64_t at = self._out_used
        self._out_used += padded(nbytes)
        return at if self._outputs is None else self._outputs.pointer + at

    cdef int lay_outputs(self, const tl_batch *batch, tl_batch *there) except -1:
        """Has `there` point to memory for what a batch writes."""
        cdef int64_t rows = batch.n_out, dim = self.plan.desc.dim * 4
        for _ in range(2):  # again where the memory was too small
            there[0] = batch[0]
            self._out_used = 0
            there.sampled = NULL if batch.sampled == NULL else <int32_t *>self.room(rows * sizeof(int32_t))
            there.final_x = NULL if batch.final_x == NULL else <float *>self.room(rows * dim)
            there.boundary_x = NULL if batch.boundary_x == NULL else <float *>self.room((batch.loop_end - batch.loop_begin) * rows * dim)
            there.logits = NULL if batch.logits == NULL else <float *>self.room(rows * self.plan.desc.vocab_size * 4)
            if self._outputs is not None and self._outputs.nbytes >= self._out_used:
                break
            self.device.wait("running the model")
            self._graphs.clear()
            self._outputs = None
            self._outputs = DeviceBuffer(self.device, max(self._out_used, 4096), "the results of a step")
        return 0

    cdef int fetch(self, void *to, const void *source, int64_t nbytes) except -1:
        """Enqueues bringing a result to the host, where it was asked for."""
        if to != NULL:
            self.device.copy(<uintptr_t>to, <uintptr_t>source, nbytes)
        return 0

    # ---- pages

    cdef uintptr_t transit(self, int64_t nbytes) except 0:
        """Device memory that a page passes through."""
        if self._transit is None or self._transit.nbytes < nbytes:
            self._transit = None  # every use of it was waited for
            self._transit = DeviceBuffer(self.device, nbytes, "a page on its way")
        return self._transit.pointer

    cdef int size_page(self, int part, int64_t *key_nbytes, int64_t *value_nbytes) except -1:
        """Bytes of the keys and of the values of a page in the canonical layout."""
        cdef uint64_t key_row, value_row
        cdef Library library = self.plan.context.library
        cdef int64_t rows = <int64_t>self.plan.desc.n_layers[part] * self.plan.desc.n_kv_heads * TL_PAGE_POSITIONS
        library.check(library.f.plan_row_nbytes(&self.plan.desc, &key_row, &value_row), "sizing KV rows")
        key_nbytes[0], value_nbytes[0] = rows * <int64_t>key_row, rows * <int64_t>value_row
        return 0

    cdef int read_page(self, int part, int32_t page, void *keys, void *values) except -1:
        cdef int64_t key_nbytes, value_nbytes
        self.size_page(part, &key_nbytes, &value_nbytes)
        cdef uintptr_t first = self.transit(padded(key_nbytes) + value_nbytes)
        cdef uintptr_t second = first + padded(key_nbytes)
        self.plan.context.library.check(
            self.plan.context.library.f.plan_export_page(self.plan.handle, part, page, <void *>first, <void *>second, self.plan.context.stream),
            "reading a KV page",
        )
        self.device.copy(<uintptr_t>keys, first, key_nbytes)
        self.device.copy(<uintptr_t>values, second, value_nbytes)
        self.device.wait("reading a KV page")
        return 0

    cdef int write_page(self, int part, int32_t page, const void *keys, const void *values) except -1:
        cdef int64_t key_nbytes, value_nbytes
        self.size_page(part, &key_nbytes, &value_nbytes)
        cdef uintptr_t first = self.transit(padded(key_nbytes) + value_nbytes)
        cdef uintptr_t second = first + padded(key_nbytes)
        self.device.copy(first, <uintptr_t>keys, key_nbytes)
        self.device.copy(second, <uintptr_t>values, value_nbytes)
        self.plan.context.library.check(
            self.plan.context.library.f.plan_import_page(self.plan.handle, part, page, <void *>first, <void *>second, self.plan.context.stream),
            "writing a KV page",
        )
        self.device.wait("writing a KV page")
        return 0

    cdef int read_operands(self, int part, int32_t page, void *operands) except -1:
        cdef int64_t nbytes = self.plan.store.page_nbytes(part + 3)
        cdef uintptr_t at = self.transit(nbytes)
        self.plan.context.library.check(
            self.plan.context.library.f.plan_export_operands(self.plan.handle, part, page, <void *>at, self.plan.context.stream),
            "reading a page of operands",
        )
        self.device.copy(<uintptr_t>operands, at, nbytes)
        self.device.wait("reading a page of operands")
        return 0

    cdef int write_operands(self, int part, int32_t page, const void *operands) except -1:
        cdef int64_t nbytes = self.plan.store.page_nbytes(part + 3)
        cdef uintptr_t at = self.transit(nbytes)
        self.device.copy(at, <uintptr_t>operands, nbytes)
        self.plan.context.library.check(
            self.plan.context.library.f.plan_import_operands(self.plan.handle, part, page, <void *>at, self.plan.context.stream),
            "writing a page of operands",
        )
        self.device.wait("writing a page of operands")
        return 0

    cdef int64_t operand_row_nbytes(self, const tl_matrix *weight) noexcept:
        return <int64_t>weight.n_in * (4 if weight.dtype == TL_F32 else 2)  # int8 weights are widened to bfloat16

    # ---- sequences that step by themselves

    cdef bint runs_ahead(self, Sampling sampling) noexcept:
        return len(sampling.stop_tokens) <= MAX_STOP

    cdef Stepper stepper(self, Sequence seq, Sampling sampling, const int32_t *tokens, int n_tokens, int n_left):
        cdef CudaStepper stepper = CudaStepper(self, seq, sampling)
        stepper._tokens, stepper._first_pos, stepper._n_left = tokens, n_tokens - 1, n_left
        return stepper

    cdef int begin(self, list steppers) except -1:
        cdef CudaStepper s = steppers[0]
        cdef Lane lane = self.lane(s.seq.loops, s.seq.window, rows_for(self.plan, len(steppers)))
        cdef int row, n_boarded = 0
        try:
            lane.clear()
            for row in range(len(steppers)):
                s = steppers[row]
                s.board(lane, row)
                n_boarded += 1
            lane.send_rows()
            launch_ahead(lane, steppers)
        except BaseException:
            if n_boarded == 0:  # else the last one to leave gives it back
                self.take_back(lane)
            for s in steppers:
                s.stop()
            raise
        return 0

    cdef bint go_on(self, list steppers) except -1:
        cdef Lane lane = (<CudaStepper>steppers[0]).lane
        if not fills(lane, steppers, rows_for(self.plan, len(steppers))):
            return False
        lane.stop_rows()
        launch_ahead(lane, steppers)
        return True

    cdef Lane lane(self, int loops, int window, int n_rows):
        """One that is idle, or a new one."""
        idle = self._lanes.get((loops, window, n_rows))
        return idle.pop() if idle else Lane(self.plan, loops, window, n_rows)

    def take_back(self, Lane lane):
        """A lane that all steppers have left, for the next ones of its depth, window and rows."""
        if self._lanes is None:
            return
        key = lane.loops, lane.window, lane.n_rows
        idle = self._lanes.pop(key, [])
        idle.append(lane)
        self._lanes[key] = idle  # the latest used last
        if sum(len(lanes) for lanes in self._lanes.values()) > MAX_IDLE_LANES:
            oldest = next(iter(self._lanes))
            self._lanes[oldest].pop(0)
            if not self._lanes[oldest]:
                del self._lanes[oldest]
