from libc.stdint cimport int64_t

from .prefix_index cimport Prefix


cdef class Part:
    cdef object owner
    cdef int64_t nbytes
    cdef Py_ssize_t n_entries
    cdef Py_ssize_t n_pinned


cdef class PoolEntry(Prefix):
    cdef readonly tuple key
    cdef readonly object payload
    cdef readonly int64_t nbytes
    cdef readonly int64_t hits
    cdef readonly bint pinned
    cdef readonly bint resident
    cdef int64_t serial
    cdef int64_t rank
    cdef list parts


cdef class PoolLedger:
    cdef Py_ssize_t capacity
    cdef Py_ssize_t max_tokens
    cdef Py_ssize_t max_nbytes
    cdef bint by_use
    cdef int64_t n_tokens
    cdef int64_t nbytes
    cdef Py_ssize_t n_pinned
    cdef int64_t n_pinned_tokens
    cdef int64_t pinned_nbytes
    cdef list order
    cdef dict _parts
    cdef int64_t _clock

    cdef list new_parts(self, object pairs)
    cdef int check_room(self, Py_ssize_t n_tokens, list parts, int64_t nbytes) except -1
    cdef bint fits(self, Py_ssize_t n_tokens, list parts, int64_t nbytes)
    cdef PoolEntry victim(self)
    cdef int add(self, PoolEntry entry) except -1
    cdef int remove(self, PoolEntry entry) except -1
    cdef int pin(self, PoolEntry entry) except -1
    cdef int unpin(self, PoolEntry entry) except -1
    cdef int touch(self, PoolEntry entry) except -1
    cdef Py_ssize_t _n_before(self, PoolEntry entry)
