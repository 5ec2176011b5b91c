"""One prefix's KV in the caller's hands: build_prefix_cache, and the calls that begin with it."""

import numpy as np

from libc.stdint cimport int32_t

from .generation cimport Generation
from .loaded_model cimport LoadedModel
from .sampling cimport Sampling
from .streaming cimport start_stream
from .tokens cimport as_tokens

from .prefix_cache import PrefixCache


class PrefixCaching:
    """Methods of Model."""

    __slots__ = ()

    def build_prefix_cache(LoadedModel self, tokens, loops=None, cache_window=0):
        """Run a prefix once, for any number of calls that begin with it.

        Parameters
        ----------
        tokens : 1-D integer buffer or sequence
            1 to max_seq_len token ids; copied.
        loops, cache_window : int
            Depth and window of the calls that it will serve.

        Returns
        -------
        PrefixCache
            Its KV, and the last token's hidden state, so that a call on the prefix alone runs no prompt row.

        Raises
        ------
        TypeError, ValueError, RuntimeError, OutOfMemoryError
            As `generate`.
        """
        cdef tuple key = self.pool_key("build_prefix_cache", loops, cache_window, None)
        cdef int none
        cdef const int32_t[::1] view = self.prompt_tokens(tokens, 0, &none, "tokens")
        self.warn_depth(key[1])
        prefix = self._engine.build_prefix(view, key[1], key[2])
        kept = np.array(view)
        kept.flags.writeable = False
        return PrefixCache(self, prefix, kept)

    def generate_from_prefix_cache(
        LoadedModel self, cache, max_tokens=128, temperature=1.0, top_k=50, *,
        top_p=1.0, min_p=0.0, repetition_penalty=1.0, logit_bias=None, seed=None, stop_tokens=None, suffix=None,
    ):
        """`generate` after a cache's tokens and a suffix, to the last bit; only the suffix is run.

        Parameters
        ----------
        cache : PrefixCache
            Built by this model; its depth and window are the call's. Unchanged by the call.
        suffix : 1-D integer buffer or sequence, optional
            Tokens of the prompt after the cache's.

        The other arguments and the errors are those of `generate`. ValueError for another model's cache, RuntimeError for
        a closed one.

        Returns
        -------
        list of int
            The cache's tokens, the suffix and the drawn tokens.
        """
        self.check_open("generate_from_prefix_cache")
        cdef Sampling sampling = self.read_sampling(temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, seed, stop_tokens)
        return open_on(self, "generate_from_prefix_cache", cache, suffix, max_tokens, sampling).run()

    def stream_from_prefix_cache(
        LoadedModel self, cache, max_tokens=128, temperature=1.0, top_k=50, *,
        top_p=1.0, min_p=0.0, repetition_penalty=1.0, logit_bias=None, seed=None, stop_tokens=None, suffix=None, logprobs=0,
    ):
        """`generate_from_prefix_cache` token by token: a TokenStream of new tokens. `logprobs` as in `generate_stream`."""
        self.check_open("stream_from_prefix_cache")
        cdef Sampling sampling = self.read_sampling(temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, seed, stop_tokens)
        return start_stream(self, open_on(self, "stream_from_prefix_cache", cache, suffix, max_tokens, sampling), logprobs)


cdef Generation open_on(LoadedModel model, str method, object cache, object suffix, object max_tokens, Sampling sampling):
    """A generation that continues from a cache."""
    cdef int n_new
    cdef const int32_t[::1] view
    model.check_open(method)
    if not isinstance(cache, PrefixCache):
        raise TypeError(f"cache must be a PrefixCache, got {type(cache).__name__}")
    prefix = cache._open_for(model)
    tokens = cache.tokens
    if suffix is not None:
        view = as_tokens(suffix, "suffix")
        if view.shape[0]:
            model.prompt_tokens(view, 0, &n_new, "suffix")
            tokens = np.concatenate([tokens, np.asarray(view)])
    view = model.prompt_tokens(tokens, max_tokens, &n_new)
    return Generation(model._engine, view, n_new, model.pool_key(method, cache.loops, cache.cache_window, None), sampling, None, prefix)
