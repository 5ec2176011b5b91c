"""Registering prefixes in a pool, and generating from the longest that a prompt starts with."""

from libc.stdint cimport int32_t

from .generation cimport Generation
from .kv_prefix cimport KvPrefix
from .loaded_model cimport LoadedModel
from .pool cimport PrefixPool
from .pool_ledger cimport PoolEntry
from .signals cimport is_failure
from .tokens cimport c_check_vocab, own_tokens

from .errors import OutOfMemoryError


class Pooling:
    """Methods of Model."""

    __slots__ = ()

    def generate_with_pool(
        LoadedModel self, pool, prompt, max_tokens=128, loops=None, temperature=1.0, top_k=50, cache_window=0, *,
        top_p=1.0, min_p=0.0, repetition_penalty=1.0, logit_bias=None, seed=None, stop_tokens=None, namespace=None,
    ):
        """`generate`, continuing from the longest registered prefix that the prompt starts with.

        With no match it is `generate`. A match never changes a result, to the last bit; one that fails inside is answered
        by `generate` too, and counted in the pool's `stats().fallbacks`.

        Parameters
        ----------
        pool : PrefixPool
            Only entries of this model, depth, window and namespace match.
        namespace : str, optional
            See `register_prefix`.

        The other arguments, the result and the errors are those of `generate`.
        """
        if pool is None:
            self.check_open("generate_with_pool")
            raise TypeError("pool must be a PrefixPool, got NoneType; without one, call generate")
        cdef Generation generation = self.open_generation(
            "generate_with_pool", prompt, max_tokens, loops, temperature, top_k, cache_window, pool, namespace, top_p, min_p, repetition_penalty,
            logit_bias, seed, stop_tokens,
        )
        return generation.run()

    def register_prefix(LoadedModel self, pool, tokens, loops=None, cache_window=0, *, namespace=None, pin=False):
        """Build the KV of a prefix and put it into a pool; registering again is no work.

        Reuses the longest entry that `tokens` start with.

        Parameters
        ----------
        pool : PrefixPool
            What to put it into.
        tokens : 1-D integer buffer or sequence
            1 to max_seq_len token ids; copied.
        loops, cache_window : int
            Depth and window of the calls that it will serve.
        namespace : str, optional
            Only calls with the same one will hit; None is one.
        pin : bool
            Never evict it.

        Returns
        -------
        int
            Tokens that the entry can match: len(tokens). 0, with the pool untouched, where `pool` is None or `tokens`,
            `loops` or `cache_window` are out of range.

        Raises
        ------
        RuntimeError
            The model is closed.
        OutOfMemoryError
            Memory or kv_budget does not suffice; nothing already held is lost.
        PoolFullError
            It exceeds the pool's own budgets, or only pinned entries are left to evict.
        TypeError
            An argument is not of its kind.
        """
        cdef tuple key
        cdef const int32_t[::1] view
        self.check_open("register_prefix")
        if pool is None:
            return 0
        if not isinstance(pool, PrefixPool):
            raise TypeError(f"pool must be a PrefixPool or None, got {type(pool).__name__}")
        try:
            view = own_tokens(tokens, "tokens")
            key = self.pool_key("register_prefix", loops, cache_window, namespace)
        except ValueError:
            return 0
        if not 1 <= view.shape[0] <= self.max_seq_len or c_check_vocab(&view[0], view.shape[0], self.config.vocab_size) >= 0:
            return 0
        self.warn_depth(key[1])
        self._depend(pool)
        if not (<PrefixPool>pool)._touch((<PrefixPool>pool)._get(key, view), bool(pin)):
            build_entry(self, pool, view, key, bool(pin))
        return view.shape[0]


cdef int build_entry(LoadedModel model, PrefixPool pool, const int32_t[::1] tokens, tuple key, bint pin) except -1:
    """Builds a prefix from the longest entry that it starts with, and inserts it."""
    cdef PoolEntry base = pool._find(key, tokens)
    cdef KvPrefix prefix = None if base is None else base.payload
    shared = () if prefix is None else [(span, span.nbytes) for span in prefix.spans]
    pool._plan(tokens.shape[0], model._engine.kv_nbytes_for(tokens.shape[0], key[1], key[2], prefix), shared)
    while True:
        try:
            built = model._engine.build_prefix(tokens, key[1], key[2], prefix)
            break
        except OutOfMemoryError as error:
            if not (is_failure(error) and pool._evict_idle(model.model_key)):
                raise
    pool._insert(key, tokens, built, pin)
    if model.closed:  # meanwhile, by another thread
        pool._drop_model(model.model_key)
    return 0
