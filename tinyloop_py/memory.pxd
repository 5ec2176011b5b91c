from libc.stdint cimport int64_t, uintptr_t


cdef class Buffer:
    cdef readonly uintptr_t pointer
    cdef readonly int64_t nbytes


cdef class HostBuffer(Buffer):
    cdef uintptr_t _mapped
    cdef int64_t _mapped_nbytes


cdef class SubBuffer(Buffer):
    cdef Buffer parent


cdef class Arena:
    cdef object _alloc
    cdef Buffer _chunk
    cdef int64_t _used


cdef class AddressRange:
    cdef readonly uintptr_t pointer
    cdef readonly int64_t nbytes
    cdef readonly int64_t committed
    cdef readonly int64_t warm_nbytes  # free pages that keep their memory, for the next call

    cpdef int commit(self, int64_t nbytes) except -1
    cpdef int discard(self, int64_t offset, int64_t nbytes) except -1
    cpdef int restore(self, int64_t offset, int64_t nbytes) except -1
    cpdef int close(self) except -1


cdef class HostRange(AddressRange):
    pass
