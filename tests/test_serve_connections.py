"""Connections whose other end takes nothing, sends far ahead or speaks an older HTTP; large texts beside which others are answered."""

import json
import re
import socket
import threading

import pytest

for package in ("fastapi", "uvicorn", "httptools", "jinja2", "prometheus_client"):
    pytest.importorskip(package)

from engine_runs import held_steps
from serving import JSON, NAME, ask, byte_tokenizer, server_here, server_process, slow_steps, wait_until

from tinyloop_py.serve import beside, service

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDLESS = {"model": NAME, "max_tokens": 8000, "ignore_eos": True, "loops": 4}


def post(path, body, head="HTTP/1.1", extra=""):
    data = json.dumps(body).encode()
    fields = f"host: localhost\r\ncontent-type: {JSON['content-type']}\r\ncontent-length: {len(data)}\r\n{extra}"
    return f"POST {path} {head}\r\n{fields}\r\n".encode() + data


def connect(url, receive_buffer=None):
    """A connection, with a small buffer where it is not to take much."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(120)
    connection.connect((host, int(port)))
    return connection


def received(connection):
    """All until the other end closes, or breaks it off."""
    data = bytearray()
    try:
        while chunk := connection.recv(1 << 16):
            data += chunk
    except ConnectionError:
        pass
    return bytes(data)


# ---- readers that take nothing


def test_a_whole_answer_that_nobody_reads_gives_its_connection_back():
    with server_here(write_seconds=0.2, idle_seconds=1, max_connections=1, max_body_bytes=64 << 20) as (url, _):
        wait_until(lambda: ask(url, "/health").status == 200, "the connection of the start is free")
        with connect(url, 4096) as connection:
            request = post("/detokenize", {"tokens": [200] * 1_000_000})  # twice three bytes for each
            connection.sendall(request)
            wait_until(lambda: ask(url, "/health").status == 200, "another client has its place")
            answer = received(connection)
            assert answer.startswith(b"HTTP/1.1 200") and 0 < len(answer) < int(re.search(rb"content-length: (\d+)", answer)[1])


@pytest.mark.parametrize("fields", [{"stream": True, "logprobs": 20}, {"stream": True, "n": 8, "logprobs": 20}])
def test_a_stream_that_nobody_reads_ends_with_its_work(fields):
    with server_here(write_seconds=0.2, max_seq_len=16384) as (url, service):
        with connect(url, 4096) as connection:
            connection.sendall(post(TEXT, {**ENDLESS, "prompt": "a", **fields}))
            wait_until(lambda: service.engine.n_running == 1, "it runs")
            wait_until(lambda: service.engine.n_running == 0, "it was given up", 120)
            assert b"[DONE]" not in received(connection)
        assert b"tinyloop_cancelled_requests_total 1.0" in ask(url, "/metrics").body


def test_a_reader_that_trickles_gives_its_connection_back():
    with server_here(write_seconds=0.2, write_rate=1 << 30, idle_seconds=1, max_connections=1, max_body_bytes=64 << 20) as (url, service):
        wait_until(lambda: ask(url, "/health").status == 200, "the connection of the start is free")
        with connect(url, 4096) as connection:
            connection.sendall(post("/detokenize", {"tokens": [200] * 1_000_000}))
            n_dropped = service.metrics.dropped.labels("slow_reader")._value.get
            wait_until(lambda: connection.recv(100) and n_dropped() == 1, "it was given up, though it always takes something")
            wait_until(lambda: ask(url, "/health").status == 200, "another client has its place")
        assert b'tinyloop_dropped_connections_total{reason="slow_reader"} 1.0' in ask(url, "/metrics").body


def test_requests_sent_far_ahead_without_reading_are_given_up():
    with server_here(write_seconds=0.2, max_connections=1, idle_seconds=1) as (url, _):
        wait_until(lambda: ask(url, "/health").status == 200, "the connection of the start is free")
        with connect(url, 4096) as connection:
            connection.settimeout(0.5)
            try:
                for _ in range(1000):
                    connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100)
            except (TimeoutError, ConnectionError):
                pass
            wait_until(lambda: ask(url, "/health").status == 200, "another client has its place")


# ---- ahead, and older


def test_a_client_that_sends_ahead_and_leaves_ends_its_work(monkeypatch):
    slow_steps(monkeypatch)
    with server_here(max_seq_len=16384) as (url, service):
        for n, fields in enumerate(({"stream": True}, {}), 1):
            with connect(url) as connection:
                connection.sendall(post(TEXT, {**ENDLESS, "prompt": "a", **fields}) + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                wait_until(lambda: service.engine.n_running == 1, "it runs")
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            wait_until(lambda n=n: f"tinyloop_cancelled_requests_total {n}.0".encode() in ask(url, "/metrics").body, "it was cancelled")
            wait_until(lambda: service.engine.n_running == 0, "its work has ended")


def test_what_the_server_gives_up_is_no_client_that_left():
    with held_steps() as held, server_here(max_running=1, max_queued=2, deadline=3) as (url, service):
        waiting = threading.Thread(target=ask, args=(url, TEXT, {**ENDLESS, "prompt": ["a", "b"], "max_tokens": 9}))
        waiting.start()
        wait_until(lambda: service.engine.n_waiting == 1, "one runs and one waits")
        assert ask(url, TEXT, {**ENDLESS, "prompt": ["a", "b"], "max_tokens": 9}).status == 429  # there was room for one of them
        assert service.engine.n_waiting <= 1
        waiting.join(60)  # until its deadline
        assert b"tinyloop_cancelled_requests_total 0.0" in ask(url, "/metrics").body
        held.open()


def test_requests_sent_ahead_are_answered_in_order():
    with server_here() as (url, _), connect(url) as connection:
        body = {"model": NAME, "prompt": "a", "max_tokens": 3, "ignore_eos": True}
        health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        last = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        connection.sendall(health + post(TEXT, body) + health + post(TEXT, {**body, "stream": True}) + last)
        answer = received(connection)
        places = [answer.index(mark) for mark in (b'"status":"ok"', b'"text_completion","choices"', b"[DONE]", b'"object":"list"')]
        assert answer.count(b"HTTP/1.1 200") == 5 and places == sorted(places)


def test_http_1_0_gets_whole_answers_and_streams():
    with server_here() as (url, _):
        body = {"model": NAME, "prompt": "a", "max_tokens": 3, "ignore_eos": True}
        for fields in ({}, {"stream": True}):
            with connect(url) as connection:
                connection.sendall(post(TEXT, {**body, **fields}, "HTTP/1.0"))
                head, _, content = received(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200") and b"chunked" not in head.lower()
            assert content.endswith(b"data: [DONE]\n\n") if fields else json.loads(content)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("sizes", [(1,), (7, 1, 300)])
def test_chunked_bodies_are_read(sizes):
    data = json.dumps({"model": NAME, "prompt": "a" * 200, "max_tokens": 3, "ignore_eos": True}).encode()
    chunks, at = b"", 0
    while at < len(data):
        for size in sizes:
            part = data[at : at + size]
            at += len(part)
            chunks += b"%x;ext=1\r\n%b\r\n" % (len(part), part) if part else b""
    head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    with server_here() as (url, _), connect(url) as connection:
        connection.sendall(head.encode() + chunks + b"0\r\ntrailer: 1\r\n\r\n")
        answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 200") and b'"completion_tokens":3' in answer


def test_a_chunked_body_without_end_is_refused_at_its_limit():
    with server_here(max_body_bytes=1 << 16) as (url, _), connect(url) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        try:
            for _ in range(100):
                connection.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
        except ConnectionError:
            pass
        assert received(connection).startswith(b"HTTP/1.1 413")


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error():
    with server_process() as (url, process):
        for sent in (10, 200):
            with connect(url) as connection:
                connection.sendall(post(TEXT, {"model": NAME, "prompt": "a" * 1000})[:-sent])
        wait_until(lambda: process.log.read_text().count('"status": 499') == 2, "both are written down")
        assert '"level": "error"' not in process.log.read_text()


# ---- large texts


@pytest.fixture
def held(monkeypatch):
    """Texts that are encoded or decoded wait until they are let go."""
    begun, gate = threading.Event(), threading.Event()

    def waiting(work):
        def wrapped(*arguments, **options):
            begun.set()
            assert gate.wait(60)
            return work(*arguments, **options)

        return wrapped

    for name in ("encode", "decode"):
        monkeypatch.setattr(service, name, waiting(getattr(beside, name)))
    yield begun, gate
    gate.set()


LARGE = [
    ("/detokenize", {"tokens": [70] * 100_000}), ("/tokenize", {"text": "a" * 100_000}),
    (TEXT, {"model": NAME, "prompt": [70] * 100_000, "echo": True, "max_tokens": 1}), (TEXT, {"model": NAME, "prompt": "a" * 100_000}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), LARGE, ids=["detokenize", "tokenize", "echo", "prompt"])
def test_others_are_answered_while_a_large_text_is_worked_on(held, path, body):
    begun, gate = held
    with server_here() as (url, service):
        service.max_chars = 1 << 20
        answers = []
        asking = threading.Thread(target=lambda: answers.append(ask(url, path, body)))
        asking.start()
        assert begun.wait(60)
        assert ask(url, "/health").status == 200 and ask(url, "/v1/models").status == 200 and not answers
        gate.set()
        asking.join(60)
        assert answers[0].status == (200 if "tokenize" in path else 400)


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_a_large_text_leaves_the_interpreter_to_others(work):
    tokenizer = byte_tokenizer()
    call = {
        "encode": lambda: beside.encode(tokenizer, "abc " * 50_000, special=False),
        "decode": lambda: beside.decode(tokenizer, [70] * 400_000),
    }[work]

    def steps_meanwhile():
        begun, n_steps = [], 0

        def run():
            begun.append(1)
            call()
            begun.clear()

        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive():
            n_steps += len(begun)
        return n_steps

    assert sum(steps_meanwhile() > 10 for _ in range(6)) >= 3
