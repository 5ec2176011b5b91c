from .engine cimport Engine
from .kv_prefix cimport Span


cdef dict canonical_page(Engine engine, int stage, int kind)
cdef int export_pages(Engine engine, Span span, int stage, int first, list arrays) except -1
cdef int import_pages(Engine engine, Span span, int stage, int first, list arrays) except -1
