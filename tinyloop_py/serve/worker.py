"""The one thread that runs the model, and how it is known to be alive."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class WorkerDied(RuntimeError):
    """The thread has ended, or ended before it finished what was asked of it."""


class Worker:
    """Runs calls one after another in a thread of its own.

    An Exception that a call raises is the call's result. Anything stronger (SystemExit, a killed thread) ends the thread, and
    every call that waits then gets WorkerDied, so that nothing hangs.
    """

    def __init__(self, name: str = "tinyloop-engine") -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._dead = False
        self._began_at: float | None = None  # of the call that runs
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    @property
    def alive(self) -> bool:
        """Whether calls will be answered."""
        return self.thread.is_alive() and not self._dead

    def busy_seconds(self) -> float:
        """How long the call that runs has been running; 0 where none does."""
        began = self._began_at
        return 0.0 if began is None else time.monotonic() - began

    async def call(self, function: Callable[[], Any]) -> Any:
        """The result of `function()`, run in the thread. A call that was begun is finished even if the caller is cancelled."""
        if not self.alive:
            raise WorkerDied("the worker thread has ended")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._calls.put((function, loop, future))
        if not self.alive:  # it died just now, perhaps without seeing this call
            self._drain()
        return await future

    def stop(self) -> None:
        """Let the thread end after the calls that wait."""
        self._calls.put(None)

    def _serve(self) -> None:
        current = None
        try:
            while (current := self._calls.get()) is not None:
                function, loop, future = current
                self._began_at = time.monotonic()
                try:
                    result, error = function(), None
                except Exception as raised:
                    result, error = None, raised
                self._began_at = None
                current = None
                self._answer(loop, future, result, error)
        except BaseException:  # a killed thread ends quietly; those who wait are told below
            pass
        finally:
            self._dead = True
            self._began_at = None
            if current is not None:
                self._answer(current[1], current[2], None, WorkerDied("the worker thread was ended while it ran this"))
            self._drain()

    def _drain(self) -> None:
        """Tell all that wait."""
        while True:
            try:
                waiting = self._calls.get_nowait()
            except queue.Empty:
                return
            if waiting is not None:
                self._answer(waiting[1], waiting[2], None, WorkerDied("the worker thread has ended"))

    @staticmethod
    def _answer(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        def settle() -> None:
            if future.done():  # its caller was cancelled
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
            loop.call_soon_threadsafe(settle)
