from libc.stdint cimport int32_t

from .abi cimport tl_batch
from .engine cimport Engine
from .kv_prefix cimport KvPrefix
from .pool cimport PrefixPool
from .pool_ledger cimport PoolEntry
from .runner cimport Stepper
from .sampling cimport Sampling
from .sequence cimport Sequence


cdef class Generation:
    cdef readonly Engine engine
    cdef readonly Sampling sampling
    cdef readonly tuple key            # (model, loops, window, namespace)
    cdef Sequence seq
    cdef int32_t *tokens
    cdef readonly int n_prompt, n_tokens, max_tokens, n_cached
    cdef readonly str finish_reason
    cdef readonly object error         # what ended it in lockstep, or None
    cdef PrefixPool pool
    cdef PoolEntry entry               # of the pool, until the prompt has run
    cdef KvPrefix prefix               # what it continues from, until the prompt has run
    cdef int32_t _drawn
    cdef bint _has_drawn, _prompt_done, _busy
    cdef public bint hold              # the end leaves the pages to `keep` or `close`
    cdef str _ending                   # the finish reason that a running step leaves
    cdef readonly object logits        # float32 (vocab_size,) that the last token was drawn from, or None
    cdef float *_logits
    cdef readonly Stepper stepper      # from the first step that ran ahead of the host to the next one that did not
    cdef bint _fell_back               # a hit failed while it was prepared
    cdef bint _runs_ahead              # the backend has such steps

    cdef int open(self, KvPrefix prefix) except -1
    cdef int run_prompt(self) except -1
    cdef int run_head(self, tl_batch *want) except -1
    cdef int run_last(self) except -1
    cdef bint run_ahead(self) except -1
    cdef bint runs_ahead(self) noexcept
    cdef bint take_ahead(self) except -1
    cdef void end_ahead(self) noexcept
    cdef int ask(self, tl_batch *want) except -1
    cdef int end_prompt(self) except -1
    cdef int fall_back(self) except -1
    cdef bint recover(self, BaseException error) except -1
    cdef bint make_room(self, BaseException error) except -1
    cdef int claim(self) except -1
    cdef int unclaim(self) except -1
    cdef int finish(self, str reason) except -1
    cdef int start(self) except -1
    cdef int next_token(self) except? -2
    cdef int take(self) except? -2


cdef bint launch_ahead(Engine engine, list generations) except -1
