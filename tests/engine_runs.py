"""What the tests of the engine share: requests, what the library says to them, and a run that checks that nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import tinyloop_py as tl
from tinyloop_py.serve import Engine, GenerationRequest, runner, steps
from tinyloop_py.serve.requests import Sampling

GREEDY = Sampling(temperature=0.0)


def prompt(n: int, seed: int = 0) -> list[int]:
    """n ids of bytes."""
    return np.random.default_rng([seed, n]).integers(5, 261, n).tolist()


def ask(n_prompt: int = 20, max_tokens: int = 12, seed: int = 0, **fields: Any) -> GenerationRequest:
    """A request that no stop id ends."""
    fields.setdefault("sampling", Sampling(seed=seed))
    fields.setdefault("stop_tokens", ())
    return GenerationRequest(prompt(n_prompt, seed), max_tokens, **fields)


def plain(model: tl.Model, request: GenerationRequest, index: int = 0) -> list[int]:
    """The tokens that `generate` draws for a request alone."""
    s = request.sampling
    seed = None if s.seed is None else s.seed + index
    tokens = model.generate(request.tokens, request.max_tokens, request.loops, s.temperature, s.top_k, seed=seed, stop_tokens=request.stop_tokens)
    return tokens[len(request.tokens) :]


def run(model: tl.Model, work: Callable[[Engine], Any], pool: tl.PrefixPool | None = None, **options: Any) -> Any:
    """Run `work(engine)` on a started engine, and check that nothing is left at work or in memory."""

    async def main() -> Any:
        async with Engine(model, pool, **options) as engine:
            result = await asyncio.wait_for(work(engine), 60)
            for _ in range(200):
                if not (engine.n_running or engine.n_waiting):
                    break
                await asyncio.sleep(0.01)
            assert engine.n_running == 0 and engine.n_waiting == 0
            return result

    result = asyncio.run(main())
    if pool is not None:
        pool._check()
        pool.clear()
    assert model.kv_nbytes == 0
    return result


class Held:
    """Steps of the model and of prefixes, which a worker takes as far as it is let: so a test need not be faster than it."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self._open = False

    def allow(self, n: int) -> None:
        """Let it take n steps."""
        self._allowed.release(n)

    def open(self) -> None:
        """Let it go on."""
        self._open = True
        self._allowed.release()

    def after(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, done when it is allowed."""

        def held(*arguments: Any) -> Any:
            assert self._allowed.acquire(timeout=60)
            if self._open:
                self._allowed.release()
            return work(*arguments)

        return held


@contextlib.contextmanager
def held_steps() -> Iterator[Held]:
    """All engines of this process, held; let go at the end."""
    held, real = Held(), (runner.step_generations, steps.PrefixBuild._run)
    runner.step_generations, steps.PrefixBuild._run = held.after(real[0]), held.after(real[1])
    try:
        yield held
    finally:
        runner.step_generations, steps.PrefixBuild._run = real
        held.open()
