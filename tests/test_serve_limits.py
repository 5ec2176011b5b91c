"""What the server refuses, and how: bodies, heads, connections, times; clients that leave; its health and its end."""

import contextlib
import ctypes
import gzip
import http.client
import json
import re
import signal
import socket

import pytest

for package in ("fastapi", "uvicorn", "httptools", "jinja2", "prometheus_client"):
    pytest.importorskip(package)

from serving import JSON, NAME, ask, chat, is_error, scratch, server_here, server_process, slow_steps, tiny_model, wait_until

from tinyloop_py.cli import main

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def url():
    with server_here(max_seq_len=512, check_host=True) as (url, _):
        yield url


FIELDS = [
    ({"temperature": "1"}, "temperature"), ({"temperature": 1e308}, "temperature"), ({"n": 0}, "n"), ({"n": 100}, "n"),
    ({"max_tokens": 10**30}, "max_tokens"), ({"max_tokens": True}, "max_tokens"), ({"seed": 2**64}, "seed"), ({"nonsense": 1}, "nonsense"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"loops": 5}, "loops"), ({"response_format": {"type": "json_object"}}, "response_format"), ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"stream_options": {"include_usage": True}}, "stream_options"), ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"stop_token_ids": [261]}, "stop_token_ids"), ({"namespace": "a/b"}, "namespace"), ({"messages": []}, "messages"), ({"model": None}, "model"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, None), ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
    ({"stop": ""}, "stop"), ({"stop": ["a", 1]}, "stop.1"), ({"stop": ["a", ""]}, "stop.1"), ({"stop": 1}, "stop"), ({"a[b]": 1}, "a[b]"),
    ({"str": 1}, "str"),
    ({"messages": [1]}, "messages.0"),
]  # fmt: skip
PROMPTS = [
    ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [1.5]}, None), ({"prompt": [-1]}, None), ({"prompt": [[1], "a"]}, None),
    ({"prompt": [261]}, "prompt"), ({"best_of": 3}, "best_of"), ({"echo": True, "logprobs": 1}, "echo"), ({"prompt": "a" * 600}, "messages"),
    ({"prompt": "a" * 400_000}, "messages"), ({"suffix": "b"}, "suffix"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), FIELDS)
def test_a_bad_chat_is_told_what_is_wrong(url, fields, param):
    answer = ask(url, CHAT, {"model": NAME, "messages": HI, **fields})
    assert is_error(answer, 400, param), answer.body


@pytest.mark.parametrize(("fields", "param"), PROMPTS)
def test_a_bad_completion_is_told_what_is_wrong(url, fields, param):
    answer = ask(url, TEXT, {"model": NAME, "prompt": "a", **fields})
    assert is_error(answer, 400, param), answer.body


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"stop": ["a"] * 17}, "at most 16 items"), ({"stop": "a" * 300}, "at most 256 characters"), ({"messages": [1]}, "expected an object")],
)
def test_the_fault_of_a_field_of_several_types_is_that_of_the_type_that_was_sent(url, fields, text):
    assert text in ask(url, CHAT, {"model": NAME, "messages": HI, **fields}).json["error"]["message"]


@pytest.mark.parametrize("body", [[], 3, None, "x", {}, {"model": NAME}])
def test_a_body_of_another_kind_is_refused(url, body):
    for path in (CHAT, TEXT):
        assert is_error(ask(url, path, json.dumps(body).encode()), 400)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"model": NaN}', b"[" * 100_000, b'{"model": "\\ud800", "prompt": "a"}', b"9" * 100_000])
def test_bodies_that_are_no_json_get_400(url, body):
    assert is_error(ask(url, TEXT, body), 400)


def test_other_statuses_have_the_same_shape(url):
    assert ask(url, "/a%3Fb%00").json["error"]["message"] == "There is no GET /a?b\0."
    assert is_error(ask(url, "/v1/nothing"), 404) and is_error(ask(url, "/health", {}), 405)
    assert is_error(chat(url, model="gpt-4"), 404, "model", "model_not_found")
    assert is_error(ask(url, TEXT, {}, headers={"content-type": "text/plain"}), 415)
    assert is_error(ask(url, TEXT, b" " * (3 << 20)), 413, code="body_too_large")
    answer = ask(url, TEXT, gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
    assert is_error(answer, 415) and "content-encoding 'gzip'" in answer.json["error"]["message"]
    assert is_error(ask(url, TEXT, {}, headers={"host": "evil.example"}), 403, code="wrong_host")
    assert is_error(ask(url, "/v1/models/other"), 404) and ask(url, f"/v1/models/{NAME}").json["id"] == NAME


def raw(url, data, keep=False):
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), 120)
    connection.sendall(data)
    if keep:
        return connection
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


def head_of(path, body, extra=""):
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON['content-type']}\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode()
        + body
    )


def test_what_is_no_http_gets_an_error_and_the_connection_ends(url):
    for data in (b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"):
        answer = raw(url, data)
        assert answer.startswith(b"HTTP/1.1 400") and b'"error"' in answer
    for data in (b"y" * 500_000, b"y" * 40_000 + b"\r\n\r\n"):
        answer = raw(url, b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + data)
        assert answer.startswith(b"HTTP/1.1 431") and b"head_too_large" in answer


def test_a_client_that_leaves_ends_the_work(url, monkeypatch):
    slow_steps(monkeypatch)
    n_cancelled = lambda: float(re.search(rb"\ntinyloop_cancelled_requests_total (\S+)", ask(url, "/metrics").body)[1])  # noqa: E731
    before = n_cancelled()
    body = json.dumps({"model": NAME, "messages": HI, "max_tokens": 480, "ignore_eos": True, "stream": True, "loops": 4}).encode()
    whole = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 480, "ignore_eos": True, "loops": 4}).encode()
    for path, data in ((CHAT, body), (TEXT, whole)):
        for reads in (True, False):
            connection = raw(url, head_of(path, data), keep=True)
            if reads and path == CHAT:
                assert connection.recv(10)
            connection.close()
    wait_until(lambda: n_cancelled() == before + 4, "all were cancelled")
    wait_until(lambda: b"tinyloop_requests_running 0.0" in ask(url, "/metrics").body, "nothing runs")
    assert b"tinyloop_requests_waiting 0.0" in ask(url, "/metrics").body


def test_slow_connections_are_refused():
    with server_here(header_seconds=0.5, body_seconds=0.5, idle_seconds=1) as (url, _):
        assert raw(url, b"GET / HTT").startswith(b"HTTP/1.1 408")
        assert raw(url, b"").startswith(b"HTTP/1.1 408")
        answer = raw(url, f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{{".encode())
        assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer
        answer = raw(url, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")  # ends because it stays idle
        assert answer.startswith(b"HTTP/1.1 200")


def test_more_connections_than_may_be_are_refused():
    with server_here(max_connections=4, header_seconds=300, idle_seconds=300) as (url, _):
        held = [raw(url, b"GET", keep=True) for _ in range(4)]
        answer = raw(url, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503") and b"too_many_connections" in answer
        for connection in held:
            connection.close()


def test_health_is_503_while_loading_and_when_the_worker_is_killed():
    with server_here(auto_prefix=1000) as (url, service):
        engine, service.engine = service.engine, None
        loading = ask(url, "/health")
        assert loading.status == 503 and loading.json["status"] == "loading" and is_error(chat(url), 503, code="loading")
        service.engine = engine
        assert chat(url).status == 200
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(engine._worker.thread.ident), ctypes.py_object(SystemExit))
        assert is_error(chat(url), 503)  # wakes the thread, which ends
        dead = ask(url, "/health")
        assert dead.status == 503 and dead.json["status"] == "dead" and is_error(chat(url), 503, code="engine_down")
        assert b"tinyloop_up 0.0" in ask(url, "/metrics").body


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_streams_finish_and_refuses_new_requests(number):
    with server_process("--shutdown-grace", "300", "--max-seq-len", "2048") as (url, process):
        body = json.dumps({"model": NAME, "messages": HI, "max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
        connection = raw(url, head_of(CHAT, body), keep=True)
        data = connection.recv(1000)
        process.send_signal(number)
        while chunk := connection.recv(65536):
            data += chunk
        assert b"data: [DONE]" in data and b'"length"' in data
        assert process.wait(120) == 0


def test_a_server_outlives_its_terminal_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the process inherits that
    try:
        with server_process() as (url, process):
            signal.signal(signal.SIGHUP, before)
            process.send_signal(signal.SIGHUP)
            assert chat(url).status == 200 and "Shutting down" not in process.log.read_text()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_ends_streams_after_its_grace():
    with server_process("--shutdown-grace", "0", "--max-seq-len", "16384") as (url, process):
        body = json.dumps({"model": NAME, "messages": HI, "max_tokens": 16000, "ignore_eos": True, "stream": True}).encode()
        connection = raw(url, head_of(CHAT, body), keep=True)
        data = connection.recv(1000)
        process.send_signal(signal.SIGTERM)
        while chunk := connection.recv(65536):
            data += chunk
        assert b"shutting_down" in data and b"[DONE]" not in data
        assert process.wait(120) == 0


def test_a_second_signal_ends_the_grace_in_order():
    path = scratch("hurried-pool")
    with server_process("--shutdown-grace", "1000", "--write-timeout", "1000", "--max-seq-len", "16384", "--pool-file", str(path)) as (url, process):
        assert ask(url, "/v1/prefixes", {"tokens": [5, 6, 7]}).status == 200
        body = json.dumps({"model": NAME, "messages": HI, "max_tokens": 16000, "ignore_eos": True, "stream": True, "loops": 4}).encode()
        unread, connection = (raw(url, head_of(CHAT, body), keep=True) for _ in range(2))
        data = connection.recv(1000)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Shutting down" in process.log.read_text(), "the first signal is seen")
        process.send_signal(signal.SIGTERM)
        while chunk := connection.recv(65536):
            data += chunk
        assert b"shutting_down" in data and b"[DONE]" not in data
        assert process.wait(120) == 0 and path.exists()
        unread.close()


def test_a_model_that_cannot_be_loaded_is_reported():
    path = scratch("broken.tinyloop")
    path.write_bytes(tiny_model().read_bytes()[:1000])
    with server_here(model=path, wait=False) as (url, _):
        wait_until(lambda: ask(url, "/health").json["status"] == "dead", "the failure is known")
        assert "cannot be loaded" in ask(url, "/health").json["detail"] and is_error(ask(url, TEXT, {"model": "broken", "prompt": "a"}), 503)


def fields_of(node):
    """All nodes of a pydantic-core schema."""
    if isinstance(node, dict):
        yield node
        for inner in node.values():
            yield from fields_of(inner)
    elif isinstance(node, (list, tuple)):
        for inner in node:
            yield from fields_of(inner)


def test_a_list_of_bad_elements_costs_one_error():
    from pydantic import ValidationError

    from tinyloop_py.serve import schemas

    requests = (schemas.ChatRequest, schemas.CompletionRequest, schemas.PrefixRequest, schemas.TokenizeRequest, schemas.DetokenizeRequest)
    for request in requests:
        lists = [node for node in fields_of(request.__pydantic_core_schema__) if node.get("type") == "list"]
        assert lists and all(node.get("fail_fast") for node in lists), request
    bad = [
        (schemas.CompletionRequest, {"model": NAME, "prompt": [-1] * 1000}),
        (schemas.CompletionRequest, {"model": NAME, "prompt": [[-1] * 1000] * 100}),
        (schemas.DetokenizeRequest, {"tokens": [{}] * 1000}), (schemas.ChatRequest, {"model": NAME, "messages": [{}] * 1000}),
        (schemas.ChatRequest, {"model": NAME, "messages": [{"role": "user", "content": [{}] * 1000}]}),
    ]  # fmt: skip
    for request, fields in bad:
        with pytest.raises(ValidationError) as raised:
            request.model_validate(fields)
        assert raised.value.error_count() < 10, fields


def test_an_object_of_very_many_keys_is_refused(url):
    many = {f"k{i}": 1 for i in range(1025)}
    for body in ({"model": NAME, "prompt": "a", **many}, {"model": NAME, "prompt": "a", "logit_bias": many}, {"model": NAME, "prompt": [many]}):
        answer = ask(url, TEXT, body)
        assert is_error(answer, 400) and "1024 keys" in answer.json["error"]["message"]


UNREAD = [
    "GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nx",
    "GET /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n",
    f"POST {TEXT} HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 100\r\n\r\n",
    f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999999\r\n\r\n",
]


@pytest.mark.parametrize("head", UNREAD)
def test_an_answer_before_the_body_was_read_ends_the_connection(url, head):
    answer = raw(url, head.encode())  # reads to the connection's end
    assert answer.startswith(b"HTTP/1.1 ") and answer.lower().count(b"connection: close") == 1


def test_an_answer_after_the_body_was_read_keeps_the_connection(url):
    for method, path, body in (("POST", TEXT, b"{}"), ("GET", "/health", b"")):
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
        with contextlib.closing(connection):
            connection.connect()
            held = connection.sock
            for _ in range(3):
                connection.request(method, path, body, JSON)
                with connection.getresponse() as answer:
                    assert answer.read() and answer.getheader("connection") != "close"
                assert connection.sock is held


@pytest.mark.parametrize(
    "target", ["http://localhost/health", "HTTP://127.0.0.1:9/health", "https://[::1]/health?a=http://b", "http://localhost/v1/../health"]
)
def test_a_whole_url_may_be_asked_for(url, target):
    answer = raw(url, f"GET {target} HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404" if ".." in target else b"HTTP/1.1 200"), answer


def test_the_host_of_a_whole_url_is_the_one_that_counts(url):
    for target in ("http://evil.example/health", "http://localhost@evil.example/health", "http:///health"):
        answer = raw(url, f"GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 403"), (target, answer)
    assert raw(url, b"GET http://localhost HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").startswith(b"HTTP/1.1 200")  # the page


def test_no_redirect_leads_to_the_host_that_a_request_names():
    with server_here() as (url, _):
        for path in ("/health/", "/v1/models/", "/v1/prefixes/"):
            answer = raw(url, f"GET {path} HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n".encode())
            assert b" 404 " in answer.partition(b"\r\n")[0] and b"location" not in answer.lower()


def test_every_loopback_address_is_this_machines_own(url):
    port = url.rpartition(":")[2]
    for host in ("127.0.0.1", f"127.0.0.2:{port}", "localhost", f"LOCALHOST:{port}", "[::1]", f"[::1]:{port}"):
        assert ask(url, "/health", headers={"host": host}).status == 200, host
    for host in ("", "[", "[]", "128.0.0.1", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0", f"192.168.0.1:{port}", "::1"):
        answer = raw(url, f"GET /health HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        assert answer.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400")), (host, answer)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("port", "70000"), ("port", "-1"), ("idle-timeout", "inf"), ("deadline", "nan"), ("shutdown-grace", "inf"), ("write-timeout", "0"),
        ("threads", "0"), ("max-seq-len", "0"), ("kv-budget", "-1"), ("pool-bytes", "0"), ("prefill-rows", "15"), ("max-queued", "9" * 30),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused_at_once(capsys, option, value):
    assert main(["serve", str(tiny_model()), f"--{option}", value]) == 1
    assert f"--{option} is" in capsys.readouterr().err


def test_the_address_of_an_ipv6_host_is_one():
    with server_process("--host", "::1") as (url, _):
        assert url.startswith("http://[::1]:") and ask(url, "/health").status == 200


def test_health_answers_head(url):
    answer = ask(url, "/health", method="HEAD")
    assert answer.status == 200 and answer.body == b""
