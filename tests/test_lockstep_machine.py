"""Generations opened, stepped together and alone, cancelled and made to fail in any order: each that ends has its serial answer."""

import contextlib

import numpy as np
import pytest
from models import CONFIGS, random_tokens
from runtime import open_model

import tinyloop_py as tl
from tinyloop_py.lockstep import step_generations

STEM = random_tokens(CONFIGS["shipped"], 70, seed=9)
SAMPLED = {"temperature": 0.9, "top_k": 20, "stop_tokens": (5, 6, 7)}


class Machine:
    """Random operations on one model and one pool."""

    def __init__(self, model, plain, seed, eviction):
        self.model, self.plain, self.rng = model, plain, np.random.default_rng(seed)
        self.pool = tl.PrefixPool(capacity=3, eviction=eviction)
        self.live, self.asked, self.n_ended, self.n_hits = [], {}, 0, 0
        self.store = model._engine.plan.store

    def kind(self):
        return [(1, 0), (2, 0), (2, 17)][self.rng.integers(3)]

    def open(self):
        loops, window = self.kind()
        prompt = np.concatenate([STEM[: self.rng.integers(1, 70)], random_tokens(self.model.config, int(self.rng.integers(0, 4)), seed=1)])
        asked = (prompt.tolist(), int(self.rng.integers(0, 12)), loops, window, int(self.rng.integers(0, 3)))
        pool = self.pool if self.rng.random() < 0.7 else None
        try:
            g = self.model._start(
                asked[0], asked[1], loops, cache_window=window, seed=asked[4], pool=pool, run_prompt=bool(self.rng.random() < 0.3), **SAMPLED
            )
        except tl.OutOfMemoryError:
            return
        self.n_hits += g.n_cached > 0
        self.asked[id(g)] = asked
        self.live.append(g)

    def step(self):
        self.rng.shuffle(self.live)
        some = self.live[: self.rng.integers(0, len(self.live) + 1)]
        for g, token in zip(some, step_generations(some), strict=True):
            assert token is None or token == g.all_tokens()[-1]

    def next_alone(self):
        if self.live:
            try:
                next(self.live[0], None)
            except tl.OutOfMemoryError:
                assert self.live[0].finish_reason == "cancelled"

    def close_one(self):
        if self.live:
            self.live[0].close()

    def register(self):
        loops, window = self.kind()
        with contextlib.suppress(tl.OutOfMemoryError):
            self.model.register_prefix(self.pool, STEM[: self.rng.integers(1, 70)], loops, window)

    def fail_soon(self):
        left = int(self.rng.integers(1, 8))

        def fault(part):
            nonlocal left
            left -= 1
            if left == 0:
                self.store.fault = None
                raise tl.OutOfMemoryError("out of memory: injected")

        self.store.fault = fault

    def settle(self):
        """What has ended is checked and let go."""
        for g in self.live:
            if g.finish_reason is not None:
                prompt, max_tokens, loops, window, seed = self.asked.pop(id(g))
                want = self.plain.generate(prompt, max_tokens, loops, cache_window=window, seed=seed, **SAMPLED)
                got = g.all_tokens()
                assert got == (want if g.finish_reason != "cancelled" else want[: len(got)])
                self.n_ended += g.finish_reason != "cancelled"
        self.live = [g for g in self.live if g.finish_reason is None]

    def run(self, n):
        operations = [self.open] * 4 + [self.step] * 8 + [self.next_alone, self.close_one, self.register, self.register, self.fail_soon]
        for _ in range(n):
            operations[self.rng.integers(len(operations))]()
            self.settle()
            self.pool._check()
        self.store.fault = None
        while self.live:
            step_generations(self.live)
            self.settle()


CASES = [(0, "shortest", None), (1, "lru", None), (2, "shortest", 90), (3, "lru", 60), (4, "lru", 40)]


@pytest.mark.parametrize(("seed", "eviction", "n_pages"), CASES)
def test_any_order_of_operations(backend, seed, eviction, n_pages):
    with open_model(backend, "shipped", "bf16", max_seq_len=96) as plain:
        budget = None if n_pages is None else n_pages * plain._engine.plan.store.spaces[2].page_nbytes
        with open_model(backend, "shipped", "bf16", max_seq_len=96, kv_budget=budget) as model:
            machine = Machine(model, plain, seed, eviction)
            machine.run(400)
            assert machine.n_ended > 30 and machine.n_hits > 10
            machine.pool.clear()
            assert model.kv_nbytes == 0 and machine.store.reserved_nbytes == 0
