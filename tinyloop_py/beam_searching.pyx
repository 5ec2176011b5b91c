"""Beam search: the likeliest continuations of a prompt."""

import numpy as np

from libc.stdint cimport int32_t

from .arguments cimport int_argument, real_argument
from .beam_group cimport BeamGroup
from .generation cimport Generation
from .loaded_model cimport LoadedModel
from .pool cimport PrefixPool
from .sampling cimport Sampling

from .beam import Beam, score

cdef int MAX_BEAMS = 4096
cdef int MAX_PENALTY = 32  # no length overflows
cdef double BEYOND = 1e300  # above all float32 logits, and still a number


class BeamSearching:
    """Methods of Model."""

    __slots__ = ()

    def beam_search(
        LoadedModel self, prompt, num_beams=4, max_tokens=128, loops=None, cache_window=0, *, length_penalty=1.0, stop_tokens=None, pool=None,
        namespace=None,
    ):
        """The likeliest continuations of a prompt, as far as a beam of `num_beams` finds them.

        At each step every live beam is extended by every token, and the best extensions, by their sum of log-probabilities, are
        the next beams: as many as `num_beams` less those that have ended. A beam ends with a stop token, or after
        `max_tokens`. Equal sums rank by the beam that they extend, then by the lower id. Log-probabilities are the float64
        log-softmax of the float32 logits, without temperature or penalties; `num_beams=1` is greedy decoding. A logit that is
        no number ranks last.

        The prompt runs once. Beams share the pages of what they have in common; a beam that drops out frees its own at once.

        Parameters
        ----------
        prompt : 1-D integer buffer or sequence
            Token ids, at least one.
        num_beams : int
            Beams, 1 to 4,096. More than the vocabulary has tokens is allowed.
        max_tokens : int
            Most tokens of a continuation; 0 runs the prompt only, and returns it as one beam of score 0.
        loops, cache_window : int
            Depth and window, as in `generate`.
        length_penalty : float
            Exponent of the length in the score that ranks what is returned, -32 to 32: sum of log-probabilities / n_new **
            length_penalty. 0 ranks by the sum, 1 by the mean; more favours long beams, a negative one short ones.
        stop_tokens : collection of int, optional
            Ids that end a beam, the stop token included; None takes the file's, () none.
        pool : PrefixPool, optional
            Continue from the longest registered prefix of the prompt; a hit never changes a result.
        namespace : str, optional
            See `register_prefix`.

        Returns
        -------
        list of Beam
            At most `num_beams`, best score first; of equals the one that ended first.

        Raises
        ------
        TypeError, ValueError
            An argument is not of its kind or out of range.
        RuntimeError
            The model is closed, or prompt and max_tokens exceed max_seq_len.
        OutOfMemoryError
            Memory or kv_budget does not suffice for the prompt once and `max_tokens` of every beam; a RuntimeError.
        """
        cdef tuple key = self.pool_key("beam_search", loops, cache_window, namespace)
        cdef int n_new
        cdef int n_beams = int_argument(num_beams, "num_beams", 1, MAX_BEAMS)
        penalty = checked_penalty(length_penalty)
        if pool is not None and not isinstance(pool, PrefixPool):
            raise TypeError(f"pool must be a PrefixPool or None, got {type(pool).__name__}")
        cdef const int32_t[::1] tokens = self.prompt_tokens(prompt, max_tokens, &n_new)
        cdef Sampling greedy = self.read_sampling(0.0, 0, 1.0, 0.0, 1.0, None, None, stop_tokens)
        self.warn_depth(key[1])
        cdef Generation start = Generation(self._engine, tokens, n_new, key, greedy, pool)
        if n_new == 0:
            return [Beam(start.run(), 0.0, "length")]
        cdef BeamGroup group = BeamGroup(self._engine, n_beams)
        try:
            group.promise(start, n_beams)
            start.keep_logits()
            start.start()
            group.take_prompt(start)
            ended = search(group, start.logits, n_beams, n_new, np.array(sorted(greedy.stop_tokens), np.int32))
        finally:
            group.close()
            start.close()
        first = np.asarray(tokens).tolist()
        beams = [Beam(first + new, score(total, len(new), penalty), reason) for new, total, reason in ended]
        return sorted(beams, key=lambda beam: -beam.score)


cdef object checked_penalty(object length_penalty):
    cdef double penalty = real_argument(length_penalty, "length_penalty")
    if not abs(penalty) <= MAX_PENALTY:
        raise ValueError(f"length_penalty is {penalty}, expected a number from -{MAX_PENALTY} to {MAX_PENALTY}")
    return penalty


cdef list search(BeamGroup group, object first_logits, int n_beams, int n_new, object stops):
    """(new tokens, sum of log-probabilities, finish reason) of every beam, in the order of their ends."""
    cdef list ended = []
    cdef int step
    logits = first_logits[None]
    room = np.empty((n_beams, len(first_logits)), np.float32)
    totals, history = np.zeros(1), np.empty((1, 0), np.int32)
    for step in range(n_new):
        parents, tokens, totals = best_extensions(totals, logits, n_beams - len(ended))
        history = np.concatenate([history[parents], tokens[:, None]], axis=1)
        stopped = np.isin(tokens, stops)
        ends = np.ones_like(stopped) if step == n_new - 1 else stopped
        for i in np.flatnonzero(ends):
            ended.append((history[i].tolist(), float(totals[i]), "stop" if stopped[i] else "length"))
        if ends.all():
            break
        live = ~ends
        history, totals = history[live], totals[live]
        group.select(parents[live].tolist())
        logits = room[:len(totals)]
        group.run(np.ascontiguousarray(history[:, step]), logits)
    return ended


cdef tuple best_extensions(object totals, object logits, int n):
    """(beam, token, sum) of the best `n` extensions, best first; equal sums by beam, then by token."""
    # What is no number ranks last, what overflowed first; as wherever a token is drawn.
    logp = np.nan_to_num(logits.astype(np.float64), copy=False, nan=-np.inf, posinf=BEYOND, neginf=-np.inf)
    with np.errstate(invalid="ignore"):
        logp -= logp.max(axis=1, keepdims=True)
        logp -= np.log(np.exp(logp).sum(axis=1, keepdims=True))
    logp[np.isnan(logp)] = -np.inf  # so do rows without a number
    logp += totals[:, None]
    flat = logp.reshape(-1)
    n = min(n, flat.size)
    edge = np.partition(flat, flat.size - n)[flat.size - n]
    found = np.flatnonzero(flat >= edge)  # ascending: by beam, then by token
    found = found[np.argsort(-flat[found], kind="stable")[:n]]
    return found // logp.shape[1], (found % logp.shape[1]).astype(np.int32), flat[found]
