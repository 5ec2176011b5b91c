"""A backend at work: its code path and threads, the memory it computes on, and single operations for tests."""

import numpy as np

cimport cython
from libc.stdint cimport int64_t, uint64_t, uintptr_t

from libc.string cimport memcpy
from posix.unistd cimport getpid

from .abi cimport (
    TL_BF16, TL_F16, TL_F32, TL_INT8, TL_ISA_AVX2, TL_ISA_AVX512, TL_ISA_BEST, TL_ISA_GENERIC, tl_context_desc, tl_context_info,
    tl_matmul_args, tl_matrix, tl_pack_rows,
)
from .library cimport Library
from .memory cimport AddressRange, Arena, Buffer
from .memory import HostBuffer, HostRange, free_host_memory

DTYPES = {"f32": TL_F32, "bf16": TL_BF16, "f16": TL_F16, "int8": TL_INT8}
ISAS = {"best": TL_ISA_BEST, "generic": TL_ISA_GENERIC, "avx2": TL_ISA_AVX2, "avx512": TL_ISA_AVX512}


cdef class PackedMatrix:
    """A weight matrix in the backend's layout, made by `Context.pack`."""

    @property
    def shape(self):
        """(packed rows, columns)"""
        return self.matrix.n_out, self.matrix.n_in

    @property
    def nbytes(self):
        return self.buffer.nbytes


@cython.no_gc_clear  # the library must outlive the handle
cdef class Context:
    """A backend: here the CPU's, `threads` threads on one of the code paths "avx512", "avx2" and "generic".

    `CudaContext` derives from it.
    """

    def __init__(self, Library library, int threads=1, str isa="best", int device=0):
        cdef tl_context_desc desc
        cdef tl_context_info info
        if isa not in ISAS:
            raise ValueError(f"code path {isa!r} is unknown, expected one of {', '.join(ISAS)}")
        self.library = library
        desc.size = sizeof(desc)
        desc.n_threads = threads
        desc.isa = ISAS[isa]
        desc.device = device
        self._pid = getpid()
        library.check(library.f.context_create(&desc, &self.handle), "starting the backend")
        info.size = sizeof(info)
        library.check(library.f.context_get_info(self.handle, &info), "asking the backend")
        self.name = info.name.decode()
        self.numerics_id = info.numerics_id.decode()
        self.n_threads = info.n_threads

    def __dealloc__(self):
        self.destroy()

    cdef void destroy(self) noexcept:
        if self.handle != NULL and getpid() == self._pid:  # a forked child has no threads to join
            self.library.f.context_destroy(self.handle)
        self.handle = NULL

    def close(self):
        """Ends the threads. Idempotent; nothing made with the context may run afterwards."""
        self.destroy()

    # ---- memory

    def alloc(self, int64_t nbytes, str what) -> Buffer:
        """Zeroed memory; OutOfMemoryError says what it was for."""
        return HostBuffer(nbytes, what)

    def alloc_range(self, int64_t nbytes) -> AddressRange:
        """Address space that gets memory on demand."""
        return HostRange(nbytes)

    def page_copy(self):
        """What copies a KV page, called with (to, source, nbytes); None where pages are host memory."""
        return None

    def free_nbytes(self):
        """Bytes that could still be allocated, or None where unknown."""
        return free_host_memory()

    def upload(self, array, str what) -> Buffer:
        """A copy of an array in memory."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        cdef Buffer buffer = self.alloc(flat.nbytes, what)
        cdef const unsigned char[::1] source = flat
        if source.shape[0]:
            self.copy(buffer.pointer, <uintptr_t>&source[0], source.shape[0])
        return buffer

    cdef int copy(self, uintptr_t to, uintptr_t source, int64_t nbytes) except -1:
        """Copies between any two places, in the order of what is enqueued; host memory is free again on return."""
        memcpy(<void *>to, <const void *>source, nbytes)
        return 0

    cdef int wait(self) except -1:
        """Waits for all that is enqueued."""
        return 0

    cdef int expect(self, int64_t nbytes) except -1:
        """Makes room for `nbytes` of arrays that `readable` will be asked about; what it gave before is read no more."""
        return 0

    cdef uintptr_t readable(self, object array) except? 0:
        """Where the backend can read a host array, from what is enqueued next, until `expect`."""
        return array.__array_interface__["data"][0]

    # ---- matrices

    def pack(self, Arena arena, str dtype, int n_out, int n_in, int group_size, list sources, str what) -> PackedMatrix:
        """Packs source matrices into one.

        Parameters
        ----------
        arena
            Where the packed bytes go.
        n_out
            Packed rows, a multiple of 16.
        sources
            Tuples (data, scales, n_rows, block, stride, offset): row r of `data`, of this dtype and row-major, becomes
            packed row r // block * stride + offset + r % block; `scales` is a float32 array for int8, else None.
        """
        cdef PackedMatrix packed = PackedMatrix.__new__(PackedMatrix)
        cdef tl_pack_rows rows
        cdef uint64_t nbytes
        packed.matrix.size = sizeof(tl_matrix)
        packed.matrix.dtype = DTYPES[dtype]
        packed.matrix.n_out = n_out
        packed.matrix.n_in = n_in
        packed.matrix.group_size = group_size
        packed.matrix.data = NULL
        self.library.check(self.library.f.matrix_nbytes(self.handle, &packed.matrix, &nbytes), f"sizing {what}")
        packed.buffer = arena.alloc(nbytes, what)
        packed.matrix.data = <void *>packed.buffer.pointer
        for data, scales, n_rows, block, stride, offset in sources:
            rows.size = sizeof(rows)
            rows.n_rows, rows.block, rows.stride, rows.offset = n_rows, block, stride, offset
            self.expect(data.nbytes + (0 if scales is None else scales.nbytes + 256))
            rows.src = <const void *>self.readable(data)
            rows.scales = NULL if scales is None else <const float *>self.readable(scales)
            with nogil:
                status = self.library.f.matrix_pack(self.handle, &packed.matrix, &rows, self.stream)
            self.library.check(status, f"packing {what}")
        return packed

    def end_loading(self):
        """Frees what `pack` used to bring tensors to the device. Idempotent."""

    # ---- single operations

    def matmul(self, PackedMatrix weight, const float[:, ::1] a, const float[::1] bias=None):
        """y = a W^T + bias, (n_rows, n_out) float32, with the numbers of the forward pass."""
        y = np.empty((a.shape[0], weight.matrix.n_out), np.float32)
        cdef float[:, ::1] out = y
        cdef tl_matmul_args args
        if a.shape[0] == 0 or a.shape[1] != weight.matrix.n_in:
            raise ValueError(f"a has shape {(a.shape[0], a.shape[1])}, expected (n, {weight.matrix.n_in})")
        args.size = sizeof(args)
        args.n_rows = a.shape[0]
        args.weight = weight.matrix
        args.bias = NULL if bias is None or bias.shape[0] == 0 else &bias[0]
        args.a = &a[0, 0]
        args.y = &out[0, 0]
        with nogil:
            status = self.library.f.op_matmul(self.handle, &args, self.stream)
        self.library.check(status, "matmul")
        return y

    def rms_norm(self, const float[:, ::1] x, const float[::1] weight, float eps):
        """weight * x / sqrt(mean(x^2) + eps) of every row."""
        y = np.empty((x.shape[0], x.shape[1]), np.float32)
        cdef float[:, ::1] out = y
        if x.shape[0] == 0 or x.shape[1] == 0 or weight.shape[0] != x.shape[1]:
            raise ValueError(f"x has shape {(x.shape[0], x.shape[1])} and weight {weight.shape[0]} values")
        self.library.check(
            self.library.f.op_rms_norm(self.handle, x.shape[0], x.shape[1], eps, &x[0, 0], &weight[0], &out[0, 0], self.stream), "rms_norm"
        )
        return y

    def activation(self, int act, const float[::1] gate, const float[::1] up):
        """act(gate) * up, or act(up) where gate is None."""
        y = np.empty(up.shape[0], np.float32)
        cdef float[::1] out = y
        if up.shape[0] == 0 or (gate is not None and gate.shape[0] != up.shape[0]):
            raise ValueError("gate and up differ in length, or are empty")
        cdef const float *g = NULL if gate is None else &gate[0]
        self.library.check(self.library.f.op_activation(self.handle, act, up.shape[0], g, &up[0], &out[0], self.stream), "activation")
        return y

    def read_rate(self, Buffer buffer, int n_repeats=1):
        """Bytes per second at which all threads together read the buffer, each its own part."""
        cdef double rate
        with nogil:
            status = self.library.f.probe_read(self.handle, <const void *>buffer.pointer, buffer.nbytes, n_repeats, &rate, self.stream)
        self.library.check(status, "the read probe")
        return rate
