from .engine cimport Engine
from .sequence cimport Span


cdef tuple canonical_page(Engine engine, int stage)
cdef int export_pages(Engine engine, Span span, int stage, int first, unsigned char[:, ::1] keys, unsigned char[:, ::1] values) except -1
cdef int import_pages(
    Engine engine, Span span, int stage, int first, const unsigned char[:, ::1] keys, const unsigned char[:, ::1] values
) except -1
