"""The process: uvicorn around the application, with an end that lets streams finish."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

from .app import create_app
from .limits import MAX_HEAD_BYTES
from .protocol import limited_protocol
from .service import Service
from .settings import Settings


class DrainingServer(uvicorn.Server):
    """A server that, asked to stop, lets the engine finish what runs for a while before connections are closed."""

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        super().__init__(config)
        self._service = service
        self._grace = grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Load, and listen."""
        await super().startup(sockets)
        self._service.listened = self.started

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop taking in, drain, close."""
        engine = self._service.engine
        draining = None if engine is None else asyncio.create_task(engine.drain(self._grace))
        await super().shutdown(sockets)  # waits for connections, which the draining ends
        if draining is not None:
            if self.force_exit:  # a second SIGINT: whoever sent it wants no grace
                draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
        self._captured_signals.clear()  # uvicorn would send itself the signal again; an end that was asked for is a success

    @property
    def succeeded(self) -> bool:
        """Once it has run: whether it listened, ended in order, and saved what it was to save."""
        return self.started and not self.force_exit and not self._service.lost_pool


def make_server(settings: Settings, host: str, port: int, **options: Any) -> DrainingServer:
    """A server that is ready to run."""
    app = create_app(settings)
    protocol = limited_protocol(settings.max_connections, settings.header_seconds, settings.write_seconds)
    config = uvicorn.Config(
        app, host, port, http=protocol, ws="none", lifespan="on", log_config=None,
        access_log=False, server_header=False, timeout_keep_alive=int(settings.idle_seconds), h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_graceful_shutdown=int(settings.shutdown_grace) + 10, **options,
    )  # fmt: skip
    return DrainingServer(config, app.state.service, settings.shutdown_grace)
