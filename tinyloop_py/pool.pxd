from libc.stdint cimport int32_t, int64_t

from .pool_ledger cimport PoolEntry, PoolLedger
from .prefix_index cimport PrefixIndex


cdef struct PoolCounts:  # the fields of PoolStats
    int64_t queries
    int64_t hits
    int64_t full_hits
    int64_t misses
    int64_t matched_tokens
    int64_t prefilled_tokens
    int64_t insertions
    int64_t evictions
    int64_t refusals
    int64_t fallbacks


cdef class PrefixPool:
    cdef object __weakref__
    cdef dict _indexes
    cdef PoolLedger _ledger
    cdef PoolCounts _counts

    cpdef PoolEntry _find(self, tuple key, const int32_t[::1] tokens)
    cpdef PoolEntry _get(self, tuple key, const int32_t[::1] tokens)
    cpdef _plan(self, Py_ssize_t n_tokens, int64_t nbytes, object shared=*)
    cpdef PoolEntry _insert(self, tuple key, const int32_t[::1] tokens, object payload, bint pin=*)
    cpdef bint _touch(self, PoolEntry entry, bint pin=*) except -1
    cpdef _record(self, PoolEntry entry, Py_ssize_t prompt_len, Py_ssize_t n_prefilled)
    cpdef _record_fallback(self)
    cpdef bint _evict_idle(self, object model_key) except -1
    cpdef _drop_model(self, object model_key)
    cdef int _check_room(self, Py_ssize_t n_tokens, list parts, int64_t nbytes) except -1
    cdef int _make_room(self, Py_ssize_t n_tokens, list parts, int64_t nbytes, bint for_entry, list dropped) except -1
    cdef int _remove_all(self, list entries) except -1
    cdef int _remove(self, PoolEntry entry, list dropped) except -1
    cdef int _unindex(self, PrefixIndex index, PoolEntry entry) except -1
