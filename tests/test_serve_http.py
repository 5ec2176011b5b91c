"""The server over HTTP, in a process of its own: what it answers is what the library generates, in the shapes of the API."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("fastapi", "uvicorn", "httptools", "jinja2", "prometheus_client"):
    pytest.importorskip(package)

from serving import NAME, SYSTEM, ask, chat, is_error, loads, server_here, server_process, tiny_model

import tinyloop_py as tl

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    with server_process("--auto-prefix", "20000", "--max-seq-len", "512", "--max-queued", "16") as (url, process):
        yield url, process


@pytest.fixture(scope="module")
def url(server):
    return server[0]


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
    turn = [*messages, {"role": "assistant", "content": first["choices"][0]["message"]["content"]}]
    n_turn = len(
        ask(url, "/tokenize", {"messages": [{k: m[k] for k in ("role", "content")} for m in turn], "add_generation_prompt": False}).json["tokens"]
    )
    third = ask(url, "/v1/chat/completions", {**body, "messages": [*turn, {"role": "user", "content": "Why?"}]}).json
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == n_turn > n_system


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
    command = ["curl", "-sNH", "content-type: application/json", "-d", body, url + CHAT]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(loads(run.stdout)) >= 2
    command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--data-binary", "x", url + TEXT]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == "415"


@pytest.mark.parametrize("damaged", [False, True])
def test_a_pool_file_that_is_refused_is_not_written_over(tmp_path, damaged):
    path = tmp_path / "file"
    if damaged:
        with server_here(pool_file=str(path)) as (url, _):
            assert ask(url, "/v1/prefixes", {"tokens": [5, 6, 7]}).status == 200
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.write_text("a diary")
    before = path.read_bytes()
    with server_process("--pool-file", str(path)) as (url, process):
        assert ask(url, "/v1/prefixes", {"tokens": [8, 9]}).status == 200
        process.terminate()
        assert process.wait(120) == 0
    assert path.read_bytes() == before and "stays as it is" in process.log.read_text()


def test_a_server_that_cannot_listen_leaves_the_pool_file(tmp_path):
    path = tmp_path / "pool"
    with server_process("--pool-file", str(path)) as (url, process):
        port = url.rpartition(":")[2]
        command = [sys.executable, "-m", "tinyloop_py.cli", "serve", str(tiny_model()), "--port", port, "--device", "cpu", "--pool-file", str(path)]
        second = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(Path(tl.__file__).parent.parent)})
        assert second.returncode != 0 and not path.exists()
        process.terminate()
        assert process.wait(120) == 0
    assert path.exists()


def test_more_prompts_than_can_wait_are_a_fault_of_the_request(url):
    fields = {"model": NAME, "max_tokens": 1}
    answer = ask(url, TEXT, {**fields, "prompt": ["a"] * 17})
    assert is_error(answer, 400, "prompt", "too_many_prompts") and "16" in answer.json["error"]["message"]
    assert ask(url, TEXT, {**fields, "prompt": ["a"] * 16}).status == 200
