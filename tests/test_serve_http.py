"""The server over HTTP: shapes of answers and errors, limits, health, and its end. One server process for most of it."""

import ctypes
import json
import shutil
import signal
import socket
import subprocess
import time

import pytest

for package in ("fastapi", "uvicorn", "jinja2", "prometheus_client"):
    pytest.importorskip(package)

from serving import JSON, NAME, SYSTEM, ask, chat, loads, scratch, server_here, server_process, tiny_model, wait_until

import tinyloop_py as tl


@pytest.fixture(scope="module")
def server():
    with server_process("--auto-prefix", "20000", "--max-seq-len", "512", "--max-queued", "16") as (url, process):
        yield url, process


@pytest.fixture(scope="module")
def url(server):
    return server[0]


def is_error(answer, status, param=None, code=None):
    error = answer.json["error"]
    return (
        answer.status == status and set(answer.json) == {"error"} and set(error) == {"message", "type", "param", "code"} and error["message"]
        and (param is None or error["param"] == param) and (code is None or error["code"] == code)
    )  # fmt: skip


def complete(url, prompt, **fields):
    return ask(url, "/v1/completions", {"model": NAME, "prompt": prompt, "max_tokens": 6, "ignore_eos": True, **fields})


def test_an_answer_is_what_the_library_generates(url):
    body = chat(url, seed=11).json
    assert body["object"] == "chat.completion" and body["model"] == NAME and body["choices"][0]["finish_reason"] == "length"
    usage = body["usage"]
    assert usage["completion_tokens"] == 8 and usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert usage["prompt_tokens_details"]["cached_tokens"] in range(usage["prompt_tokens"])
    with tl.Model(tiny_model(), 512, device="cpu", threads=1) as model:
        ids = model.tokenizer.encode("<|user|>Hello<|end|><|assistant|>").ids
        drawn = model.generate(ids, 8, top_k=0, seed=11, stop_tokens=())[len(ids) :]
        assert body["choices"][0]["message"]["content"] == model.tokenizer.decode(drawn)
        deep = model.generate(ids, 8, 3, top_k=0, seed=11, stop_tokens=())[len(ids) :]
        assert chat(url, seed=11, loops=3).json["choices"][0]["message"]["content"] == model.tokenizer.decode(deep)


def test_a_streamed_answer_joins_to_the_whole_one(url):
    whole = chat(url, seed=3, n=2).json
    answer = chat(url, seed=3, n=2, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = loads(answer.body.decode())
    texts, reasons = ["", ""], [None, None]
    for body in events[:-1]:
        [choice] = body["choices"]
        assert body["object"] == "chat.completion.chunk" and body["usage"] is None and body["id"] == events[0]["id"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]] and reasons == ["length", "length"]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 16 == whole["usage"]["completion_tokens"]
    assert "usage" not in loads(chat(url, stream=True).body.decode())[0]


def test_prompts_come_as_text_as_ids_and_as_lists_of_both(url):
    ids = ask(url, "/tokenize", {"text": "abc"}).json["tokens"]
    one = complete(url, "abc", seed=1).json["choices"][0]["text"]
    assert complete(url, ids, seed=1).json["choices"][0]["text"] == one
    for prompt in (["abc", "abd"], [ids, ids]):
        body = complete(url, prompt, seed=1, n=2).json
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3] and body["choices"][0]["text"] == one
        assert body["usage"]["prompt_tokens"] == 6 and body["usage"]["completion_tokens"] == 24
    streamed = loads(complete(url, ["abc", "abd"], seed=1, stream=True).body.decode())
    assert "".join(e["choices"][0]["text"] for e in streamed if e["choices"][0]["index"] == 0) == one
    assert complete(url, "abc", seed=1, echo=True).json["choices"][0]["text"] == "abc" + one


def test_tokenize_and_detokenize_are_inverse(url):
    text = "Größe 你好 \N{GRINNING FACE}<|end|>"
    ids = ask(url, "/tokenize", {"text": text}).json
    assert ids["count"] == len(ids["tokens"]) and ids["max_model_len"] == 512
    assert ask(url, "/detokenize", {"tokens": ids["tokens"]}).json["text"] == text
    messages = [{"role": "user", "content": "hi"}]
    ids = ask(url, "/tokenize", {"messages": messages}).json["tokens"]
    assert ask(url, "/detokenize", {"tokens": ids}).json["text"] == "<|user|>hi<|end|><|assistant|>"
    assert is_error(ask(url, "/detokenize", {"tokens": [99999]}), 400, "tokens")
    assert is_error(ask(url, "/tokenize", {}), 400)


def test_logprobs_stop_ids_and_bias(url):
    chosen = chat(url, logprobs=True, top_logprobs=2, temperature=0).json["choices"][0]["logprobs"]["content"]
    assert len(chosen) == 8 and all(item["top_logprobs"][0]["logprob"] == item["logprob"] and len(item["top_logprobs"]) == 2 for item in chosen)
    text = complete(url, "x", logprobs=1, temperature=0).json["choices"][0]
    assert len(text["logprobs"]["tokens"]) == 6 and "".join(text["logprobs"]["tokens"]).count("\ufffd") >= text["text"].count("\ufffd")
    banned = complete(url, "x", logit_bias={"70": 100}, temperature=0, max_tokens=3, repetition_penalty=1.0).json["choices"][0]["text"]
    only = ask(url, "/detokenize", {"tokens": [70]}).json["text"]
    assert banned == only * 3
    stopped = complete(url, "x", logit_bias={"70": 100}, temperature=0, stop_token_ids=[70]).json
    assert stopped["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"} and stopped["usage"]["completion_tokens"] == 1
    stopped = complete(url, "x", logit_bias={"70": 100}, temperature=0, stop=only * 2).json
    assert stopped["choices"][0]["text"] == "" and stopped["choices"][0]["finish_reason"] == "stop"


def test_registered_prefixes_are_hit_listed_and_dropped(url):
    messages = [{"role": "system", "content": "A registered prefix."}]
    made = ask(url, "/v1/prefixes", {"messages": messages, "pin": True}).json
    assert made["pinned"] and not made["automatic"] and made["cached_tokens"] == 0
    again = ask(url, "/v1/prefixes", {"messages": messages, "pin": True}).json
    assert again["id"] == made["id"] and again["cached_tokens"] == again["n_tokens"]
    assert chat(url, system="A registered prefix.").json["usage"]["prompt_tokens_details"]["cached_tokens"] == made["n_tokens"]
    assert chat(url, system="A registered prefix.", loops=1).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    listed = {item["id"]: item for item in ask(url, "/v1/prefixes").json["data"]}
    assert listed[made["id"]]["hits"] >= 1 and "A registered prefix" in listed[made["id"]]["preview"]
    assert ask(url, f"/v1/prefixes/{made['id']}", method="DELETE").json["deleted"]
    assert is_error(ask(url, f"/v1/prefixes/{made['id']}", method="DELETE"), 404)
    assert is_error(ask(url, "/v1/prefixes", {"text": "a", "tokens": [1]}), 400) and is_error(ask(url, "/v1/prefixes", {"tokens": [1] * 600}), 400)


def test_a_conversations_next_turn_hits_the_whole_turn_before(url):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What are you?"}]
    body = {"model": NAME, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    first = ask(url, "/v1/chat/completions", {**body, "messages": messages}).json
    n_system = len(ask(url, "/tokenize", {"messages": messages[:1], "add_generation_prompt": False}).json["tokens"])
    other = [messages[0], {"role": "user", "content": "And you?"}]
    second = ask(url, "/v1/chat/completions", {**body, "messages": other}).json
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 and second["usage"]["prompt_tokens_details"]["cached_tokens"] == n_system
    turn = [*messages, first["choices"][0]["message"]]
    n_turn = len(ask(url, "/tokenize", {"messages": [{k: m[k] for k in ("role", "content")} for m in turn], "add_generation_prompt": False}).json["tokens"])
    third = ask(url, "/v1/chat/completions", {**body, "messages": [*turn, {"role": "user", "content": "Why?"}]}).json
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == n_turn > n_system


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HI}, "model"), (CHAT, {"model": NAME}, "messages"), (CHAT, {"model": NAME, "messages": []}, "messages"),
        (CHAT, {"model": NAME, "messages": HI, "temperature": "1"}, "temperature"), (CHAT, {"model": NAME, "messages": HI, "temperature": 1e308}, "temperature"),
        (CHAT, {"model": NAME, "messages": HI, "n": 0}, "n"), (CHAT, {"model": NAME, "messages": HI, "n": 100}, "n"),
        (CHAT, {"model": NAME, "messages": HI, "max_tokens": 10**30}, "max_tokens"), (CHAT, {"model": NAME, "messages": HI, "max_tokens": True}, "max_tokens"),
        (CHAT, {"model": NAME, "messages": HI, "seed": 2**64}, "seed"), (CHAT, {"model": NAME, "messages": HI, "nonsense": 1}, "nonsense"),
        (CHAT, {"model": NAME, "messages": HI, "tools": [{"type": "function"}]}, "tools"), (CHAT, {"model": NAME, "messages": HI, "loops": 5}, "loops"),
        (CHAT, {"model": NAME, "messages": HI, "response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"model": NAME, "messages": HI, "presence_penalty": 0.5}, "presence_penalty"), (CHAT, {"model": NAME, "messages": HI, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"model": NAME, "messages": HI, "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"model": NAME, "messages": HI, "logit_bias": {"-1": 1}}, "logit_bias"), (CHAT, {"model": NAME, "messages": HI, "stop_token_ids": [261]}, "stop_token_ids"),
        (CHAT, {"model": NAME, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
        (CHAT, {"model": NAME, "messages": [{"role": "wizard", "content": "hi"}]}, None), (CHAT, {"model": NAME, "messages": HI, "namespace": "a/b"}, "namespace"),
        (TEXT, {"model": NAME, "prompt": ""}, "prompt"), (TEXT, {"model": NAME, "prompt": []}, "prompt"), (TEXT, {"model": NAME, "prompt": [1.5]}, None),
        (TEXT, {"model": NAME, "prompt": [-1]}, None), (TEXT, {"model": NAME, "prompt": [[1], "a"]}, None), (TEXT, {"model": NAME, "prompt": [261]}, "prompt"),
        (TEXT, {"model": NAME, "prompt": "a", "best_of": 3}, "best_of"), (TEXT, {"model": NAME, "prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        (TEXT, {"model": NAME, "prompt": "a" * 600}, "messages"), (TEXT, {"model": NAME, "prompt": "a" * 400_000}, "messages"), (TEXT, [], None), (TEXT, 3, None),
    ],
)  # fmt: skip
def test_bad_requests_are_told_what_is_wrong(url, path, body, param):
    answer = ask(url, path, body)
    assert is_error(answer, 400, param), answer.body


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"model": NaN}', b"[" * 100_000, b'{"model": "\\ud800", "prompt": "a"}', b"9" * 100_000])
def test_bodies_that_are_no_json_get_400(url, body):
    assert is_error(ask(url, TEXT, body), 400)


def test_other_statuses_have_the_same_shape(url):
    assert is_error(ask(url, "/v1/nothing"), 404) and is_error(ask(url, "/health", {}), 405)
    assert is_error(chat(url, model="gpt-4"), 404, "model", "model_not_found")
    assert is_error(ask(url, TEXT, {}, headers={"content-type": "text/plain"}), 415)
    assert is_error(ask(url, TEXT, b" " * (3 << 20)), 413, code="body_too_large")
    assert is_error(ask(url, TEXT, {}, headers={"host": "evil.example"}), 403, code="wrong_host")
    assert is_error(ask(url, "/v1/models/other"), 404) and ask(url, f"/v1/models/{NAME}").json["id"] == NAME


def test_metrics_count_what_happened(url):
    def value(name):
        lines = ask(url, "/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and not line.startswith(name + "_created"))

    before = [value(n) for n in ("tinyloop_prompt_tokens_total", "tinyloop_generation_tokens_total", "tinyloop_cached_tokens_total")]
    usage = chat(url, system=SYSTEM).json["usage"]
    after = [value(n) for n in ("tinyloop_prompt_tokens_total", "tinyloop_generation_tokens_total", "tinyloop_cached_tokens_total")]
    expected = [usage["prompt_tokens"], 8, usage["prompt_tokens_details"]["cached_tokens"]]
    assert [b - a for a, b in zip(before, after, strict=True)] == expected
    assert value("tinyloop_up") == 1 and value("tinyloop_pool_entries") >= 1


def test_the_log_is_json_and_holds_no_prompt(server):
    url, process = server
    chat(url, "a very secret question", system="and a secret rule")
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    last = [line for line in lines if line.get("route") == CHAT][-1]
    assert last["status"] == 200 and last["completion_tokens"] == 8 and last["tenant"] == "anonymous" and last["first_token_ms"] > 0
    assert "secret" not in process.log.read_text()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_gets_answers_and_streams(url):
    body = json.dumps({"model": NAME, "messages": HI, "max_tokens": 4, "stream": True})
    run = subprocess.run(["curl", "-sN", "-H", "content-type: application/json", "-d", body, url + CHAT], capture_output=True, text=True, check=True)
    assert len(loads(run.stdout)) >= 2
    run = subprocess.run(["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--data-binary", "x", url + TEXT], capture_output=True, text=True, check=True)
    assert run.stdout == "415"


def raw(url, data, keep=False):
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), 30)
    connection.sendall(data)
    if keep:
        return connection
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


def head_of(path, body, extra=""):
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON['content-type']}\r\ncontent-length: {len(body)}\r\n{extra}\r\n".encode() + body


def test_what_is_no_http_gets_an_error_and_the_connection_ends(url):
    for data in (b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 500_000):
        answer = raw(url, data)
        assert answer.startswith(b"HTTP/1.1 400") and b'"error"' in answer
    answer = raw(url, b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 40_000 + b"\r\n\r\n")
    assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")) and b'"error"' in answer


def test_a_client_that_leaves_ends_the_work(url):
    body = json.dumps({"model": NAME, "messages": HI, "max_tokens": 480, "ignore_eos": True, "stream": True, "loops": 4}).encode()
    whole = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 480, "ignore_eos": True, "loops": 4}).encode()
    for path, data in ((CHAT, body), (TEXT, whole)):
        for reads in (True, False):
            connection = raw(url, head_of(path, data), keep=True)
            if reads and path == CHAT:
                assert connection.recv(10)
            connection.close()
    wait_until(lambda: b"tinyloop_requests_running 0.0" in ask(url, "/metrics").body, "nothing runs")
    assert b"tinyloop_requests_waiting 0.0" in ask(url, "/metrics").body


def test_slow_and_many_connections_are_refused():
    with server_here(header_seconds=0.5, body_seconds=0.5, max_connections=4, idle_seconds=1) as (url, _):
        assert raw(url, b"GET / HTT").startswith(b"HTTP/1.1 408")
        assert raw(url, b"").startswith(b"HTTP/1.1 408")
        answer = raw(url, f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{{".encode())
        assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer
        answer = raw(url, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")  # ends because it stays idle
        assert answer.startswith(b"HTTP/1.1 200")
        wait_until(lambda: ask(url, "/health").status == 200, "connections are free")
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


def test_a_signal_lets_streams_finish_and_refuses_new_requests():
    with server_process("--shutdown-grace", "20", "--max-seq-len", "2048") as (url, process):
        body = json.dumps({"model": NAME, "messages": HI, "max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
        connection = raw(url, head_of(CHAT, body), keep=True)
        data = connection.recv(1000)
        process.send_signal(signal.SIGTERM)
        while chunk := connection.recv(65536):
            data += chunk
        assert b"data: [DONE]" in data and b'"length"' in data
        assert process.wait(20) == 0


def test_a_signal_ends_streams_after_its_grace():
    with server_process("--shutdown-grace", "0", "--max-seq-len", "16384") as (url, process):
        body = json.dumps({"model": NAME, "messages": HI, "max_tokens": 16000, "ignore_eos": True, "stream": True}).encode()
        connection = raw(url, head_of(CHAT, body), keep=True)
        data = connection.recv(1000)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        while chunk := connection.recv(65536):
            data += chunk
        assert b"shutting_down" in data and b"[DONE]" not in data
        assert process.wait(20) == 0 and time.monotonic() - begin < 30


def test_a_model_that_cannot_be_loaded_is_reported():
    path = scratch("broken.tinyloop")
    path.write_bytes(tiny_model().read_bytes()[:1000])
    with server_here(model=path, wait=False) as (url, _):
        wait_until(lambda: ask(url, "/health").json["status"] == "dead", "the failure is known")
        assert "cannot be loaded" in ask(url, "/health").json["detail"] and is_error(ask(url, TEXT, {"model": "broken", "prompt": "a"}), 503)
