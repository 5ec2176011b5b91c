"""HTTP/1.1 on a connection, on either event loop, under applications of the tests' own: what is read, what is refused, what goes out and when."""

import asyncio
import socket
from types import SimpleNamespace

import pytest

for package in ("fastapi", "uvicorn", "httptools", "jinja2", "prometheus_client"):
    pytest.importorskip(package)

from serving_app import Served, answers, asked, echo, run
from uvicorn.server import ServerState

from tinyloop_py.serve.dropped import Dropped
from tinyloop_py.serve.errors import ServeError
from tinyloop_py.serve.request_head import MAX_HEAD_BYTES, RequestHead


@pytest.fixture(params=["asyncio", "uvloop"])
def new_loop(request):
    return asyncio.new_event_loop if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop


def test_a_request_may_come_in_any_parts(new_loop):
    one = asked("POST /a%20b?c=d HTTP/1.1\nHost: x\nContent-Length: 5\n", b"hello", close=False)
    data = b"\r\n" + one + asked("GET /last HTTP/1.1\nhost: x\n")

    async def main():
        async with Served(echo) as served:
            for size in (1, 7, 60, len(data)):
                first, last = answers(await served.ask(*[data[at : at + size] for at in range(0, len(data), size)]))
                assert first[0] == last[0] == 200 and last[2]["path"] == "/last" and b"connection: close" in last[1]
                assert first[2] == {
                    "method": "POST", "path": "/a b", "query": "c=d", "body": "hello", "headers": [["host", "x"], ["content-length", "5"]],
                }  # fmt: skip
            assert served.state.total_requests == 8
            while served.state.connections or served.state.tasks:
                await asyncio.sleep(0.001)

    run(new_loop, main)


CHUNKED = "POST / HTTP/1.1\nhost: x\ntransfer-encoding: chunked\n"
REFUSED = [
    (400, asked("GET / HTTP/1.1\n")), (400, asked("GET / HTTP/1.1\nhost: x\nhost: y\n")), (400, asked("get / HTTP/1.1\nhost: x\n")),
    (400, b"GET / HTTP/1.1\nhost: x\n\n"), (400, asked("GET / HTTP/1.1\nhost : x\n")), (400, asked("GET / HTTP/1.1\nhost: x\n y: folded\n")),
    (400, asked("GET /\xff HTTP/1.1\nhost: x\n")), (400, asked("GET / HTTP/1.1\nhost: x\ny: \0\n")), (505, asked("GET / HTTP/2.0\nhost: x\n")),
    (505, b"OPTIONS / RTSP/1.0\r\n\r\n"), (505, b"SOURCE / ICE/1.0\r\n\r\n"),
    (505, b"GET /\r\n\r\n"), (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), (400, b"\x16\x03\x01\x02"), (400, b"\0"),
    (400, asked("POST / HTTP/1.1\nhost: x\ncontent-length: 1\ncontent-length: 1\n", b"a")),
    (400, asked("POST / HTTP/1.1\nhost: x\ncontent-length: -1\n")),
    (400, asked("POST / HTTP/1.1\nhost: x\ncontent-length: 1\ntransfer-encoding: chunked\n", b"0\r\n\r\n")),
    (400, asked(f"POST / HTTP/1.1\nhost: x\ncontent-length: {10**30}\n")), (501, asked(CHUNKED.replace("chunked", "gzip, chunked"), b"0\r\n\r\n")),
    (400, asked(CHUNKED, b"x\r\n")), (400, asked(CHUNKED, b"1\r\nab\r\n")), (400, asked(CHUNKED, b"1;" + b"x" * 100_000)),
    (400, asked(CHUNKED, b"1\r\na\r\n0\r\n" + b"x: y\r\n" * 20_000)),
    (431, b"GET / HTTP/1.1\r\nhost: x\r\ny: " + b"z" * 100_000), (431, asked("GET / HTTP/1.1\nhost: x\n" + "y: z\n" * 10_000)),
    (413, asked("POST / HTTP/1.1\nhost: x\ncontent-length: 2000000\n")), (413, asked(CHUNKED, b"200000\r\n" + b"x" * 0x200000 + b"\r\n0\r\n\r\n")),
]  # fmt: skip


@pytest.mark.parametrize(("status", "data"), REFUSED)
def test_what_is_no_request_gets_an_error_and_the_end(new_loop, status, data):
    async def main():
        async with Served(echo) as served:
            [(got, _, body)] = answers(await served.ask(data))
            assert got == status and set(body["error"]) == {"message", "type", "param", "code"}

    run(new_loop, main)


@pytest.mark.parametrize(("status", "data"), REFUSED)
def test_what_is_refused_is_written_down_once(new_loop, status, data):
    reasons, statuses = [], []

    async def app(scope, receive, send):
        statuses.append(None if scope["refused"] is None else scope["refused"].status)
        await echo(scope, receive, send)

    async def main():
        async with Served(app, dropped=Dropped(reasons.append)) as served:
            await served.ask(data)

    run(new_loop, main)
    assert len(reasons) + len(statuses) == 1 and set(statuses) <= {status} and set(reasons) <= {"bad_http", "head_too_large"}


def test_a_length_may_have_any_number_of_leading_zeros(new_loop):
    async def main():
        async with Served(echo) as served:
            [(status, _, body)] = answers(await served.ask(asked(f"POST / HTTP/1.1\nhost: x\ncontent-length: {'0' * 5000}2\n", b"hi")))
            assert status == 200 and body["body"] == "hi"

    run(new_loop, main)


def test_a_wish_for_another_protocol_is_not_heard(new_loop):
    async def main():
        async with Served(echo) as served:
            for field, body in (("content-length: 2", b"hi"), ("transfer-encoding: chunked", b"2\r\nhi\r\n0\r\n\r\n")):
                head = f"POST /a HTTP/1.1\nhost: x\nconnection: Upgrade, HTTP2-Settings\nupgrade: h2c\n{field}\n"
                data = asked(head, body, close=False) + asked("GET /b HTTP/1.1\nhost: x\n")
                first, second = answers(await served.ask(data))
                assert first[0] == second[0] == 200 and first[2]["body"] == "hi" and second[2]["path"] == "/b"

    run(new_loop, main)


def test_a_client_that_asks_whether_to_go_on_is_told(new_loop):
    head = "POST / HTTP/1.1\nhost: x\nexpect: 100-continue\ncontent-length: "

    async def main():
        async with Served(echo) as served:
            reader, writer = await served.connect()
            writer.write(asked(head + "2\n"))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"hi")
            [(status, _, body)] = answers(await reader.read())
            assert status == 200 and body["body"] == "hi"
            [(status, _, _)] = answers(await served.ask(asked(head + "99999999\n")))
            assert status == 413

    run(new_loop, main)


def test_a_request_that_its_head_refuses_is_answered_before_its_body(new_loop):
    async def main():
        async with Served(echo, admit=lambda head: ServeError(403, "no") if head.path == "/no" else None) as served:
            for head in ("POST /no", "GET /", "CONNECT x:1", "TRACE /"):
                reader, writer = await served.connect()
                writer.write(asked(head + " HTTP/1.1\nhost: x\ncontent-length: 10\n", close=False) + b"abc")
                [(status, answer, _)] = answers(await reader.read())
                assert status == (403 if "no" in head else 200) and b"connection: close" in answer

    run(new_loop, main)


def test_times_of_a_head_a_body_and_an_idle_connection(new_loop):
    async def main():
        async with Served(echo, header_seconds=0.1, body_seconds=0.1, idle_seconds=0.3) as served:
            ok = asked("GET / HTTP/1.1\nhost: x\n", close=False)
            for data, statuses in (
                (b"", [408]), (b"GET", [408]), (ok, [200]), (ok + b"GET", [200, 408]),
                (asked("POST / HTTP/1.1\nhost: x\ncontent-length: 3\n", b"ab"), [408]), (asked(CHUNKED, b"1\r\na\r\n"), [408]),
            ):  # fmt: skip
                assert [status for status, _, _ in answers(await served.ask(data))] == statuses, data
            while served.state.connections:
                await asyncio.sleep(0.001)

    run(new_loop, main)


def test_a_head_does_not_wait_for_a_body_that_does_not_follow(new_loop):
    gate = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await gate.wait()
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    async def main():
        async with Served(app) as served:
            reader, writer = await served.connect()
            writer.write(asked("GET / HTTP/1.1\nhost: x\n"))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
            gate.set()
            assert await reader.read() == b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"

    run(new_loop, main)


def test_a_head_and_what_follows_at_once_are_one_write():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a"})

    written = []

    async def main():
        connection = Served(app)._factory(config=SimpleNamespace(loaded_app=app), server_state=ServerState(), app_state={})
        transport = SimpleNamespace(
            write=written.append, get_write_buffer_size=lambda: 0, get_extra_info=lambda name: None, is_closing=lambda: False, write_eof=lambda: None
        )
        connection.connection_made(transport)
        connection.data_received(asked("GET / HTTP/1.1\nhost: x\n"))
        await asyncio.gather(*connection.server_state.tasks)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert written == [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n1\r\na\r\n0\r\n\r\n"]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("started", ["", "head", "body"])
def test_an_answer_that_fails_is_seen_to(new_loop, version, started):
    async def app(scope, receive, send):
        if started:  # a head alone is not yet written
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if started == "body":
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            await asyncio.sleep(0.05)
        raise RuntimeError("injected")

    async def main():
        async with Served(app) as served:
            data = await served.ask(asked(f"GET / HTTP/{version}\nhost: x\n", close=False))
            if started == "body":
                assert b"0\r\n\r\n" not in data
            else:
                [(status, _, body)] = answers(data)
                assert status == 500 and body["error"]["code"] == "internal_error"

    run(new_loop, main)


def test_a_fault_while_a_request_is_read_is_answered(new_loop, caplog):
    def admit(head):
        raise RuntimeError("injected")

    async def main():
        async with Served(echo, admit=admit) as served:
            [(status, _, body)] = answers(await served.ask(asked("GET / HTTP/1.1\nhost: x\n")))
            assert status == 500 and body["error"]["code"] == "internal_error"

    run(new_loop, main)
    assert "a request cannot be read" in caplog.text


def test_an_answer_reaches_a_client_that_has_sent_on(new_loop):
    async def main():
        async with Served(echo) as served:
            [(status, _, body)] = answers(await served.ask(asked("GET /a HTTP/1.1\nhost: x\n") + asked("GET /b HTTP/1.1\nhost: x\n") * 100_000))
            assert status == 200 and body["path"] == "/a"

    run(new_loop, main)


@pytest.mark.parametrize("data", [asked("GET / HTTP/1.1\nhost: x\n"), asked("GET / HTTP/1.1\nhost: x\ncontent-length: 9\n", close=False)])
def test_a_client_that_leaves_as_it_is_answered_is_no_fault(new_loop, caplog, data):
    async def main():
        async def app(scope, receive, send):
            client.close()  # the loop has no turn before the answer is written
            await echo(scope, receive, send)

        async with Served(app) as served:
            client = socket.create_connection(served._server.sockets[0].getsockname())
            client.sendall(data)
            while not served.state.total_requests or served.state.connections or served.state.tasks:
                await asyncio.sleep(0.001)

    run(new_loop, main)
    assert not caplog.records


def test_connections_that_are_refused_keep_nobody_out(new_loop):
    async def main():
        async with Served(echo, max_connections=1) as served:
            _, held = await served.connect()
            while not served.state.connections:
                await asyncio.sleep(0.001)
            [first] = served.state.connections
            refused = [await served.connect() for _ in range(3)]
            for reader, _ in refused:  # who stay, though they have been answered
                [(status, _, _)] = answers(await reader.read())
                assert status == 503
            held.close()
            while first in served.state.connections:
                await asyncio.sleep(0.001)
            [(status, _, _)] = answers(await served.ask(asked("GET / HTTP/1.1\nhost: x\n")))
            assert status == 200

    run(new_loop, main)


def test_a_connection_that_waits_for_a_further_request_makes_room(new_loop):
    async def main():
        async with Served(echo, max_connections=2) as served:
            kept = []
            for _ in range(2):
                kept.append(await served.connect())
                kept[-1][1].write(asked("GET / HTTP/1.1\nhost: x\n", close=False))
                await kept[-1][0].readuntil(b"\r\n\r\n")
            [(status, _, _)] = answers(await served.ask(asked("GET / HTTP/1.1\nhost: x\n")))
            assert status == 200 and b"GET" in await kept[0][0].read()  # the one that has waited longest has been closed
            kept[1][1].write(asked("GET / HTTP/1.1\nhost: x\n"))
            assert b"HTTP/1.1 200" in await kept[1][0].read()
            while served.state.connections:
                await asyncio.sleep(0.001)

    run(new_loop, main)


def test_no_header_of_an_answer_holds_another(new_loop):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"a\r\nset-cookie: b")]})

    async def main():
        async with Served(app) as served:
            data = await served.ask(asked("GET / HTTP/1.1\nhost: x\n"))
            assert b"set-cookie" not in data

    run(new_loop, main)


def test_an_application_sees_its_client_leave_while_it_is_read_ahead(new_loop):
    seen = []

    async def app(scope, receive, send):
        await receive()
        message = await receive()
        seen.append((message["type"], scope["client_gone"].done()))
        await send({"type": "http.response.start", "status": 200, "headers": []})  # to nobody: no error

    async def main():
        async with Served(app) as served:
            _, writer = await served.connect()
            writer.write(asked("GET / HTTP/1.1\nhost: x\n", close=False) * 3)
            await writer.drain()
            writer.close()
            while served.state.connections or served.state.tasks or not seen:
                await asyncio.sleep(0.001)

    run(new_loop, main)
    assert seen == [("http.disconnect", True)]


def test_the_end_of_a_server_lets_what_it_reads_and_answers_finish(new_loop):
    async def main():
        async with Served(echo) as served:
            idle_reader, _ = await served.connect()
            reader, writer = await served.connect()
            writer.write(asked("POST / HTTP/1.1\nhost: x\ncontent-length: 2\n", b"h", close=False))
            while not any(connection._head for connection in served.state.connections):
                await asyncio.sleep(0.001)
            for connection in list(served.state.connections):
                connection.shutdown()
            assert await idle_reader.read() == b""
            writer.write(b"i")
            [(status, head, body)] = answers(await reader.read())
            assert status == 200 and body["body"] == "hi" and b"connection: close" in head

    run(new_loop, main)


@pytest.mark.parametrize(
    ("target", "host", "path"),
    [
        ("/a?b", "x", "/a"), ("http://h/a?http://c", "h", "/a"), ("HTTPS://h:1", "h:1", "/"), ("http:///a", "", "/a"),
        ("http://u@h/%41%2f", "u@h", "/A/"), ("*", "x", "*"), ("ftp://h/a", "x", "ftp://h/a"),
    ],
)  # fmt: skip
def test_targets(target, host, path):
    head = RequestHead(f"OPTIONS {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert dict(head.headers)[b"host"].decode() == host and head.path == path and head.nbytes < MAX_HEAD_BYTES
