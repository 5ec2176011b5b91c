"""A loaded native library: the exports of include/tinyloop.h as typed function pointers."""

import ctypes

from libc.stdint cimport uintptr_t

from .abi cimport TL_ABI_VERSION, TL_ERR_OUT_OF_MEMORY, TL_OK

from .errors import BackendError, OutOfMemoryError

# In the order of tl_functions (abi.pxd); a test holds both against the header.
EXPORTS = (
    "abi_version", "last_error", "usable_cpus", "context_create", "context_get_info", "context_destroy",
    "matrix_nbytes", "matrix_pack", "plan_create", "plan_destroy", "plan_page_nbytes", "plan_row_nbytes",
    "plan_operand_page_nbytes", "plan_scratch_nbytes", "plan_bind", "plan_enqueue", "plan_n_clamped", "plan_export_page", "plan_import_page",
    "plan_export_operands", "plan_import_operands", "op_matmul", "op_rms_norm", "op_activation", "op_sample_work_floats", "op_sample", "probe_read",
)


cdef class Library:
    """Loads `path` once; calls go through the table `f`, without ctypes.

    Raises
    ------
    RuntimeError
        The file does not load, lacks an export, or follows another version of the contract.
    """

    def __cinit__(self, path):
        self.path = str(path)
        try:
            self._handle = ctypes.CDLL(self.path)
        except OSError as error:
            raise RuntimeError(f"{self.path} does not load: {error}") from None
        cdef void **slots = <void **>&self.f
        cdef uintptr_t address
        for i, name in enumerate(EXPORTS):
            try:
                address = ctypes.cast(getattr(self._handle, "tl_" + name), ctypes.c_void_p).value
            except AttributeError:
                raise RuntimeError(f"{self.path} lacks tl_{name}: it is not a tinyloop library, or an old one; reinstall tinyloop") from None
            slots[i] = <void *>address
        if self.f.abi_version() != TL_ABI_VERSION:
            raise RuntimeError(f"{self.path} has contract version {self.f.abi_version()}, expected {TL_ABI_VERSION}; reinstall tinyloop")

    cdef int check(self, tl_status status, str doing) except -1:
        """Raises what a failing status stands for; `doing` says what was tried."""
        if status == TL_OK:
            return 0
        text = self.f.last_error().decode("utf-8", "replace")
        if status == TL_ERR_OUT_OF_MEMORY:
            raise OutOfMemoryError(f"out of memory: {doing}: {text}")
        raise BackendError(f"{doing}: {text} (status {status})")

    def usable_cpus(self):
        """Cores that this process may run on."""
        return self.f.usable_cpus()
