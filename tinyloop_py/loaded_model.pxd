from libc.stdint cimport int32_t, int64_t

from .engine cimport Engine
from .generation cimport Generation
from .plan cimport Plan
from .pool_client cimport PoolClient
from .sampling cimport Sampling


cdef class LoadedModel(PoolClient):
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
    cdef object _dependents            # by id: pools that may hold this model's entries, and open handles on its KV
    cdef object _weights_id, _file_id  # the weights' fingerprint, None until asked for; size and time of their file
    cdef int _pid
    cdef bint _warned
    cdef readonly int64_t nbytes

    cdef const int32_t[::1] prompt_tokens(self, object prompt, object max_tokens, int *n_new, str name=*)
    cdef Plan opened(self)
    cdef int let_go(self, bint handles) except -1
    cdef int warn_depth(self, int loops) except -1
    cdef Sampling read_sampling(
        self, object temperature, object top_k, object top_p, object min_p, object repetition_penalty, object logit_bias, object seed,
        object stop_tokens,
    )
    cdef Generation open_generation(
        self, str method, object prompt, object max_tokens, object loops, object temperature, object top_k, object cache_window, object pool,
        object namespace, object top_p, object min_p, object repetition_penalty, object logit_bias, object seed, object stop_tokens, bint may_wait=*,
    )


cdef int check_pool(object pool) except -1
