from libc.stdint cimport int32_t, int64_t

from .engine cimport Engine
from .hidden_rows cimport HiddenRows
from .kv_prefix cimport KvPrefix


cdef class ResumeHandle:
    cdef object __weakref__
    cdef Engine engine
    cdef object model_key
    cdef object _tokens                # int32 (n_tokens,), read-only
    cdef tuple _held                   # (KvPrefix, HiddenRows or None), replaced as a whole
    cdef readonly int loops, cache_window
    cdef int64_t _resumes, _prefilled_tokens, _extended_tokens, _token_loops

    cdef tuple held(self)
    cdef KvPrefix prefix_at(self, int loops)
    cdef KvPrefix deeper(self, KvPrefix base, HiddenRows rows, int loops, HiddenRows kept)
