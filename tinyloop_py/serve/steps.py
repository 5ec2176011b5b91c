"""What an engine does to a model, in steps of bounded length: build a prefix, open generations, draw a token for each.

The one file of the server that knows the runtime's inside. All of it runs in the engine's worker thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import OutOfMemoryError
from ..pool import PrefixPool
from ..tokens import as_tokens, check_vocab

if TYPE_CHECKING:
    from ..generation import Generation
    from ..kv_prefix import KvPrefix
    from ..model import Model
    from .requests import GenerationRequest


class PrefixBuild:
    """A prefix that is run some rows at a time, and then put into a pool.

    What is run in parts has the bits of what is run at once (docs/exactness.md), so a prefix that grows by itself is a prefix.

    Parameters
    ----------
    source
        The pool whose longest matching entry it continues from.
    target
        The pool that it is put into.
    base
        KV of a prefix of the tokens that is at hand already, used where it is longer than what the source has.
    """

    def __init__(
        self, model: Model, source: PrefixPool, target: PrefixPool, tokens: Sequence[int], loops: int | None, window: int, namespace: str | None,
        *, pin: bool = False, rows: int = 128, base: KvPrefix | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.target = target
        model._depend(target)
        self.tokens = np.array(as_tokens(tokens), np.int32)  # a copy: who gave them may write to them while they run
        if (bad := check_vocab(self.tokens, model.config.vocab_size)) >= 0:
            raise ValueError(f"tokens[{bad}] is {self.tokens[bad]}, expected a token id from 0 to {model.config.vocab_size - 1}")
        self.key = model._pool_key(loops, window, namespace)
        self.namespace = namespace
        self.pin = pin
        self.rows = rows
        entry = source._find(self.key, self.tokens)
        self.n_matched = 0 if entry is None else entry.n_tokens
        self.base: KvPrefix | None = base if base is not None and base.n_tokens > self.n_matched else None if entry is None else entry.payload
        self.done = target._touch(target._get(self.key, self.tokens), pin)
        self.inserted = False  # whether it was this build that put it there
        if self.done:
            self.base = None
        else:
            self._plan_room()

    def _plan_room(self) -> None:
        """Has the pool make room, or refuse, before anything is run."""
        _, loops, window, _ = self.key
        nbytes = self.model._engine.kv_nbytes_for(len(self.tokens), loops, window, self.base)
        shared = () if self.base is None else [part for part in self.base.parts() if part[0] is not self.base]
        self.target._plan(len(self.tokens), nbytes, shared)

    def step(self) -> bool:
        """Runs the next rows; True when the prefix is in the pool."""
        if self.done:
            return True
        n = len(self.tokens)
        first = 0 if self.base is None else self.base.n_tokens
        if first < n:
            self._run(min(n, (first + self.rows) // 16 * 16 if first + self.rows < n else n))
        assert self.base is not None
        if self.base.n_tokens == n:
            self.inserted = self.target._get(self.key, self.tokens) is None
            self.target._insert(self.key, self.tokens, self.base, self.pin)
            self.done, self.base = True, None
        return self.done

    def _run(self, end: int) -> None:
        _, loops, window, _ = self.key
        while True:
            try:
                self.base = self.model._engine.build_prefix(self.tokens[:end], loops, window, self.base)
                return
            except OutOfMemoryError:
                if not self.target._evict_idle(self.key[0]):
                    raise


def open_generation(model: Model, pool: PrefixPool | None, request: GenerationRequest, index: int, window: int, may_wait: bool = False) -> Generation:
    """The `index`-th output of a request, on the pool's longest match; `may_wait` as in Generation."""
    s = request.sampling
    seed = None if s.seed is None else (s.seed + index) % 2**64
    generation = model._start(
        request.tokens, request.max_tokens, request.loops, s.temperature, s.top_k, window, pool=pool, namespace=request.namespace, top_p=s.top_p,
        min_p=s.min_p, repetition_penalty=s.repetition_penalty, logit_bias=s.logit_bias, seed=seed, stop_tokens=request.stop_tokens, run_prompt=False,
        may_wait=may_wait,
    )  # fmt: skip
    if request.logprobs is not None:
        generation.keep_logits()
    return generation
