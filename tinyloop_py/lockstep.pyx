"""Several generations in one step of the model: their rows fill it together, wherever each of them is.

A generation's bits do not depend on its company (docs/exactness.md), so which rows share a step is a matter of speed alone.
"""

import numpy as np

from libc.stdint cimport int32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from .abi cimport TL_RUN_ALL, TL_RUN_HEAD, tl_batch, tl_sampling
from .engine cimport Engine
from .generation cimport Generation, launch_ahead
from .runner cimport Stepper
from .signals cimport check_signals


def step_generations(list generations, int max_rows=0):
    """One step for every generation of a list.

    Each one whose prompt has run draws its next token. What rows a step has left run prompts, in the order of the list; one
    whose prompt ends in the step draws its first token. Depths and windows may differ: those that agree share steps.
    Not more than an engine's `max_out` sequences fit one native step, so a longer list takes several.

    Parameters
    ----------
    generations : list of Generation
        Of one model; those that have ended are passed over.
    max_rows : int
        Most rows of prompts in a native step, so that those that draw do not wait for long; 0 for as many as fit.

    Returns
    -------
    list of int or None
        The token that each drew: None while its prompt still runs, where it has ended, and on a GPU for some calls where others
        have steps ahead that it has not. One that fails alone, for want of a page, ends with its `error`; the others go on.

    Raises
    ------
    RuntimeError
        The step as a whole failed, and every generation is as it was; or another thread steps one of them.
    """
    cdef Generation g
    cdef dict groups = {}
    cdef list claimed = []
    try:
        for g in generations:
            if g.finish_reason is None and not g._has_drawn:
                g.claim()
                claimed.append(g)
                if g.seq.n_tokens < g.n_tokens:
                    groups.setdefault((g.engine, g.seq.loops, g.seq.window), []).append(g)
                else:
                    run_cached(g)
        for group in groups.values():
            run_group(group, max_rows)
    finally:
        for g in claimed:
            g.unclaim()
    check_signals()
    return [(<Generation>g).take() if (<Generation>g)._has_drawn and (<Generation>g).finish_reason is None else None for g in generations]


cdef int run_cached(Generation g) except -1:
    """A whole prompt that is cached: the head alone."""
    try:
        g.run_prompt()
    except Exception as error:
        settle(g, error)
    return 0


cdef int settle(Generation g, object error) except -1:
    """A generation failed alone: it tries again in the next step, or has ended."""
    try:
        if not g.recover(error):
            g.error = error
    except Exception as second:
        g.error = second
    return 0


cdef int run_group(list generations, int max_rows) except -1:
    """The native steps of generations that agree in depth and window."""
    cdef Generation g
    cdef Engine engine = (<Generation>generations[0]).engine
    cdef list drawing = [g for g in generations if (<Generation>g)._prompt_done]
    cdef list prompts = [g for g in generations if not (<Generation>g)._prompt_done]
    cdef list parts, counts
    cdef int n_rows, n
    max_rows = max_rows if max_rows > 0 else engine.max_rows
    if drawing and not prompts and run_ahead(engine, drawing):
        return 0
    drawing = [g for g in drawing if not (<Generation>g)._has_drawn and not (<Generation>g).take_ahead()]
    while drawing or prompts:
        parts, drawing = drawing[:engine.max_out], drawing[engine.max_out:]
        counts = [1] * len(parts)
        n_rows = len(parts)
        if not drawing:
            max_rows = min(n_rows + max_rows, engine.max_rows)
            for g in prompts:
                n = min(g.n_prompt - g.seq.n_tokens, max_rows - n_rows)
                if n == 0 or len(parts) == engine.max_out:
                    break
                parts.append(g)
                counts.append(n)
                n_rows += n
            prompts = []
        run_parts(engine, parts, counts)
    return 0


cdef bint run_ahead(Engine engine, list generations) except -1:
    """Has generations draw by steps that run ahead of the host; False where some have to share native steps.

    Rows that run ahead begin together. One that comes to others draws nothing before they have taken what was ahead.
    """
    cdef Generation g
    cdef Stepper stepper
    cdef list part
    cdef bint low
    cdef int first
    for g in generations:
        if not g.runs_ahead():
            return False
    engine.check_open()
    for first in range(0, len(generations), engine.max_out):
        part = generations[first:first + engine.max_out]
        low = False
        for g in part:
            low = low or g.stepper is None or g.stepper.low()
        if low and not launch_ahead(engine, part):
            return False
        for g in part:
            stepper = g.stepper
            if stepper is not None and stepper.error is not None:
                g.end_ahead()
                settle(g, stepper.error)
            else:
                g.take_ahead()
    return True


cdef int run_parts(Engine engine, list parts, list counts) except -1:
    """One native step: the next rows of each part."""
    cdef StepRows rows
    cdef Generation g
    cdef list pairs = list(zip(parts, counts)), failed = [], running = [], n_each = []  # nothing that could wake the collector under the lock
    cdef bint keep_logits = False
    if engine._lockstep is None:
        engine._lockstep = StepRows(engine)
    rows = engine._lockstep
    with engine._lock:
        engine.check_open()
        rows.n_rows = rows.n_seqs = rows.n_out = 0
        for g, n in pairs:
            if g._ending is not None:
                continue
            try:
                rows.add(g, n)
            except Exception as error:
                failed.append((g, error))
                continue
            running.append(g)
            n_each.append(n)
            keep_logits = keep_logits or g._logits != NULL
        if running:
            g = running[0]
            rows.run(g.seq.loops, g.seq.window, keep_logits)
            rows.deliver(running, n_each)
    for g in running:
        if not g._prompt_done and g.seq.n_tokens == g.n_prompt:
            g.end_prompt()
    for g, error in failed:
        settle(g, error)
    return 0


cdef class StepRows:
    """The arrays of a native step; filled and run under the engine's lock."""

    def __cinit__(self, Engine engine):
        cdef int n = max(engine.max_rows, engine.max_out)
        self.engine = engine
        self.token = <int32_t *>calloc(n, sizeof(int32_t))
        self.pos = <int32_t *>calloc(n, sizeof(int32_t))
        self.seq = <int32_t *>calloc(n, sizeof(int32_t))
        self.table = <const int32_t **>calloc(n, sizeof(int32_t *))
        self.out_row = <int32_t *>calloc(n, sizeof(int32_t))
        self.drawn = <int32_t *>calloc(n, sizeof(int32_t))
        self.sampling = <tl_sampling *>calloc(engine.max_out, sizeof(tl_sampling))
        if not (self.token and self.pos and self.seq and self.table and self.out_row and self.drawn and self.sampling):
            raise MemoryError

    def __dealloc__(self):
        free(self.token)
        free(self.pos)
        free(self.seq)
        free(self.table)
        free(self.out_row)
        free(self.drawn)
        free(self.sampling)

    cdef int add(self, Generation g, int n) except -1:
        """Takes pages for the next `n` rows of a generation and appends them; the last of what it has draws."""
        cdef int i, first = g.seq.n_tokens
        cdef tl_batch want
        g.end_ahead()
        g.seq.grow(first + n)
        for i in range(n):
            self.token[self.n_rows + i] = g.tokens[first + i]
            self.pos[self.n_rows + i] = first + i
            self.seq[self.n_rows + i] = self.n_seqs
        self.table[self.n_seqs] = g.seq.table
        self.n_rows += n
        self.n_seqs += 1
        if first + n == g.n_tokens and g.max_tokens > 0:
            g.ask(&want)
            self.sampling[self.n_out] = g.sampling.c
            self.out_row[self.n_out] = self.n_rows - 1
            self.n_out += 1
        return 0

    cdef int run(self, int loops, int window, bint keep_logits) except -1:
        cdef tl_batch want
        cdef float[:, ::1] logits
        memset(&want, 0, sizeof(want))
        want.sections = TL_RUN_ALL if self.n_out else TL_RUN_ALL & ~TL_RUN_HEAD
        want.loop_begin, want.loop_end = 0, loops
        want.window = window
        want.n_rows = self.n_rows
        want.token = self.token
        want.pos = self.pos
        want.seq = self.seq
        want.page_table = self.table
        want.n_out = self.n_out
        want.out_row = self.out_row
        if self.n_out:
            want.sampling = self.sampling
            want.sampled = self.drawn
        if keep_logits and self.n_out:
            if self._all_logits is None:
                self._all_logits = np.empty((self.engine.max_out, self.engine.config.vocab_size), np.float32)
            logits = self._all_logits
            want.logits = &logits[0, 0]
        return self.engine.run_locked(&want)

    cdef int deliver(self, list parts, list counts) except -1:
        """Hands every generation what the step made of its rows."""
        cdef Generation g
        cdef int out = 0, i
        cdef float[:, ::1] logits = self._all_logits
        for i in range(len(parts)):
            g = parts[i]
            g.seq.advance(g.seq.n_tokens + <int>counts[i])
            if g.seq.n_tokens < g.n_tokens:
                continue
            if g.max_tokens > 0:
                g._drawn = self.drawn[out]
                g._has_drawn = True
                if g._logits != NULL:
                    memcpy(g._logits, &logits[out, 0], logits.shape[1] * sizeof(float))
                out += 1
        return 0
