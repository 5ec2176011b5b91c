"""Running batches on a backend: the seam between the engine, which knows rows and pages, and where they are computed.

The host's runner is here; cuda_runner.pyx has CUDA's.
"""

from libc.stdint cimport int32_t, int64_t

from .abi cimport TL_F32, TL_INT8, TL_INT8_GROUP, tl_batch, tl_matrix, tl_status
from .plan cimport Plan
from .sampling cimport Sampling
from .sequence cimport Sequence


cdef class Runner:
    """Runs a plan's batches where host memory is the backend's memory."""

    def __init__(self, Plan plan):
        self.plan = plan

    cdef int run(self, tl_batch *batch) except -1:
        """Runs a batch of host arrays; what it asks for is there on return. The engine's lock is held.

        Hidden rows alone lie in the backend's memory: x_out, e_out, e_in, and x_in where the core runs.
        """
        cdef tl_status status
        with nogil:
            status = self.plan.context.library.f.plan_enqueue(self.plan.handle, batch, NULL)
        self.plan.context.library.check(status, "running the model")
        return 0

    cdef int read_page(self, int part, int32_t page, void *keys, void *values) except -1:
        """Keys and values of a page in the canonical layout. The engine's lock is held."""
        cdef tl_status status
        with nogil:
            status = self.plan.context.library.f.plan_export_page(self.plan.handle, part, page, keys, values, NULL)
        self.plan.context.library.check(status, "reading a KV page")
        return 0

    cdef int write_page(self, int part, int32_t page, const void *keys, const void *values) except -1:
        """Fills a page from the canonical layout. The engine's lock is held."""
        cdef tl_status status
        with nogil:
            status = self.plan.context.library.f.plan_import_page(self.plan.handle, part, page, keys, values, NULL)
        self.plan.context.library.check(status, "writing a KV page")
        return 0

    cdef int read_operands(self, int part, int32_t page, void *operands) except -1:
        """A page of operands in the canonical layout. The engine's lock is held."""
        cdef tl_status status
        with nogil:
            status = self.plan.context.library.f.plan_export_operands(self.plan.handle, part, page, operands, NULL)
        self.plan.context.library.check(status, "reading a page of operands")
        return 0

    cdef int write_operands(self, int part, int32_t page, const void *operands) except -1:
        """Fills a page of operands. The engine's lock is held."""
        cdef tl_status status
        with nogil:
            status = self.plan.context.library.f.plan_import_operands(self.plan.handle, part, page, operands, NULL)
        self.plan.context.library.check(status, "writing a page of operands")
        return 0

    cdef int64_t operand_row_nbytes(self, const tl_matrix *weight) noexcept:
        """Bytes of one row of a product's operand in a page of operands."""
        cdef int64_t n_groups = (weight.n_in + TL_INT8_GROUP - 1) // TL_INT8_GROUP
        if weight.dtype == TL_INT8:
            return n_groups * (TL_INT8_GROUP + sizeof(float))
        return <int64_t>weight.n_in * (4 if weight.dtype == TL_F32 else 2)

    # ---- steps that run ahead of the host, where a backend has them

    cdef bint runs_ahead(self, Sampling sampling) noexcept:
        """Whether sequences that are drawn so may run ahead."""
        return False

    cdef Stepper stepper(self, Sequence seq, Sampling sampling, const int32_t *tokens, int n_tokens, int n_left):
        """For up to `n_left` tokens after tokens[:n_tokens], of which the last has not run; `tokens` stays valid until `stop`."""
        raise TypeError("a Runner whose steps do not run ahead")

    cdef int begin(self, list steppers) except -1:
        """Launches the first steps of new steppers, together. The engine's lock is held.

        One that lacks a page has an `error`; whatever else fails raises, and all of them have stopped.
        """
        raise TypeError("a Runner whose steps do not run ahead")

    cdef bint go_on(self, list steppers) except -1:
        """Launches further steps, where those who began together all go on, or nearly; else False, and nothing has changed.

        What is ahead is to be taken then, and all begin anew. Raises as `begin` does; only a launch that failed has stopped them. The engine's
        lock is held.
        """
        return False

    def close(self):
        """Waits for all work; nothing runs afterwards. Idempotent."""


cdef class Stepper:
    """One sequence whose steps run ahead of the host that takes its tokens."""

    cdef bint low(self) noexcept:
        """Whether more steps may be launched."""
        return False

    cdef int32_t take(self) except -1:
        """The next drawn token, of those that are ahead. The engine's lock is not held."""
        raise TypeError("a Stepper of no backend")

    cdef void stop(self) noexcept:
        """No more is asked for; what is ahead is dropped. Idempotent; the engine's lock need not be held."""
