"""The same prompt at another depth."""

import numpy as np

from libc.stdint cimport int32_t

from .depth cimport new_rows
from .engine cimport Engine
from .generation cimport Generation
from .hidden_rows cimport HiddenRows
from .kv_prefix cimport KvPrefix
from .loaded_model cimport LoadedModel
from .pool cimport PrefixPool
from .pool_ledger cimport PoolEntry
from .resume_handle cimport ResumeHandle
from .sampling cimport Sampling
from .sequence cimport Sequence
from .signals cimport is_failure

from .errors import OutOfMemoryError


class Resuming:
    """Methods of Model."""

    __slots__ = ()

    def build_resume_handle(LoadedModel self, prompt, loops=None, cache_window=0, *, pool=None, namespace=None):
        """Run a prompt once and keep what it takes to go on from it at any depth.

        Kept are the KV of every loop and, beside it, each token's hidden state at the last loop's boundary: 4 * dim bytes a
        token, twice that where the loops inject the output of a prelude with layers. `model.kv_nbytes` counts both.

        Parameters
        ----------
        prompt : 1-D integer buffer or sequence
            Token ids, at least one; copied.
        loops : int, optional
            Depth to run it at; None is the model's default. Further loops can go on from there; fewer cost nothing on a
            model without a coda.
        cache_window : int
            Window of the calls that continue from it.
        pool : PrefixPool, optional
            Where to look for the longest prefix of the prompt first. Entries keep no hidden rows, so with a hit a deeper use
            runs the whole prompt again, until `ResumeHandle.extend`.
        namespace : str, optional
            See `register_prefix`.

        Returns
        -------
        ResumeHandle

        Raises
        ------
        TypeError, ValueError
            An argument is not of its kind or out of range.
        RuntimeError
            The model is closed, or the prompt exceeds max_seq_len.
        OutOfMemoryError
            Memory or kv_budget does not suffice; a RuntimeError.
        """
        cdef tuple key = self.pool_key("build_resume_handle", loops, cache_window, namespace)
        cdef int none
        cdef const int32_t[::1] tokens = self.prompt_tokens(prompt, 0, &none)
        cdef ResumeHandle handle = ResumeHandle.__new__(ResumeHandle)
        if pool is not None and not isinstance(pool, PrefixPool):
            raise TypeError(f"pool must be a PrefixPool or None, got {type(pool).__name__}")
        self.warn_depth(key[1])
        handle.engine = self._engine
        handle.model_key = self.model_key
        handle.loops, handle.cache_window = key[1], key[2]
        handle._tokens = np.array(tokens, np.int32)
        handle._tokens.flags.writeable = False
        handle._held = run_with_pool(self._engine, pool, handle._tokens, key)
        self._depend(handle)
        if self.closed:  # meanwhile, by another thread
            handle.close()
        return handle

    def resume_generate(
        LoadedModel self, handle, loops=None, max_tokens=128, temperature=1.0, top_k=50, *,
        top_p=1.0, min_p=0.0, repetition_penalty=1.0, logit_bias=None, seed=None, stop_tokens=None,
    ):
        """`generate` of a handle's prompt at any depth, equal to a run from scratch to the last bit.

        At the handle's depth no prompt row runs. Deeper, only the further loops run over the prompt, and the coda where the
        model has one. With fewer loops nothing runs over the prompt of a model without a coda; one with a coda runs it again.
        `handle.stats()` counts what ran. The handle stays as it is.

        Parameters
        ----------
        handle : ResumeHandle
            Of this model.
        loops : int, optional
            Depth of this call; None is the model's default, not the handle's.

        The other arguments, the result and the errors are those of `generate`; the window is the handle's. A handle that is
        closed raises RuntimeError.
        """
        cdef tuple key
        cdef int n_new
        cdef ResumeHandle held
        self.check_open("resume_generate")
        if not isinstance(handle, ResumeHandle):
            raise TypeError(f"handle must be a ResumeHandle, got {type(handle).__name__}")
        held = handle
        if held.model_key is not self.model_key:
            raise ValueError("the resume handle belongs to another model; build one with this model's build_resume_handle")
        key = self.pool_key("resume_generate", loops, held.cache_window, None)
        cdef const int32_t[::1] tokens = self.prompt_tokens(held._tokens, max_tokens, &n_new)
        cdef Sampling sampling = self.read_sampling(temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, seed, stop_tokens)
        self.warn_depth(key[1])
        return open_resumed(self._engine, held, tokens, n_new, key, sampling).run()


cdef Generation open_resumed(Engine engine, ResumeHandle handle, const int32_t[::1] tokens, int n_new, tuple key, Sampling sampling):
    """A generation on the handle's prompt at the call's depth. Its own pages are promised before anything runs."""
    cdef Sequence promise = engine.new_sequence(key[1], key[2])
    cdef KvPrefix prefix
    promise.own_first = promise.n_pages = tokens.shape[0] // 16
    try:
        promise.reserve(tokens.shape[0] + n_new, engine.max_rows)
        prefix = handle.prefix_at(key[1])
    finally:
        promise.release()
    return Generation(engine, tokens, n_new, key, sampling, None, prefix)


cdef tuple run_with_pool(Engine engine, PrefixPool pool, const int32_t[::1] tokens, tuple key):
    """(KvPrefix, HiddenRows) of a prompt; (KvPrefix, None) from a pool's entry. Under "lru" the pool gives idle entries up for it."""
    cdef PoolEntry entry = None if pool is None else pool._find(key, tokens)
    cdef HiddenRows rows
    cdef tuple held
    cdef bint fell_back = False
    while True:
        try:
            if entry is not None:
                held = (engine.build_prefix(tokens, key[1], key[2], entry.payload), None)
            else:
                rows = new_rows(engine, tokens.shape[0], None)
                held = (engine.build_prefix(tokens, key[1], key[2], None, rows), rows)
            break
        except BaseException as error:
            rows = None
            if pool is None or not is_failure(error):
                raise
            if entry is not None:  # whatever a hit fails on, the plain path answers, or raises for itself
                fell_back = True
                entry = None
            elif not (isinstance(error, OutOfMemoryError) and pool._evict_idle(key[0])):
                raise
    if fell_back:
        pool._record_fallback()
    if pool is not None:
        pool._record(entry, tokens.shape[0], tokens.shape[0] - (0 if entry is None else entry.n_tokens))
    return held
