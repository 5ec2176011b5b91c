"""Several prompts at once: generate_batch."""

from .engine cimport Engine
from .generation cimport Generation
from .loaded_model cimport LoadedModel, check_pool
from .pool cimport PrefixPool
from .sampling cimport Sampling
from .signals cimport is_failure

import numpy as np

from .errors import OutOfMemoryError
from .lockstep import step_generations


class Batching:
    """Methods of Model."""

    __slots__ = ()

    def generate_batch(
        LoadedModel self, prompts, max_tokens=128, loops=None, temperature=1.0, top_k=50, cache_window=0, *,
        top_p=1.0, min_p=0.0, repetition_penalty=1.0, logit_bias=None, seed=None, stop_tokens=None, pool=None, namespace=None,
    ):
        """Draw tokens after each of several prompts, all of them in the same steps.

        Each result is, to the last bit, what `generate` (with a pool `generate_with_pool`) gives for its prompt alone.
        Prompts may differ in length, and each has its own hit in the pool. Those that the KV budget has no room for yet,
        and those beyond what one step takes, start when others have ended.

        Parameters
        ----------
        prompts : sequence of 1-D integer buffers or sequences
            One or more tokens each; no prompts give no results.
        seed : int, sequence of int or None, optional
            One seed for all: each prompt draws as `generate(prompt, seed=seed)` does. A sequence has one for each prompt.
            None takes a fresh one for each.
        pool : PrefixPool, optional
            Continue each prompt from the longest registered prefix that it starts with.
        namespace : str, optional
            See `register_prefix`.

        The other arguments are those of `generate`, the same for all prompts.

        Returns
        -------
        list of list of int
            Prompt and drawn tokens, in the order of `prompts`.

        Raises
        ------
        TypeError, ValueError, RuntimeError, OutOfMemoryError
            As `generate`. Every prompt is checked before any work. If one prompt fails in mid-call, the call does, and
            all its pages are free again.
        """
        cdef tuple key = self.pool_key("generate_batch", loops, cache_window, namespace)
        cdef list requests = []
        cdef Sampling sampling
        cdef int n_new = 0
        check_pool(pool)
        prompts = read_prompts(prompts)
        seeds = read_seeds(seed, len(prompts))
        if stop_tokens is not None and not hasattr(stop_tokens, "__len__"):
            stop_tokens = tuple(Sampling._iterate(stop_tokens))  # every prompt's, not the first's alone
        for i, prompt in enumerate(prompts):
            tokens = np.asarray(self.prompt_tokens(prompt, max_tokens, &n_new, f"prompts[{i}]"))
            sampling = self.read_sampling(temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, seeds[i], stop_tokens)
            requests.append((tokens, sampling))
        self.warn_depth(key[1])
        return run_batch(self._engine, requests, n_new, key, pool)


cdef list read_prompts(object prompts):
    if isinstance(prompts, (str, bytes, bytearray, dict, set, frozenset)) or not hasattr(prompts, "__iter__") or getattr(prompts, "ndim", 1) == 0:
        raise TypeError(f"prompts must be a sequence of prompts, got {type(prompts).__name__}")
    return list(prompts)


cdef list read_seeds(object seed, Py_ssize_t n):
    """The seed of every prompt."""
    if not (hasattr(seed, "__len__") and hasattr(seed, "__getitem__")) or isinstance(seed, (str, bytes, dict)) or getattr(seed, "ndim", 1) == 0:
        return [seed] * n
    if len(seed) != n:
        raise ValueError(f"seed has {len(seed)} seeds for {n} prompts, expected one integer, or one for each prompt")
    return list(seed)


cdef list run_batch(Engine engine, list requests, int n_new, tuple key, PrefixPool pool):
    """Starts generations as memory and steps have room, and steps them until all have ended."""
    cdef Generation g
    cdef list results = [None] * len(requests)
    cdef list live = []  # (index, Generation)
    cdef Py_ssize_t n_started = 0
    try:
        while live or n_started < len(requests):
            while n_started < len(requests) and len(live) < engine.max_out:
                try:
                    g = Generation(engine, requests[n_started][0], n_new, key, requests[n_started][1], pool, None, len(live) > 0)
                except OutOfMemoryError as error:
                    if not live or not is_failure(error):
                        raise
                    break
                live.append((n_started, g))
                n_started += 1
            step_generations([g for _, g in live])
            for i, g in live:
                if g.error is not None:
                    raise g.error
                if g.finish_reason is not None:
                    results[i] = g.all_tokens()
            live = [(i, g) for i, g in live if (<Generation>g).finish_reason is None]
    finally:
        for _, g in live:
            g.close()
    return results
