cdef Py_ssize_t int_argument(object value, str name, Py_ssize_t low, Py_ssize_t high) except? -1
cdef double real_argument(object value, str name) except? -1.0
