"""Connections that are dropped: those of readers who do not keep up, and how all of them are counted and written down."""

import asyncio
import gc
import json
import logging
import socket
import weakref

import pytest

for package in ("fastapi", "uvicorn", "httptools", "jinja2", "prometheus_client"):
    pytest.importorskip(package)

from serving import server_process
from serving_app import Served, echo, run

from tinyloop_py.commands.serve import allow_files
from tinyloop_py.serve.dropped import MOST_LINES, PERIOD_SECONDS, Dropped
from tinyloop_py.serve.write_watch import MOST_LOOKS, WatchedTransport


@pytest.fixture(params=["asyncio", "uvloop"])
def new_loop(request):
    return asyncio.new_event_loop if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop


class Buffered:
    """A transport from which a reader takes what it is told to."""

    def __init__(self):
        self.n_left, self.aborted = 0, False

    def get_extra_info(self, name):
        return None

    def write(self, data):
        self.n_left += len(data)

    def get_write_buffer_size(self):
        return self.n_left

    def abort(self):
        self.aborted = True


class Clock:
    """An event loop of timers alone."""

    def __init__(self):
        self.timers = []

    def call_later(self, seconds, function):
        self.timers.append((seconds, function))
        return self

    def cancel(self):
        self.timers.clear()

    def tick(self):
        """The time of all timers is up."""
        timers, self.timers = self.timers, []
        for seconds, function in timers:
            assert seconds == 5.0
            function()


def watch(rate):
    transport, clock, given_up = Buffered(), Clock(), []
    return transport, clock, given_up, WatchedTransport(transport, 5.0, rate, clock, lambda: given_up.append(1))


@pytest.mark.parametrize(("rate", "n"), [(0, 1), (1, 5), (100, 500)])
def test_a_reader_that_is_behind_has_to_take_so_much(rate, n):
    transport, clock, given_up, watched = watch(rate)
    watched.write(b"x" * 1000)
    for _ in range(MOST_LOOKS - 2):
        transport.n_left -= n  # while more is written than that
        watched.write(b"x" * (n + 1))
        clock.tick()
        assert not transport.aborted and len(clock.timers) == 1
    transport.n_left -= n - 1
    watched.write(b"x" * 1000)
    clock.tick()
    assert transport.aborted and given_up == [1] and not clock.timers


def test_a_reader_that_is_behind_has_to_catch_up_now_and_then():
    transport, clock, given_up, watched = watch(10)
    for _ in range(3):
        watched.write(b"x" * 1000)
        for _ in range(MOST_LOOKS - 1):
            transport.n_left -= 100
            watched.write(b"x" * 200)
            clock.tick()
            assert not transport.aborted and len(clock.timers) == 1
        transport.n_left = 0
    watched.write(b"x" * 1000)
    clock.tick()
    for _ in range(MOST_LOOKS):
        assert not transport.aborted and len(clock.timers) == 1
        transport.n_left -= 50
        clock.tick()
    assert transport.aborted and given_up == [1]


def test_a_reader_that_takes_all_there_is_is_served_however_little_that_is():
    transport, clock, given_up, watched = watch(1000)
    for _ in range(50):
        for _ in range(MOST_LOOKS + 1):
            watched.write(b"x")
            transport.n_left = 0
            watched.write(b"x")  # just before the look
            clock.tick()
        assert len(clock.timers) == 1 and not transport.aborted
        transport.n_left = 0
        clock.tick()
        assert not clock.timers  # nothing lies there, nothing is watched
    watched.write(b"x")
    clock.tick()
    assert transport.aborted and given_up == [1]


def test_a_connection_that_is_over_is_not_watched():
    _, clock, _, watched = watch(0)
    watched.write(b"x")
    watched.stop()
    assert not clock.timers


def test_what_the_system_holds_for_a_reader_counts_as_not_taken():
    async def main():
        transports, clock = [], Clock()

        class Server(asyncio.Protocol):
            def connection_made(self, transport):
                transports.append(WatchedTransport(transport, 5.0, 0, clock, lambda: None))

        loop = asyncio.get_running_loop()
        server = await loop.create_server(Server, "127.0.0.1", 0)
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, server.sockets[0].getsockname())
            while not transports:
                await asyncio.sleep(0.001)
            [watched] = transports
            watched.write(bytes(96 << 20))  # more than systems hold
            n_read = 0
            while n_read < 8 << 20:  # fast at first, so that the system expects much of it
                n_read += len(await loop.sock_recv(client, 1 << 18))
            clock.tick()
            for _ in range(6):
                before, n_read = watched._count_taken(), 0
                while watched._count_taken() == before:  # what it reads is seen, each time
                    n_read += len(await loop.sock_recv(client, 1 << 16))
                    await asyncio.sleep(0.001)
                clock.tick()
                assert n_read < 4 << 20 and watched.get_write_buffer_size() and not watched.is_closing()
            n_quiet = 0
            while n_quiet < 2 and not watched.is_closing():  # what is on its way already still arrives
                before = watched._count_taken()
                await asyncio.sleep(0.05)
                clock.tick()
                n_quiet = n_quiet + 1 if watched._count_taken() == before else 0
            assert watched.is_closing()
        server.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_connection_that_is_over_is_freed_at_once(new_loop):
    async def main():
        async with Served(echo) as served:
            _, writer = await served.connect()
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            while not served.state.total_requests:
                await asyncio.sleep(0.001)
            [connection] = served.state.connections
            connection = weakref.ref(connection)
            writer.close()
            while served.state.connections or served.state.tasks:
                await asyncio.sleep(0.001)
            for _ in range(10):
                await asyncio.sleep(0.001)
            return connection()

    gc.disable()
    try:
        assert run(new_loop, main) is None
    finally:
        gc.enable()


# ---- what is written down


def test_what_is_no_request_is_counted_by_its_reason(new_loop, caplog):
    reasons = []

    async def main():
        dropped = Dropped(reasons.append)
        async with Served(echo, dropped=dropped) as served:
            await served.ask(b"\x16\x03\x01\x02")
            await served.ask(b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000)
        async with Served(echo, dropped=dropped, header_seconds=0.05) as served:
            await served.ask(b"GET / HT")
        async with Served(echo, dropped=dropped, max_connections=1) as served:
            _, held = await served.connect()
            while not served.state.connections:
                await asyncio.sleep(0.001)
            reader, _ = await served.connect()
            await reader.read()
            held.close()

    with caplog.at_level(logging.INFO, "tinyloop.serve.access"):
        run(new_loop, main)
    assert reasons == ["bad_http", "head_too_large", "header_timeout", "too_many_connections"]
    lines = [record.fields for record in caplog.records]
    assert [line["reason"] for line in lines] == reasons and [line["status"] for line in lines] == [400, 431, 408, 503]
    assert all(line["client"] == "127.0.0.1" and line["detail"] for line in lines)


class Timers:
    """An event loop of timers alone."""

    def __init__(self):
        self.set = []

    def call_later(self, seconds, function):
        self.set.append((seconds, function))


def test_a_flood_of_what_is_dropped_is_a_few_lines_of_the_log(caplog):
    counted, loop = [], Timers()
    dropped = Dropped(counted.append)
    with caplog.at_level(logging.INFO, "tinyloop.serve.access"):
        for n_periods in (1, 2):
            for _ in range(500):
                dropped.add(loop, "bad_http", "10.0.0.1", 400, "what")
                dropped.add(loop, "slow_reader", "10.0.0.2")
            assert len(caplog.records) == MOST_LINES + (n_periods - 1) * (MOST_LINES + 1)
            [(seconds, end)] = loop.set
            loop.set.clear()
            end()
            assert seconds == PERIOD_SECONDS and caplog.records[-1].fields == {"further": {"bad_http": 495, "slow_reader": 495}}
    assert len(counted) == 2000 and not loop.set
    for _ in range(MOST_LINES):  # nothing is left out: no line says so
        dropped.add(loop, "bad_http", None)
    n_lines = len(caplog.records)
    loop.set.pop()[1]()
    assert len(caplog.records) == n_lines


def test_what_is_dropped_before_the_end_is_in_the_log():
    with server_process() as (url, process):
        for _ in range(MOST_LINES + 5):
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
                connection.sendall(b"\0")
                assert b" 400 " in connection.recv(1000)
    lines = [line for line in map(json.loads, process.log.read_text().splitlines()) if line["message"] == "dropped"]
    assert len(lines) == MOST_LINES + 1 and lines[0]["reason"] == "bad_http" and lines[-1]["further"] == {"bad_http": 5}


# ---- what the system closes


@pytest.mark.parametrize(
    ("limits", "n", "expected", "warns"),
    [
        ((64, 4096), 100, (356, 4096), False), ((64, -1), 100, (356, -1), False), ((64, 200), 100, (200, 200), True),
        ((1024, 4096), 100, None, False), ((-1, -1), 5000, None, False), ((1024, 1024), 5000, None, True),
    ],
)  # fmt: skip
def test_a_server_may_open_as_many_files_as_its_connections_need(monkeypatch, caplog, limits, n, expected, warns):
    resource = pytest.importorskip("resource")
    limits = tuple(resource.RLIM_INFINITY if limit == -1 else limit for limit in limits)
    expected = expected and tuple(resource.RLIM_INFINITY if limit == -1 else limit for limit in expected)
    taken = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, given: taken.append(given))
    with caplog.at_level(logging.WARNING, "tinyloop.serve"):
        allow_files(n)
    assert taken == ([] if expected is None else [expected]) and bool(caplog.records) == warns
