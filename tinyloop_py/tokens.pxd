from libc.stdint cimport int32_t

cpdef const int32_t[::1] as_tokens(object obj, str name=*)
cdef const int32_t[::1] own_tokens(object obj, str name)
cdef Py_ssize_t c_common_prefix_len(const int32_t *a, const int32_t *b, Py_ssize_t n) noexcept nogil
cdef Py_ssize_t c_check_vocab(const int32_t *tokens, Py_ssize_t n, int32_t vocab_size) noexcept nogil
cdef int c_compare_tokens(const int32_t *a, Py_ssize_t n_a, const int32_t *b, Py_ssize_t n_b) noexcept nogil
