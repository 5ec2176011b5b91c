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
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._waiting: set[asyncio.Future[Any]] = set()  # told when the thread ends, wherever in it their calls are
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead = False
        self._began_at: float | None = None  # the call that runs, or what it does now
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    @property
    def alive(self) -> bool:
        """Whether calls will be answered."""
        return self.thread.is_alive() and not self._dead

    def busy_seconds(self) -> float:
        """How long the call that runs has been running, or since it got further; 0 where none does."""
        began = self._began_at
        return 0.0 if began is None else time.monotonic() - began

    def begin(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """What will be the result of `function()`, which runs in the thread, even if nobody waits for it any more.

        All calls of a worker come from one event loop.
        """
        self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        self._calls.put((function, future))
        if not self.alive:  # perhaps it ended before it could see this call
            self._fail_waiting()
        return future

    async def call(self, function: Callable[[], Any]) -> Any:
        """The result of `function()`, run in the thread."""
        return await self.begin(function)

    def stop(self) -> None:
        """Let the thread end after the calls that wait."""
        self._calls.put(None)

    def _serve(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                function, future = call
                self._began_at = time.monotonic()
                try:
                    result, error = function(), None
                except Exception as raised:
                    result, error = None, raised
                self._began_at = None
                self.tell(_settle, future, result, error)
                del call, function, future, result, error
        except BaseException:  # a killed thread ends quietly; those who wait are told
            pass
        finally:
            self._dead = True
            self._began_at = None
            self.tell(self._fail_waiting)

    def got_further(self) -> None:
        """From the thread: the call that runs is not stuck."""
        self._began_at = time.monotonic()

    def tell(self, function: Callable[..., None], *arguments: Any) -> None:
        """From the thread: have the event loop run it, before it sees the result of the call that tells."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, *arguments)

    def _fail_waiting(self) -> None:
        for future in list(self._waiting):
            _settle(future, None, WorkerDied("the worker thread has ended"))


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # its caller was cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
