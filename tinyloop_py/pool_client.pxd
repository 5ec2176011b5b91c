cdef class PoolClient:
    cdef readonly object model_key
    cdef readonly bint closed
    cdef Py_ssize_t default_loops
    cdef Py_ssize_t max_loops

    cdef tuple pool_key(self, str method, object loops, object cache_window, object namespace)
    cdef int check_open(self, str method) except -1


cdef Py_ssize_t depth_argument(object loops, Py_ssize_t max_loops) except -1
cdef PoolClient as_client(object model)
