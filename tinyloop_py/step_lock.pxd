cdef class StepLock:
    cdef object _lock
    cdef unsigned long _holder         # thread that is in a step, 0 for none

    cdef bint is_mine(self) noexcept
