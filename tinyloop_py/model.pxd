from libc.stdint cimport int32_t, int64_t

from .engine cimport Engine, Generation
from .pool cimport PrefixPool
from .pool_client cimport PoolClient
from .pool_ledger cimport PoolEntry
from .sampling cimport Sampling


cdef class Model(PoolClient):
    cdef object __weakref__
    cdef readonly Engine _engine
    cdef readonly object config
    cdef readonly int max_seq_len
    cdef readonly str device
    cdef readonly str kv_mode
    cdef readonly str path
    cdef readonly str chat_template
    cdef readonly tuple stop_ids
    cdef object _tokenizer_json, _tokenizer
    cdef frozenset _stop_tokens
    cdef object _pools
    cdef int _pid
    cdef bint _warned
    cdef readonly int64_t nbytes

    cdef const int32_t[::1] prompt_tokens(self, object prompt, object max_tokens, int *n_new)
    cdef Generation begin(self, const int32_t[::1] tokens, int max_tokens, tuple key, Sampling sampling, PrefixPool pool, PoolEntry entry)
    cdef Generation begin_with_pool(self, PrefixPool pool, const int32_t[::1] tokens, int max_tokens, tuple key, Sampling sampling)
    cdef int warn_depth(self, int loops) except -1
