from libc.stdint cimport int32_t


cdef class Prefix:
    cdef int32_t *ids
    cdef readonly Py_ssize_t n_tokens


cdef struct Key:
    const int32_t *ids
    int32_t n_tokens
    bint is_end
    void *prefix
    void *longest


cdef class PrefixIndex:
    cdef set _stored
    cdef Key *_keys
    cdef int32_t *_lcp
    cdef Py_ssize_t _n_keys
    cdef Py_ssize_t _n_leaves

    cdef Prefix c_find(self, const int32_t *ids, Py_ssize_t n)
    cdef Prefix c_get(self, const int32_t *ids, Py_ssize_t n)
    cdef Py_ssize_t c_size(self) noexcept
    cdef int c_add(self, Prefix prefix) except -1
    cdef int c_remove(self, Prefix prefix) except -1
    cdef Py_ssize_t _search(self, const int32_t *ids, Py_ssize_t n, int32_t *lcp_below, int32_t *lcp_above) noexcept nogil
    cdef void _insert_key(self, Py_ssize_t at, Prefix prefix, bint is_end) noexcept
    cdef void _delete_key(self, Py_ssize_t at) noexcept
    cdef void _update_nodes(self, Py_ssize_t first) noexcept nogil
    cdef bint _resize(self, Py_ssize_t n_leaves) noexcept
