"""LoadedModel: a model file at work on one device, and how every call on it begins; model.py adds the calls."""

import os
import warnings
import weakref

from cpython.unicode cimport PyUnicode_FromObject
from libc.stdint cimport INT32_MAX, int32_t
from posix.unistd cimport getpid

from .arguments cimport int_argument
from .engine cimport Engine
from .generation cimport Generation
from .plan cimport Plan
from .pool cimport PrefixPool
from .pool_client cimport PoolClient
from .sampling cimport Sampling
from .tokens cimport c_check_vocab, own_tokens

from .devices import open_context
from .fingerprint import fingerprint
from .kv_modes import KV_DTYPES, check_kv_mode, resolve_kv_mode
from .model_file import open_model_file
from .packing import load_weights

cdef int MAX_ROWS = 512        # tokens of one prefill step
cdef int MAX_ROWS_CUDA = 1024  # the same on a GPU, which needs more of them to be busy
cdef int MAX_OUT = 64          # of them, rows that may reach the head


cdef class LoadedModel(PoolClient):
    """Base class of Model: weights, KV store and engine, arguments, and the start of a generation."""

    def __cinit__(self, *args, **kwargs):
        self.closed = True  # until everything is there
        self._pid = getpid()

    def __init__(self, path, max_seq_len=2048, *, device="auto", kv_mode=None, threads=None, kv_budget=None):
        if self._engine is not None:
            raise RuntimeError("this tinyloop.Model has loaded its file; make another Model for another one")
        self.max_seq_len = int_argument(max_seq_len, "max_seq_len", 1, 1 << 24)
        self.kv_mode = PyUnicode_FromObject(resolve_kv_mode(kv_mode))
        if threads is not None:
            threads = int_argument(threads, "threads", 1, 1024)
        if kv_budget is not None:
            kv_budget = int_argument(kv_budget, "kv_budget", 1, 1 << 50)
        self.path = PyUnicode_FromObject(os.fsdecode(path))
        self._dependents = weakref.WeakValueDictionary()
        with open_model_file(path) as file:
            PoolClient.__init__(self, file.config.default_loops, file.config.max_loops)
            self.config = file.config
            self.stop_ids = tuple(file.stop_ids)
            self._stop_tokens = frozenset(self.stop_ids)
            self.chat_template = file.chat_template
            self._tokenizer_json = file.tokenizer_json
            check_kv_mode(self.kv_mode, file.config)
            context, self.device = open_context(device, threads)
            weights = load_weights(context, file)
            self._weights_id, self._file_id = file.weights_id(), file.file_id
        rows = min(MAX_ROWS if self.device == "cpu" else MAX_ROWS_CUDA, self.max_seq_len)
        plan = Plan(
            context, self.config, weights, KV_DTYPES[self.kv_mode], rows, min(MAX_OUT, rows), self.max_seq_len, kv_budget, self.kv_mode == "h"
        )
        self.nbytes = weights.nbytes
        plan.store.owner = weakref.ref(self)
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

        A call that another thread is in raises RuntimeError at its next step. So does the call that a signal's handler or a
        finaliser closes the model from the inside of: closing again, or letting go of the model, then frees what is left.
        """
        self.closed = True
        if self._engine is None or getpid() != self._pid:  # never opened; or a forked child: its parent's threads are not here
            return
        self.let_go(True)
        self._engine.close()

    def __del__(self):
        """A model that is dropped unclosed takes its entries out of every pool: nothing could match them again."""
        if not self.closed and getpid() == self._pid:
            self.let_go(False)

    def _depend(self, dependent):
        """Has `close` empty a pool of this model's entries, or close a handle."""
        self._dependents[id(dependent)] = dependent

    cdef int let_go(self, bint handles) except -1:
        """Drops the model's entries from every pool, and closes its handles if asked."""
        for reference in self._dependents.valuerefs():  # a list of its own: other threads may add some, or drop the last reference to one
            dependent = reference()
            if isinstance(dependent, PrefixPool):
                (<PrefixPool>dependent)._drop_model(self.model_key)
            elif dependent is not None and handles:
                dependent.close()
        return 0

    def __reduce_ex__(self, protocol):
        raise TypeError("a tinyloop.Model can't be copied or pickled; open its file again")

    cdef Plan opened(self):
        """The plan, for what may be asked of a closed model too."""
        if self._engine is None:
            raise RuntimeError("this tinyloop.Model has no model: opening its file failed")
        return self._engine.plan

    cdef int check_open(self, str method) except -1:
        if self.closed:
            raise RuntimeError(f"tinyloop.Model is closed; cannot call {method}")
        if getpid() != self._pid:
            raise RuntimeError(f"tinyloop.Model was made before this process forked; cannot call {method}: make the model in the child")
        return 0

    @property
    def kv_nbytes(self):
        """Bytes of KV pages in use: by calls, pools, caches and handles."""
        return self.opened().store.used_nbytes

    @property
    def kv_budget(self):
        """Bytes of KV pages that may be in use at a time, or None."""
        return self.opened().store.budget

    @property
    def kv_clamped(self):
        """K and V values clamped to float16's range so far; not 0 means that bf16 would serve this model better."""
        return self.opened().n_clamped

    @property
    def threads(self):
        """CPU threads that compute."""
        return self.opened().context.n_threads

    @property
    def numerics_id(self):
        """What names the bits of this model's results: code path or GPU, numerics version, chunk sizes."""
        return self.opened().context.numerics_id

    @property
    def tokenizer(self):
        """The file's tokenizer, a `tokenizers.Tokenizer`, or None; FormatError where the file's text of it cannot be read."""
        if self._tokenizer is None and self._tokenizer_json is not None:
            from .tokenizer_json import stored_tokenizer

            self._tokenizer = stored_tokenizer(self._tokenizer_json, self.path)
        return self._tokenizer

    def _fingerprint(self):
        """What saved KV must have in common with this model; fingerprint.py."""
        self.check_open("save")
        if self._weights_id is None:  # a file without checksums: its bytes are read once
            with open_model_file(self.path) as file:
                if file.file_id != self._file_id:
                    raise RuntimeError(f"{self.path} has changed since the model was loaded from it, so its weights can't be told apart; reload it")
                self._weights_id = file.weights_id(True)
        return fingerprint(self.config, self._weights_id, self.kv_mode, self.numerics_id)

    # ---- arguments

    cdef const int32_t[::1] prompt_tokens(self, object prompt, object max_tokens, int *n_new, str name="prompt"):
        """The checked prompt of a call that draws up to `max_tokens`; `name` is what an error calls it.

        A copy, as the caller's buffer may change while the call runs.
        """
        cdef const int32_t[::1] tokens = own_tokens(prompt, name)
        cdef Py_ssize_t bad
        n_new[0] = int_argument(max_tokens, "max_tokens", 0, INT32_MAX)
        if tokens.shape[0] == 0:
            raise ValueError(f"{name} is empty, expected at least one token; start with the model's beginning-of-text token")
        bad = c_check_vocab(&tokens[0], tokens.shape[0], self.config.vocab_size)
        if bad >= 0:
            raise ValueError(f"{name}[{bad}] is {tokens[bad]}, expected a token id from 0 to {self.config.vocab_size - 1}")
        if tokens.shape[0] + <Py_ssize_t>n_new[0] > self.max_seq_len:
            raise RuntimeError(
                f"the {name}'s {tokens.shape[0]} tokens and max_tokens = {n_new[0]} exceed max_seq_len = {self.max_seq_len}; "
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

    # ---- starting

    cdef Sampling read_sampling(
        self, object temperature, object top_k, object top_p, object min_p, object repetition_penalty, object logit_bias, object seed,
        object stop_tokens,
    ):
        return Sampling(
            temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, seed, stop_tokens, self.config.vocab_size, self._stop_tokens
        )

    cdef Generation open_generation(
        self, str method, object prompt, object max_tokens, object loops, object temperature, object top_k, object cache_window, object pool,
        object namespace, object top_p, object min_p, object repetition_penalty, object logit_bias, object seed, object stop_tokens,
        bint may_wait=False,
    ):
        """The checked arguments of a generating call as a Generation that has not run yet."""
        cdef tuple key = self.pool_key(method, loops, cache_window, namespace)
        cdef int n_new
        check_pool(pool)
        cdef Sampling sampling = self.read_sampling(temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, seed, stop_tokens)
        self.warn_depth(key[1])
        cdef const int32_t[::1] tokens = self.prompt_tokens(prompt, max_tokens, &n_new)
        return Generation(self._engine, tokens, n_new, key, sampling, pool, None, may_wait)

    def _start(
        self, prompt, max_tokens=128, loops=None, temperature=1.0, top_k=50, cache_window=0, *, pool=None, namespace=None,
        top_p=1.0, min_p=0.0, repetition_penalty=1.0, logit_bias=None, seed=None, stop_tokens=None, run_prompt=True, may_wait=False,
    ):
        """A Generation, an iterator of new tokens: what the generating methods run to its end.

        `run_prompt=False` leaves the prompt to its first step, for `lockstep.step_generations`; `may_wait` as in Generation.
        """
        cdef Generation generation = self.open_generation(
            "generate", prompt, max_tokens, loops, temperature, top_k, cache_window, pool, namespace, top_p, min_p, repetition_penalty,
            logit_bias, seed, stop_tokens, bool(may_wait),
        )
        if run_prompt:
            generation.start()
        return generation

    def _check_open(self, str method):
        """`check_open` for callers in Python."""
        self.check_open(method)


cdef int check_pool(object pool) except -1:
    if pool is not None and not isinstance(pool, PrefixPool):
        raise TypeError(f"pool must be a PrefixPool, got {type(pool).__name__}")
    return 0
