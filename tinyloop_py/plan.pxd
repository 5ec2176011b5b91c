from libc.stdint cimport int64_t

from .abi cimport tl_plan, tl_plan_desc
from .context cimport Context
from .pages cimport KvStore


cdef class Plan:
    cdef readonly Context context
    cdef readonly KvStore store
    cdef tl_plan *handle
    cdef tl_plan_desc desc
    cdef readonly object weights
    cdef readonly bint keeps_operands
    cdef object _keep                  # rope tables and scratch that the plan points into

    cdef int make_store(self, kv_budget) except -1
