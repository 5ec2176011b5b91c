"""The worker's side of an engine: what is at work in the model, and one turn of it.

A turn is short: at most one step of a prefix that is being built and one step of the model for all running outputs. So a long
prompt never stands in the way of others for longer than its bounded steps do. While nobody comes, goes or calls, turns follow each
other in a stretch: the event loop hands on what they drew while the next ones run. To wake it, and a client, takes as long as a
small model needs for a token, and where they share its cores from the model: turns of less than a few milliseconds hand on together.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..errors import OutOfMemoryError, PoolFullError
from ..lockstep import step_generations
from ..pool import PrefixPool
from .auto_prefix import AutoPrefixes
from .jobs import Job, PrefixTask, TurnResult, as_serve_error
from .output import RunningOutput
from .requests import GenerationRequest
from .steps import PrefixBuild, open_generation

if TYPE_CHECKING:
    from ..model import Model

logger = logging.getLogger("tinyloop.serve")
STRETCH_SECONDS = 0.05  # then whoever waits for the engine's lock has his turn
HOLD_SECONDS = 0.015  # so long a token that is not an output's first waits at most for those of the next turns


class Runner:
    """Jobs and prefix tasks at work. Every method runs in the worker thread.

    Attributes
    ----------
    called : bool
        Set by the event loop where it wants the worker back after the turn that runs.
    """

    def __init__(self, model: Model, pool: PrefixPool | None, auto: AutoPrefixes | None, *, window: int = 0, prefill_rows: int = 128) -> None:
        self.model = model
        self.pool = pool
        self.auto = auto
        self.window = window
        self.prefill_rows = prefill_rows
        self._building: deque[Job | PrefixTask] = deque()
        self._running: list[Job] = []
        self._n_steps = 0
        self.called = False

    def stretch(self, admitted: list[Job], tasks: list[PrefixTask], got_further: Callable[[], None], report: Callable[[TurnResult], None]) -> None:
        """A turn, and further ones while all goes on as it is; `got_further` is called between two of them, and `report` given what they did."""
        end = time.perf_counter() + STRETCH_SECONDS
        result = TurnResult()
        try:
            self._drop_cancelled(result)  # later on it is those who run a prefix alone: who cancels an output calls, which ends the stretch
            self._take_in(admitted, tasks, result)
            self._turn(result)
            while result.is_plain and (self._running or self._building) and not self.called and time.perf_counter() < end:
                got_further()
                if not result.draws_on or result.seconds + result.turns[-1][0] > HOLD_SECONDS:  # with one more that takes as long as the last
                    report(self._with_pieces(result))
                    result = TurnResult()
                self._turn(result)
        finally:
            report(self._with_pieces(result))

    def _turn(self, result: TurnResult) -> None:
        """A step of each kind."""
        begin = time.perf_counter()
        if self._building:
            self._drop_cancelled(result)
            self._build_step(result)
        n_rows = self._step(result)
        seconds = time.perf_counter() - begin
        result.turns.append((seconds, n_rows))
        result.seconds += seconds

    def _with_pieces(self, result: TurnResult) -> TurnResult:
        """A result that can be handed on."""
        for job, output in result.drawn:
            try:
                result.pieces += [(job, piece) for piece in output.pieces()]
            except Exception as error:
                self._fail(job, error, result)
        result.drawn.clear()
        return result

    def abort(self) -> None:
        """Drops everything, after a failure that nobody foresaw."""
        for job in self._running + [item for item in self._building if isinstance(item, Job)]:
            job.close()
        self._running.clear()
        self._building.clear()

    @property
    def _keeps_turns(self) -> bool:
        return self.auto is not None and self.pool is not None

    # ---- taking in

    def _take_in(self, admitted: list[Job], tasks: list[PrefixTask], result: TurnResult) -> None:
        for job in admitted:
            self._admit(job, result)
        for task in tasks:
            self._begin(task, result)

    def _drop_cancelled(self, result: TurnResult) -> None:
        for job in [job for job in self._running if job.cancelled]:
            job.close()
            self._running.remove(job)
            result.ended.append(job)
        for item in [item for item in self._building if item.cancelled]:
            self._building.remove(item)
            if isinstance(item, Job):
                item.close()
                result.ended.append(item)
            else:
                result.prefixes.append(item)

    def _admit(self, job: Job, result: TurnResult) -> None:
        if job.cancelled:
            result.ended.append(job)
            return
        try:
            self._plan_builds(job)
        except Exception as error:
            self._fail(job, error, result)
            return
        if job.builds:
            self._building.append(job)
        else:
            self._open(job, result)

    def _plan_builds(self, job: Job) -> None:
        """What of the prompt is to be run on its own first: a beginning worth keeping, and a prompt that several outputs share."""
        request = job.request
        if self.pool is not None and (self.auto is not None or request.n > 1):
            job.n_matched = self._match(request)
        if self.auto is not None and self.pool is not None and self.auto.wants(request.keep_first) and request.keep_first > job.n_matched:
            job.builds.append(self._build(request, request.keep_first, self.pool))
        if request.n > 1 and len(request.tokens) > 1:
            job.prompt_pool = PrefixPool(1)
            if not job.builds:
                job.builds.append(self._build(request, len(request.tokens), job.prompt_pool))

    def _match(self, request: GenerationRequest) -> int:
        assert self.pool is not None
        n = self.pool.match(self.model, request.tokens, request.loops, self.window, namespace=request.namespace)
        if n and self.auto is not None:
            self.auto.touch(request.namespace, request.loops, np.asarray(request.tokens[:n], np.int32))
        return n

    def _build(self, request: GenerationRequest, n: int, target: PrefixPool) -> PrefixBuild:
        source = self.pool if self.pool is not None else target
        return PrefixBuild(self.model, source, target, request.tokens[:n], request.loops, self.window, request.namespace, rows=self.prefill_rows)

    def _begin(self, task: PrefixTask, result: TurnResult) -> None:
        assert self.pool is not None
        try:
            task.build = PrefixBuild(
                self.model, self.pool, self.pool, task.tokens, task.loops, self.window, task.namespace,
                pin=task.pin, rows=self.prefill_rows, base=task.base,
            )  # fmt: skip
            task.base = None
        except Exception as error:
            self._end_task(task, error, result)
            return
        self._building.append(task)

    # ---- steps

    def _build_step(self, result: TurnResult) -> None:
        """One step of the next prefix in turn."""
        if not self._building:
            return
        item = self._building.popleft()
        build = item.builds[0] if isinstance(item, Job) else item.build
        assert build is not None
        try:
            done = build.step()
        except Exception as error:
            if isinstance(item, PrefixTask):
                self._end_task(item, error, result)
            elif isinstance(error, (OutOfMemoryError, PoolFullError)):  # an optimisation that there is no room for
                item.builds.clear()
                item.prompt_pool = None
                self._open(item, result)
            else:
                self._fail(item, error, result)
            return
        if not done:
            self._building.append(item)
        elif isinstance(item, PrefixTask):
            self._end_task(item, None, result)
        else:
            self._end_build(item, result)

    def _end_build(self, job: Job, result: TurnResult) -> None:
        build = job.builds.popleft()
        if build.target is self.pool and self.auto is not None:
            self.auto.built(job.request.tenant, job.request.loops, build)
        if job.prompt_pool is not None and build.target is not job.prompt_pool:
            try:
                job.builds.append(self._build(job.request, len(job.request.tokens), job.prompt_pool))
            except Exception as error:
                self._fail(job, error, result)
                return
            self._building.append(job)
        else:
            self._open(job, result)

    def _end_task(self, task: PrefixTask, error: Exception | None, result: TurnResult) -> None:
        if error is not None:
            task.error = as_serve_error(error)
        elif self.auto is not None and task.build is not None:
            if task.automatic:
                self.auto.built(task.tenant, task.loops, task.build)
            else:
                self.auto.forget(task.namespace, task.loops, task.build.tokens)
        result.prefixes.append(task)

    def _open(self, job: Job, result: TurnResult) -> None:
        """Opens a job's outputs: from now on they take part in the steps."""
        request = job.request
        pool = job.prompt_pool if job.prompt_pool is not None else self.pool
        had_builds = request.keep_first > job.n_matched or job.prompt_pool is not None
        try:
            for index in range(request.n):
                generation = open_generation(self.model, pool, request, index, self.window, may_wait=bool(self._running or self._building))
                generation.hold = index == 0 and self._keeps_turns
                job.outputs.append(RunningOutput(generation, index, request, self.model.tokenizer))
        except OutOfMemoryError as error:
            job.close()
            if self._running or self._building:
                result.deferred.append(job)
            else:
                self._fail(job, error, result)
            return
        except Exception as error:
            self._fail(job, error, result)
            return
        if job.prompt_pool is not None and self.pool is not None:  # its outputs continue from that one: count the query here
            tokens = np.asarray(request.tokens[: job.n_matched], np.int32)
            entry = self.pool._find(self.model._pool_key(request.loops, self.window, request.namespace), tokens)
            self.pool._record(entry, len(request.tokens), len(request.tokens) - job.n_matched)
        n_cached = job.outputs[0].generation.n_cached
        job.stream.n_cached = min(n_cached, job.n_matched) if had_builds else n_cached
        self._running.append(job)

    def _step(self, result: TurnResult) -> int:
        """One step of the model for all running outputs; how many they are."""
        taking = [(job, output) for job in self._running for output in job.outputs if output.finish_reason is None]
        if not taking:
            result.draws_on = False
            return 0
        if result.draws_on:
            result.draws_on = not self._building and all(output.begun for _, output in taking)
        self._n_steps += 1
        if len(taking) > 1:  # prompts run in the order given: every one comes first in its turn
            turn = self._n_steps % len(taking)
            taking = taking[turn:] + taking[:turn]
        try:
            tokens = step_generations([output.generation for _, output in taking], self.prefill_rows)
        except Exception as error:  # the step as a whole: whoever took part in it
            for job in self._running.copy():
                self._fail(job, error, result)
            return len(taking)
        for (job, output), token in zip(taking, tokens, strict=True):
            if job not in self._running:
                continue  # another output of it failed just now
            if output.generation.error is not None:
                self._fail(job, output.generation.error, result)
                continue
            try:
                if output.take(token):
                    result.drawn.append((job, output))
            except Exception as failed:
                self._fail(job, failed, result)
                continue
            if output.finish_reason is not None and all(o.finish_reason is not None for o in job.outputs):
                self._end(job, result)
        return len(taking)

    # ---- ending

    def _end(self, job: Job, result: TurnResult) -> None:
        self._running.remove(job)
        result.ended.append(job)
        if self._keeps_turns:
            task = self._keep_turn(job)
            if task is not None:
                result.keeps.append(task)
        job.close()

    def _keep_turn(self, job: Job) -> PrefixTask | None:
        """The task that keeps what the next prompt of this conversation will begin with."""
        request, output = job.request, job.outputs[0]
        assert self.auto is not None
        drawn = output.generation.all_tokens()
        try:
            tokens = drawn if request.keep_turn is None else list(request.keep_turn(output.text))
            if not self.auto.wants(len(tokens)):
                return None
            # What was drawn may be encoded otherwise than the same text is; then the prefix runs anew from what the pool has.
            base = output.generation.keep() if len(drawn) > len(request.tokens) and drawn == tokens[: len(drawn)] else None
        except Exception as error:  # an optimisation: the answer is complete without it
            logger.warning("a turn is not kept: %s", error)
            return None
        return PrefixTask(request.tenant, request.namespace, request.loops, tokens, automatic=True, base=base)

    def _fail(self, job: Job, error: BaseException, result: TurnResult) -> None:
        if job in self._running:
            self._running.remove(job)
        job.close()
        result.failed.append((job, as_serve_error(error)))
        result.ended.append(job)
