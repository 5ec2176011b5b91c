from .abi cimport tl_functions, tl_status


cdef class Library:
    cdef tl_functions f
    cdef object _handle
    cdef readonly str path

    cdef int check(self, tl_status status, str doing) except -1
