"""The process: uvicorn around the application, with an end that lets streams finish."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn

from .app import create_app, direct_routes
from .dropped import Dropped
from .front import Front
from .limits import admission
from .protocol import Limits, protocol_factory
from .service import Service
from .settings import Settings

HURRY_SECONDS = 1.0  # for the last errors to reach their readers


class DrainingServer(uvicorn.Server):
    """A server that, asked to stop, lets the engine finish what runs for a while before connections are closed."""

    def __init__(self, config: uvicorn.Config, service: Service, dropped: Dropped, grace: float) -> None:
        super().__init__(config)
        self._dropped = dropped
        self.service = service
        self._grace = grace
        self._hurried = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Load, and listen."""
        await super().startup(sockets)
        self.service.listened = self.started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGHUP too, which a terminal that closes sends; not where it is ignored, as under nohup."""
        number = getattr(signal, "SIGHUP", None)
        with super().capture_signals():
            if number is None or threading.current_thread() is not threading.main_thread() or signal.getsignal(number) is signal.SIG_IGN:
                yield
                return
            before = signal.signal(number, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(number, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ask for the end; a second time, for one without grace."""
        self._hurried = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop taking in, drain, close."""
        ending = asyncio.create_task(self._end_streams())
        await super().shutdown(sockets)  # waits for connections, which the draining ends
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        self._dropped.flush()

    async def _end_streams(self) -> None:
        """Let the engine drain, until somebody is in a hurry: then everybody is told at once, and who does not take it is cut off."""
        engine = self.service.engine
        draining = None if engine is None else asyncio.create_task(engine.drain(self._grace))
        try:
            while not self._hurried:
                await asyncio.sleep(0.05)
        finally:
            if draining is not None:
                draining.cancel()
        if engine is not None:
            await engine.drain(0)
        await asyncio.sleep(HURRY_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @property
    def succeeded(self) -> bool:
        """Once it has run: whether it listened, and saved what it was to save."""
        return self.started and not self.service.lost_pool


def make_server(settings: Settings, host: str, port: int, **options: Any) -> DrainingServer:
    """A server that is ready to run."""
    app = create_app(settings)
    service: Service = app.state.service
    dropped = Dropped(service.metrics.count_dropped)
    limits = Limits(
        settings.max_connections, settings.max_body_bytes, settings.header_seconds, settings.body_seconds, settings.write_seconds,
        settings.write_rate, settings.idle_seconds, admission(settings, service.tenants), dropped,
    )  # fmt: skip
    config = uvicorn.Config(
        Front(app, service, direct_routes()), host, port, http=protocol_factory(limits), ws="none", lifespan="on", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, timeout_graceful_shutdown=int(settings.shutdown_grace) + 10, **options,
    )  # fmt: skip
    return DrainingServer(config, service, dropped, settings.shutdown_grace)
