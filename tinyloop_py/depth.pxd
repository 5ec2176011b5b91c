from libc.stdint cimport int32_t

from .engine cimport Engine
from .hidden_rows cimport HiddenRows
from .kv_prefix cimport KvPrefix


cdef HiddenRows new_rows(Engine engine, int n_tokens, HiddenRows like)
cdef KvPrefix deepen(Engine engine, const int32_t[::1] tokens, KvPrefix base, HiddenRows rows, int loops, HiddenRows deeper)
cdef KvPrefix shallow(Engine engine, KvPrefix base, int loops)
