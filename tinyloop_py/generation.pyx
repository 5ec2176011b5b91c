"""One prompt and the tokens drawn for it: what every generating method runs."""

import numpy as np

from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from .abi cimport TL_RUN_HEAD, tl_batch
from .engine cimport Engine
from .kv_prefix cimport KvPrefix
from .pool cimport PrefixPool
from .runner cimport Runner, Stepper
from .sampling cimport Sampling
from .signals cimport check_signals, is_failure

from .errors import OutOfMemoryError


cdef class Generation:
    """An iterator over the tokens drawn after a prompt.

    Making one takes its pages' promise and a hit's pages, and runs nothing; the prompt runs at the first token, at `start`, or row
    by row in `lockstep.step_generations`. Whatever fails while a pool's hit is prepared, the prompt's run included, makes
    it start again without the hit.

    Parameters
    ----------
    tokens
        The prompt, at least one token; copied.
    key
        `PoolClient.pool_key` of the call: its depth and window, and what a pool's entry must equal.
    pool
        Where to look for the longest prefix of the prompt, or None.
    prefix
        KV of a prefix of the prompt to go on from instead, or None.
    may_wait
        Others at work will give memory back: a hit that has no room now raises OutOfMemoryError, to be tried again later.
    """

    def __init__(
        self, Engine engine, const int32_t[::1] tokens, int max_tokens, tuple key, Sampling sampling, PrefixPool pool=None, KvPrefix prefix=None,
        bint may_wait=False,
    ):
        self.engine = engine
        self.sampling = sampling
        self.key = key
        self._runs_ahead = engine.runner.runs_ahead(sampling)
        self.max_tokens = max_tokens
        self.n_prompt = self.n_tokens = tokens.shape[0]
        self.tokens = <int32_t *>malloc((self.n_prompt + max_tokens) * sizeof(int32_t))
        if self.tokens == NULL:
            raise MemoryError
        memcpy(self.tokens, &tokens[0], self.n_prompt * sizeof(int32_t))
        self.pool = pool
        if pool is not None:
            self.entry = pool._find(key, tokens)
            if self.entry is not None:
                prefix = self.entry.payload
        try:
            self.open(prefix)
        except BaseException as error:
            if self.entry is None or not is_failure(error) or (may_wait and isinstance(error, OutOfMemoryError)):
                raise
            self.fall_back()

    def __dealloc__(self):
        free(self.tokens)

    cdef int open(self, KvPrefix prefix) except -1:
        """Starts the sequence on a prefix, with the store's promise; under "lru" the pool gives idle entries up for it."""
        self.prefix = prefix
        while True:
            self.seq = self.engine.new_sequence(self.key[1], self.key[2])
            try:
                self.engine.open(self.seq, prefix, self.n_prompt + self.max_tokens)
                break
            except BaseException as error:
                self.seq.release()
                if not self.make_room(error):
                    raise
        self.n_cached = self.seq.n_tokens
        return 0

    cdef bint make_room(self, BaseException error) except -1:
        """Whether memory was short and an idle entry went for it."""
        return self.pool is not None and isinstance(error, OutOfMemoryError) and is_failure(error) and self.pool._evict_idle(self.key[0])

    cdef int fall_back(self) except -1:
        """Starts again without the hit: the plain path answers, or raises for itself."""
        self._fell_back = True
        self.entry = None
        self.seq.release()
        self.open(None)
        return 0

    def keep_logits(self):
        """Has every draw leave the logits it came from in `logits`; to be called before the prompt runs."""
        cdef float[::1] view
        if self._prompt_done or self._busy:
            raise RuntimeError("keep_logits came after the prompt has run; the first token's logits are gone")
        self.logits = view = np.empty(self.engine.config.vocab_size, np.float32)
        self._logits = &view[0]

    # ---- running

    cdef int start(self) except -1:
        """Runs what is left of the prompt, and draws the first token."""
        self.claim()
        try:
            while not self._prompt_done and self._ending is None:
                try:
                    self.run_prompt()
                except BaseException as error:
                    if not self.recover(error):
                        raise
        finally:
            self.unclaim()
        return 0

    cdef int run_prompt(self) except -1:
        cdef tl_batch want
        memset(&want, 0, sizeof(want))
        if self.max_tokens > 0:
            want.sections = TL_RUN_HEAD
            want.n_out = 1
            self.ask(&want)
        if self.seq.n_tokens < self.n_prompt:
            self.engine.prefill(self.seq, self.tokens, self.n_prompt, &want)
        elif self.max_tokens > 0:
            self.run_head(&want)
        self.end_prompt()
        return 0

    cdef int ask(self, tl_batch *want) except -1:
        """Has the step draw the token that follows."""
        self.sampling.c.position = self.n_tokens
        self.sampling.c.history = self.tokens
        self.sampling.c.n_history = self.n_tokens
        want.sampling = &self.sampling.c
        want.sampled = &self._drawn
        want.logits = self._logits
        return 0

    cdef int run_head(self, tl_batch *want) except -1:
        """The whole prompt is cached: only the head runs, on the last token's x."""
        cdef const float[::1] final_x = self.prefix.final_x
        want.x_in = &final_x[0]
        with self.engine._lock:
            self.engine.run_locked(want)
        return check_signals()

    cdef int end_prompt(self) except -1:
        """The prompt has run: counts it in the pool, and lets go of what only a start needs."""
        self._prompt_done = True
        self._has_drawn = self.max_tokens > 0
        if self.pool is not None:
            if self._fell_back:
                self.pool._record_fallback()
            self.pool._record(self.entry, self.n_prompt, self.n_prompt - self.n_cached)
        self.entry = self.prefix = None
        if self.max_tokens == 0:
            self.finish("length")
        return 0

    cdef bint recover(self, BaseException error) except -1:
        """A step failed. Whether to try it again, with room made or without the hit; else the generation has ended."""
        if self.make_room(error):
            return True
        if self.entry is not None and is_failure(error):
            try:
                self.fall_back()
                return True
            except BaseException:
                self.finish("cancelled")
                raise
        self.finish("cancelled")
        return False

    cdef int run_last(self) except -1:
        """Runs the last token's row and draws the next."""
        cdef tl_batch want
        cdef int32_t zero = 0
        if self.runs_ahead() and self.run_ahead():
            return 0
        self.end_ahead()
        memset(&want, 0, sizeof(want))
        want.sections = TL_RUN_HEAD
        want.n_out = 1
        want.out_row = &zero
        self.ask(&want)
        self.engine.step(self.seq, self.tokens + self.n_tokens - 1, 1, &want)
        self._has_drawn = True
        return 0

    cdef bint run_ahead(self) except -1:
        """Draws the next token by steps that run ahead; False where there is no memory for their state."""
        self.engine.check_open()
        if (self.stepper is None or self.stepper.low()) and not launch_ahead(self.engine, [self]) and self.stepper is None:
            return False
        error = self.stepper.error
        if error is not None:
            self.end_ahead()
            raise error
        if not self.take_ahead():
            return False
        check_signals()
        return True

    cdef bint runs_ahead(self) noexcept:
        """Whether its steps may run ahead of the host."""
        return self._runs_ahead and self._logits == NULL

    cdef bint take_ahead(self) except -1:
        """Draws the next token where steps have run ahead."""
        if self.stepper is None or self.stepper.n_ahead == 0:
            return False
        self._drawn = self.stepper.take()
        self._has_drawn = True
        return True

    cdef void end_ahead(self) noexcept:
        """The next step is one of another kind, or there is none."""
        stepper, self.stepper = self.stepper, None
        if stepper is not None:
            (<Stepper>stepper).stop()

    cdef int next_token(self) except? -2:
        """Draws the next token and returns it; -1 when the output has ended."""
        if not self._prompt_done and self.finish_reason is None:
            self.start()
        while not self._has_drawn and self.finish_reason is None:
            self.claim()
            try:
                self.run_last()
            except BaseException as error:
                if not self.recover(error):
                    raise
            finally:
                self.unclaim()
        return -1 if self.finish_reason is not None else self.take()

    cdef int take(self) except? -2:
        """Appends the token that was drawn."""
        self._has_drawn = False
        self.tokens[self.n_tokens] = self._drawn
        self.n_tokens += 1
        if self.sampling.stops(self._drawn):
            self.finish("stop")
        elif self.n_tokens - self.n_prompt == self.max_tokens:
            self.finish("length")
        return self._drawn

    # ---- ending

    cdef int claim(self) except -1:
        """Before a step: a generation is in one at a time."""
        if self._busy:
            raise RuntimeError("this generation is being stepped by another thread")
        self._busy = True
        return 0

    cdef int unclaim(self) except -1:
        self._busy = False
        if self._ending is not None:
            self.finish(self._ending)
        return 0

    cdef int finish(self, str reason) except -1:
        """Ends the output and frees its pages; those of a step that runs when it ends."""
        if self.finish_reason is not None:
            return 0
        if self._busy:
            self._ending = self._ending or reason
            return 0
        self.finish_reason = reason
        self.end_ahead()
        if not self.hold:
            self.seq.release()
        self.entry = self.prefix = None
        return 0

    def close(self):
        """Ends the output and frees its pages, at once or when the step that another thread is in ends. Idempotent."""
        self.hold = False
        self.finish("cancelled")
        if not self._busy:
            self.seq.release()

    def keep(self):
        """Ends the output and gives prompt and output as a KvPrefix, which takes the pages over.

        `hold` must have been set before the output ended. Runs one row, that of the last token drawn.
        """
        cdef tl_batch want
        cdef int32_t zero = 0
        final_x = np.empty(self.engine.config.dim, np.float32)
        boundary_x = np.empty((self.seq.loops, self.engine.config.dim), np.float32)
        cdef float[::1] final_view = final_x
        cdef float[:, ::1] boundary_view = boundary_x
        if not self.hold or self.seq.n_tokens != self.n_tokens - 1 or self._has_drawn:
            raise RuntimeError("this generation holds no output to keep")
        self.claim()
        try:
            memset(&want, 0, sizeof(want))
            want.sections = TL_RUN_HEAD
            want.n_out = 1
            want.out_row = &zero
            want.final_x = &final_view[0]
            want.boundary_x = &boundary_view[0, 0]
            self.engine.step(self.seq, self.tokens + self.n_tokens - 1, 1, &want)
        finally:
            self.unclaim()
        self.finish("cancelled")
        self.hold = False
        return self.seq.freeze(final_x, boundary_x)

    def run(self):
        """Draws until the end and returns prompt and output as a list."""
        try:
            while self.next_token() >= 0:
                pass
        finally:
            self.close()
        return self.all_tokens()

    def all_tokens(self):
        """Prompt and output so far, as a list of ints."""
        cdef int i
        return [self.tokens[i] for i in range(self.n_tokens)]

    def __iter__(self):
        return self

    def __next__(self):
        cdef int token = self.next_token()
        if token < 0:
            raise StopIteration
        return token

    @property
    def n_prefilled(self):
        """Prompt tokens that run through the model."""
        return self.n_prompt - self.n_cached


cdef bint launch_ahead(Engine engine, list generations) except -1:
    """Has further steps of generations run ahead of the host together; False where there is no memory for their state.

    Those that have nothing ahead while others have wait until that is taken, as all begin together.
    """
    cdef Generation g
    cdef Runner runner = engine.runner
    cdef Stepper stepper
    cdef list steppers = [g.stepper for g in generations]
    try:
        with engine._lock:
            engine.check_open()
            if None not in steppers and runner.go_on(steppers):
                return True
            for stepper in steppers:
                if stepper is not None and stepper.n_ahead:
                    return True
            for g in generations:
                g.end_ahead()
                g.stepper = runner.stepper(g.seq, g.sampling, g.tokens, g.n_tokens, g.n_prompt + g.max_tokens - g.n_tokens)
            try:
                runner.begin([g.stepper for g in generations])
            except BaseException:
                for g in generations:
                    g.end_ahead()
                raise
    except OutOfMemoryError:
        return False
    return True
