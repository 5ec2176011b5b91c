"""What the tests of the protocol share: a server of one application of the test's own, and what is asked and answered as bytes."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

from uvicorn.server import ServerState

from tinyloop_py.serve.protocol import Limits, protocol_factory

DEFAULTS = {
    "max_connections": 100, "max_body_bytes": 1 << 20, "header_seconds": 60, "body_seconds": 60, "write_seconds": 60, "write_rate": 0,
    "idle_seconds": 60,
}  # fmt: skip


class Served:
    """A server of one application on a free port."""

    def __init__(self, app, **limits):
        self.state = ServerState()
        self._factory = protocol_factory(Limits(**{**DEFAULTS, **limits}))
        self._config = SimpleNamespace(loaded_app=app)

    async def __aenter__(self):
        make = lambda: self._factory(config=self._config, server_state=self.state, app_state={}, _loop=asyncio.get_running_loop())  # noqa: E731
        self._server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *error):
        self._server.close()

    async def connect(self):
        return await asyncio.open_connection(*self._server.sockets[0].getsockname())

    async def ask(self, *parts):
        """All that comes, until the connection's end, for what is sent part by part."""
        reader, writer = await self.connect()
        for part in parts:
            with contextlib.suppress(ConnectionError):
                writer.write(part)
                await writer.drain()
            await asyncio.sleep(0.001)
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            return await reader.read()
        return b""


def run(new_loop, main):
    loop = new_loop()
    try:
        return loop.run_until_complete(asyncio.wait_for(main(), 60))
    finally:
        loop.close()


async def echo(scope, receive, send):
    """Answers with what it was asked."""
    message = await receive()
    assert not message["more_body"]
    fields = {"method": scope["method"], "path": scope["path"], "body": message["body"].decode(), "query": scope["query_string"].decode()}
    fields |= {"headers": [[name.decode(), value.decode("latin-1")] for name, value in scope["headers"]]}
    refused = scope["refused"]
    body = json.dumps(fields if refused is None else refused.body()).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200 if refused is None else refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def asked(head, body=b"", close=True):
    return head.replace("\n", "\r\n").encode() + (b"connection: close\r\n" if close else b"") + b"\r\n" + body


def answers(data):
    """(status, head, parsed body) of each answer with a length."""
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        status = int(head.split(b" ")[1])
        n = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0)
        found.append((status, head, json.loads(rest[:n]) if n else None))
        data = rest[n:]
    return found
