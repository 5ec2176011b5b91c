cdef int check_signals() except -1
cdef int mark_signal(BaseException error) except -1
cdef bint is_failure(BaseException error) except -1
