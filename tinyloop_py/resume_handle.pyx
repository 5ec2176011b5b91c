"""ResumeHandle: a prompt that has run once, to be gone on from at other depths."""

cimport cython
from libc.stdint cimport int32_t

from .depth cimport deepen, new_rows, shallow
from .hidden_rows cimport HiddenRows
from .kv_prefix cimport KvPrefix
from .pool_client cimport depth_argument

from .resume_report import ResumeStats


@cython.final
cdef class ResumeHandle:
    """ResumeHandle()\n--\n
    A prompt's KV and hidden rows; `Model.build_resume_handle` makes it, `Model.resume_generate` continues from it at any depth.

    It is used any number of times, by several threads at once, and no use changes it. Closing it, or letting go of it, frees what no
    call still uses.

    Attributes
    ----------
    loops : int
        The depth that it was built for, or extended to.
    cache_window : int
        The window of the calls that go on from it.
    """

    def __cinit__(self):
        self._held = None

    def __init__(self):
        raise TypeError("a ResumeHandle comes from Model.build_resume_handle")

    def __reduce_ex__(self, protocol):
        raise TypeError("a tinyloop.ResumeHandle can't be copied or pickled; build it again with Model.build_resume_handle")

    def __enter__(self):
        self.held()
        return self

    def __exit__(self, kind, error, trace):
        self.close()

    def __repr__(self):
        state = "closed" if self.closed else f"{self.n_tokens} tokens, loops={self.loops}, nbytes={self.nbytes}"
        return f"<tinyloop.ResumeHandle {state}>"

    @property
    def tokens(self):
        """The prompt, a read-only int32 array of shape (n_tokens,)."""
        return self._tokens

    @property
    def n_tokens(self):
        """Tokens of the prompt."""
        return len(self._tokens)

    @property
    def closed(self):
        """Whether nothing is held any more."""
        return self._held is None

    @property
    def nbytes(self):
        """Bytes held: KV pages, those that others share included, and the prompt's hidden rows; 0 once closed."""
        held = self._held
        if held is None:
            return 0
        return held[0].nbytes + (0 if held[1] is None else held[1].x.nbytes + (0 if held[1].e is None else held[1].e.nbytes))

    def stats(self):
        """What its uses ran so far, as ResumeStats."""
        return ResumeStats(self._resumes, self._prefilled_tokens, self._extended_tokens, self._token_loops)

    def extend(self, loops):
        """Run the further loops up to `loops` now and keep them: later uses at that depth run no prompt row.

        Nothing happens where it is that deep already. What it held for its former depth stays in use where the depths share
        it; with a coda, a later use at the former depth runs the prompt again.

        Raises
        ------
        RuntimeError
            The handle or its model is closed.
        OutOfMemoryError
            Memory or kv_budget does not suffice; the handle is as it was.
        TypeError, ValueError
            `loops` is not an integer from 1 to the model's max_loops.
        """
        cdef KvPrefix base
        cdef HiddenRows rows, kept
        base, rows = self.held()
        cdef int depth = depth_argument(loops, self.engine.config.max_loops)
        if depth <= base.loops:
            return
        kept = new_rows(self.engine, base.n_tokens, rows)
        made = (self.deeper(base, rows, depth, kept), kept)
        base, rows = self.held()  # closed meanwhile, or extended by another thread
        if depth > base.loops:
            self._held = made
            self.loops = depth

    def _prefix_at(self, loops):
        """`prefix_at` for callers in Python."""
        return self.prefix_at(loops)

    def close(self):
        """Let go of what is held. Idempotent; calls that are under way go on."""
        self._held = None

    cdef tuple held(self):
        if self._held is None:
            raise RuntimeError("the resume handle is closed, or its model is; build it again")
        self.engine.check_process()
        return self._held

    cdef KvPrefix prefix_at(self, int loops):
        """The prompt's KV at a depth, running what is not held."""
        cdef KvPrefix base
        cdef HiddenRows rows
        base, rows = self.held()
        self._resumes += 1
        if loops == base.loops:
            return base
        if loops > base.loops:
            return self.deeper(base, rows, loops, None)
        if not self.engine.config.n_coda:
            return shallow(self.engine, base, loops)
        self._prefilled_tokens += base.n_tokens  # no boundary but the deepest has every token's x, and the coda's keys need it
        self._token_loops += <long long>base.n_tokens * loops
        return self.engine.build_prefix(self._tokens, loops, base.window)

    cdef KvPrefix deeper(self, KvPrefix base, HiddenRows rows, int loops, HiddenRows kept):
        cdef const int32_t[::1] tokens = self._tokens
        if rows is not None and not (kept is not None and self.engine.plan.keeps_operands):  # what is held in h mode is a whole run's operands
            self._extended_tokens += base.n_tokens
            self._token_loops += <long long>base.n_tokens * (loops - base.loops)
            return deepen(self.engine, tokens, base, rows, loops, kept)
        self._prefilled_tokens += base.n_tokens
        self._token_loops += <long long>base.n_tokens * loops
        return self.engine.build_prefix(tokens, loops, base.window, None, kept)
