"""Model: a model file at work on one device, and everything that runs on it."""

import os
import warnings
import weakref

from libc.stdint cimport INT32_MAX, int32_t
from posix.unistd cimport getpid

from .arguments cimport int_argument
from .engine cimport Engine, Generation
from .plan cimport Plan
from .pool cimport PrefixPool
from .pool_client cimport PoolClient
from .pool_ledger cimport PoolEntry
from .sampling cimport Sampling
from .sequence cimport KvPrefix
from .tokens cimport as_tokens, c_check_vocab

from .devices import open_context
from .errors import OutOfMemoryError
from .kv_modes import KV_DTYPES, resolve_kv_mode
from .model_file import open_model_file
from .packing import load_weights

cdef int MAX_ROWS = 512  # tokens of one prefill step
cdef int MAX_OUT = 64    # of them, rows that may reach the head


cdef class Model(PoolClient):
    """Model(path, max_seq_len=2048, *, device="auto", kv_mode=None, threads=None, kv_budget=None)\n--\n
    A looped language model, loaded from a `.tinyloop` file.

    A context manager; `close` frees everything. Several threads may call one model: a step is run at a time.

    Parameters
    ----------
    path : str or path
        The model file.
    max_seq_len : int
        Most tokens of one sequence, prompt and output.
    device : {"auto", "cpu", "cuda", "cuda:N"}
        "auto" is the first CUDA device where one can be used, else the CPU.
    kv_mode : {"fp16", "bf16", "fp32"}, optional
        Type that K and V are stored in; None takes it from the environment (`TINYLOOP_KV_*`), else fp16.
    threads : int, optional
        CPU threads, None for the cores that this process may use. The number never changes a result.
    kv_budget : int, optional
        Bytes of KV pages that may be in use at a time.

    Raises
    ------
    FileNotFoundError, FormatError
        There is no such file, or it is not a sound model file; FormatError is a ValueError.
    TypeError, ValueError, RuntimeError
        An argument is not of its kind, or the device cannot be used.
    """

    def __init__(self, path, max_seq_len=2048, *, device="auto", kv_mode=None, threads=None, kv_budget=None):
        self.closed = True  # until everything is there
        self.max_seq_len = int_argument(max_seq_len, "max_seq_len", 1, 1 << 24)
        self.kv_mode = resolve_kv_mode(kv_mode)
        if threads is not None:
            threads = int_argument(threads, "threads", 1, 1024)
        if kv_budget is not None:
            kv_budget = int_argument(kv_budget, "kv_budget", 1, 1 << 50)
        self.path = os.fspath(path)
        self._pools = weakref.WeakSet()
        self._pid = getpid()
        with open_model_file(path) as file:
            PoolClient.__init__(self, file.config.default_loops, file.config.max_loops)
            self.config = file.config
            self.stop_ids = tuple(file.stop_ids)
            self._stop_tokens = frozenset(self.stop_ids)
            self.chat_template = file.chat_template
            self._tokenizer_json = file.tokenizer_json
            context, self.device = open_context(device, threads)
            weights = load_weights(context, file)
        rows = min(MAX_ROWS, self.max_seq_len)
        plan = Plan(context, self.config, weights, KV_DTYPES[self.kv_mode], rows, min(MAX_OUT, rows), self.max_seq_len, kv_budget)
        self.nbytes = weights.nbytes
        self._engine = Engine(plan, self.config)
        self.closed = False

    def __enter__(self):
        self.check_open("__enter__")
        return self

    def __exit__(self, kind, error, trace):
        self.close()

    def __repr__(self):
        state = "closed" if self.closed else f"device={self.device!r}, kv_mode={self.kv_mode!r}, max_seq_len={self.max_seq_len}"
        return f"<tinyloop.Model {self.path!r} {state}>"

    def close(self):
        """Free weights, KV and threads, and drop this model's entries from every pool. Idempotent.

        A call that another thread is in raises RuntimeError at its next step.
        """
        if self.closed:
            return
        self.closed = True
        if getpid() != self._pid:  # a forked child: its parent's threads are not here
            return
        for pool in list(self._pools):
            (<PrefixPool>pool)._drop_model(self.model_key)
        self._engine.close()

    cdef int check_open(self, str method) except -1:
        if self.closed:
            raise RuntimeError(f"tinyloop.Model is closed; cannot call {method}")
        if getpid() != self._pid:
            raise RuntimeError(f"tinyloop.Model was made before this process forked; cannot call {method}: make the model in the child")
        return 0

    @property
    def kv_nbytes(self):
        """Bytes of KV pages in use: by calls, pools, caches and handles."""
        return self._engine.plan.store.used_nbytes

    @property
    def kv_budget(self):
        """Bytes of KV pages that may be in use at a time, or None."""
        return self._engine.plan.store.budget

    @property
    def kv_clamped(self):
        """K and V values clamped to float16's range so far; not 0 means that bf16 would serve this model better."""
        return self._engine.plan.n_clamped

    @property
    def threads(self):
        """CPU threads that compute."""
        return self._engine.plan.context.n_threads

    @property
    def numerics_id(self):
        """What names the bits of this model's results: code path or GPU, numerics version, chunk sizes."""
        return self._engine.plan.context.numerics_id

    @property
    def tokenizer(self):
        """The file's tokenizer, a `tokenizers.Tokenizer`, or None."""
        if self._tokenizer is None and self._tokenizer_json is not None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_str(self._tokenizer_json)
        return self._tokenizer

    # ---- arguments

    cdef const int32_t[::1] prompt_tokens(self, object prompt, object max_tokens, int *n_new):
        """The checked prompt of a call that draws up to `max_tokens`."""
        cdef const int32_t[::1] tokens = as_tokens(prompt, "prompt")
        cdef Py_ssize_t bad
        n_new[0] = int_argument(max_tokens, "max_tokens", 0, INT32_MAX)
        if tokens.shape[0] == 0:
            raise ValueError("prompt is empty, expected at least one token; start with the model's beginning-of-text token")
        bad = c_check_vocab(&tokens[0], tokens.shape[0], self.config.vocab_size)
        if bad >= 0:
            raise ValueError(f"prompt[{bad}] is {tokens[bad]}, expected a token id from 0 to {self.config.vocab_size - 1}")
        if tokens.shape[0] + <Py_ssize_t>n_new[0] > self.max_seq_len:
            raise RuntimeError(
                f"the prompt's {tokens.shape[0]} tokens and max_tokens = {n_new[0]} exceed max_seq_len = {self.max_seq_len}; "
                f"shorten them or make the model with a larger max_seq_len"
            )
        return tokens

    cdef int warn_depth(self, int loops) except -1:
        if loops > self.config.trained_loops and not self._warned:
            self._warned = True
            warnings.warn(
                f"loops = {loops} is deeper than the {self.config.trained_loops} that this model was trained for", UserWarning, stacklevel=1
            )
        return 0

    # ---- generating

    cdef Generation begin(self, const int32_t[::1] tokens, int max_tokens, tuple key, Sampling sampling, PrefixPool pool, PoolEntry entry):
        """A started generation, from a pool's entry if given; under "lru" the pool gives idle entries up for it."""
        cdef KvPrefix prefix = None if entry is None else entry.payload
        while True:
            try:
                return Generation(self._engine, tokens, max_tokens, key[1], key[2], sampling, prefix)
            except OutOfMemoryError:
                if pool is None or not pool._evict_idle(self.model_key):
                    raise

    cdef Generation begin_with_pool(self, PrefixPool pool, const int32_t[::1] tokens, int max_tokens, tuple key, Sampling sampling):
        cdef Generation generation = None
        cdef PoolEntry entry = pool._find(key, tokens)
        if entry is not None:
            try:
                generation = self.begin(tokens, max_tokens, key, sampling, pool, entry)
            except Exception:  # whatever a hit fails on, the plain path answers, or raises for itself
                pool._record_fallback()
                entry = None
        if generation is None:
            generation = self.begin(tokens, max_tokens, key, sampling, pool, None)
        pool._record(entry, tokens.shape[0], generation.n_prefilled)
        return generation

    def generate(
        self, prompt, max_tokens=128, loops=None, temperature=1.0, top_k=50, cache_window=0, *,
        top_p=1.0, min_p=0.0, repetition_penalty=1.0, logit_bias=None, seed=None, stop_tokens=None,
    ):
        """Draw tokens after a prompt.

        Parameters
        ----------
        prompt : 1-D integer buffer or sequence
            Token ids, at least one.
        max_tokens : int
            Most tokens to draw; 0 runs the prompt only.
        loops : int, optional
            Depth: how often the core runs per token; None is the model's default.
        temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, seed
            How a token is drawn: bias, repetition penalty, temperature, then what top_k, top_p and min_p keep. Temperature 0
            is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off. The same seed gives the same tokens.
        cache_window : int
            Sliding window of attention in positions, 0 for none.
        stop_tokens : collection of int, optional
            Ids that end the output, the stop token included; None takes the file's, () none.

        Returns
        -------
        list of int
            Prompt and drawn tokens.

        Raises
        ------
        TypeError, ValueError
            An argument is not of its kind or out of range.
        RuntimeError
            The model is closed, or prompt and max_tokens exceed max_seq_len.
        OutOfMemoryError
            Memory or kv_budget does not suffice; a RuntimeError.
        """
        cdef tuple key = self.pool_key("generate", loops, cache_window, None)
        cdef int n_new
        cdef const int32_t[::1] tokens = self.prompt_tokens(prompt, max_tokens, &n_new)
        cdef Sampling sampling = Sampling(
            temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, seed, self._stop_tokens if stop_tokens is None else stop_tokens,
            self.config.vocab_size,
        )
        self.warn_depth(key[1])
        return self.begin(tokens, n_new, key, sampling, None, None).run()

    def generate_with_pool(
        self, pool, prompt, max_tokens=128, loops=None, temperature=1.0, top_k=50, cache_window=0, *,
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
        cdef tuple key = self.pool_key("generate_with_pool", loops, cache_window, namespace)
        cdef int n_new
        if not isinstance(pool, PrefixPool):
            raise TypeError(f"pool must be a PrefixPool, got {type(pool).__name__}")
        cdef const int32_t[::1] tokens = self.prompt_tokens(prompt, max_tokens, &n_new)
        cdef Sampling sampling = Sampling(
            temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, seed, self._stop_tokens if stop_tokens is None else stop_tokens,
            self.config.vocab_size,
        )
        self.warn_depth(key[1])
        return self.begin_with_pool(pool, tokens, n_new, key, sampling).run()

    def _start(
        self, prompt, max_tokens=128, loops=None, temperature=1.0, top_k=50, cache_window=0, *, pool=None, namespace=None,
        top_p=1.0, min_p=0.0, repetition_penalty=1.0, logit_bias=None, seed=None, stop_tokens=None,
    ):
        """A started Generation, an iterator of new tokens: what the generating methods run to its end."""
        cdef tuple key = self.pool_key("generate", loops, cache_window, namespace)
        cdef int n_new
        cdef const int32_t[::1] tokens = self.prompt_tokens(prompt, max_tokens, &n_new)
        cdef Sampling sampling = Sampling(
            temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, seed, self._stop_tokens if stop_tokens is None else stop_tokens,
            self.config.vocab_size,
        )
        self.warn_depth(key[1])
        if pool is None:
            return self.begin(tokens, n_new, key, sampling, None, None)
        return self.begin_with_pool(pool, tokens, n_new, key, sampling)

    def logits(self, tokens, loops=None, cache_window=0, *, last_only=False):
        """Logits after every token, float32 (n, vocab_size), or after the last alone, (1, vocab_size).

        Bit-identical to what generating the same tokens computes. Errors are those of `generate`.
        """
        cdef tuple key = self.pool_key("logits", loops, cache_window, None)
        cdef int none
        cdef const int32_t[::1] view = self.prompt_tokens(tokens, 0, &none)
        self.warn_depth(key[1])
        return self._engine.logits(view, key[1], key[2], bool(last_only))

    # ---- the pool

    def register_prefix(self, pool, tokens, loops=None, cache_window=0, *, namespace=None, pin=False):
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
            view = as_tokens(tokens, "tokens")
            key = self.pool_key("register_prefix", loops, cache_window, namespace)
        except ValueError:
            return 0
        if not 1 <= view.shape[0] <= self.max_seq_len or c_check_vocab(&view[0], view.shape[0], self.config.vocab_size) >= 0:
            return 0
        self.warn_depth(key[1])
        self._pools.add(pool)
        if not (<PrefixPool>pool)._touch((<PrefixPool>pool)._get(key, view), bool(pin)):
            self._build_entry(pool, view, key, bool(pin))
        return view.shape[0]

    def _build_entry(self, PrefixPool pool, const int32_t[::1] tokens, tuple key, bint pin):
        cdef PoolEntry base = pool._find(key, tokens)
        cdef KvPrefix prefix = None if base is None else base.payload
        shared = () if prefix is None else [(span, span.nbytes) for span in prefix.spans]
        cdef int n_shared = 0 if prefix is None else prefix.n_tokens // 16 * 16
        nbytes = self._engine.kv_nbytes_for(tokens.shape[0], key[1], key[2])
        if prefix is not None and not any(self._engine.part_windows(key[2])):
            nbytes -= self._engine.kv_nbytes_for(n_shared, key[1], key[2]) - self._engine.kv_nbytes_for(0, key[1], key[2])
        pool._plan(tokens.shape[0], nbytes, shared)
        while True:
            try:
                built = self._engine.build_prefix(tokens, key[1], key[2], prefix)
                break
            except OutOfMemoryError:
                if not pool._evict_idle(self.model_key):
                    raise
        pool._insert(key, tokens, built, pin)
        if self.closed:  # meanwhile, by another thread
            pool._drop_model(self.model_key)
