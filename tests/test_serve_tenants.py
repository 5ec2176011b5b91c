"""Tenants: nobody hits, sees or drops what is another's, on any route; limits are each one's own."""

import http.client
import itertools
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

for package in ("fastapi", "uvicorn", "httptools", "jinja2", "prometheus_client"):
    pytest.importorskip(package)

from engine_runs import held_steps
from serving import JSON, NAME, SYSTEM, ask, chat, loads, scratch, server_here, wait_until

from tinyloop_py.cli import main
from tinyloop_py.serve.errors import ServeError
from tinyloop_py.serve.tenants import add_key

TURN = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}]
_names = itertools.count()


@pytest.fixture(scope="module")
def keys():
    path = scratch("tenants.json")
    settings = {
        "a": {"max_pinned_tokens": 100}, "b": {}, "a2": {}, "ops": {"operator": True}, "slow": {"requests_per_minute": 2},
        "spent": {"tokens_per_minute": 20}, "leaves": {"tokens_per_minute": 20}, "registers": {"tokens_per_minute": 20},
        "one": {"max_requests": 1}, "pins": {"max_pinned_tokens": 400},
    }  # fmt: skip
    return {name: add_key(path, name, limits) for name, limits in settings.items()}


@pytest.fixture(scope="module")
def url(keys):
    with server_here(key_file=str(scratch("tenants.json")), auto_prefix=100_000, max_seq_len=512) as (url, service):
        service_of[url] = service
        yield url


service_of = {}


def cached(answer):
    assert answer.status == 200, answer.body
    return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def completion(url, key, **fields):
    return ask(url, "/v1/completions", {"model": NAME, "prompt": SYSTEM * 2, "max_tokens": 4, "ignore_eos": True, **fields}, key=key)


def streamed(url, key, **fields):
    events = loads(chat(url, system=SYSTEM, key=key, stream=True, stream_options={"include_usage": True}, **fields).body.decode())
    return events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


ROUTES = {
    "chat": lambda url, key, **fields: cached(chat(url, system=SYSTEM, key=key, **fields)),
    "streamed": streamed,
    "completions": lambda url, key, **fields: cached(completion(url, key, **fields)),
    "several": lambda url, key, **fields: cached(chat(url, system=SYSTEM, key=key, n=2, **fields)),
    "prefixes": lambda url, key, **fields: ask(url, "/v1/prefixes", {"messages": TURN, **fields}, key=key).json["cached_tokens"],
}


@pytest.mark.parametrize("route", ROUTES)
def test_what_one_tenant_has_run_is_no_hit_for_another(url, keys, route):
    """The first asks twice and hits; the others ask the same and everything runs: what a clock would show is that no token was spared."""
    request, own = ROUTES[route], f"r{next(_names)}"
    pool = service_of[url].pool
    assert request(url, keys["a"], namespace=own) == 0
    repeated = request(url, keys["a"], namespace=own)
    assert repeated > 0 or route == "completions"
    before = pool.stats()
    for other in ("b", "a2"):
        assert request(url, keys[other], namespace=own) == 0
    after = pool.stats()
    assert after.prefilled_tokens > before.prefilled_tokens or after.insertions == before.insertions + 2
    assert request(url, keys["b"], namespace=own) == repeated  # so they have their own by now


def test_a_registered_prefix_is_its_tenants_alone(url, keys):
    made = ask(url, "/v1/prefixes", {"messages": TURN[:1], "pin": True, "namespace": "own"}, key=keys["a"]).json
    assert cached(chat(url, system=SYSTEM, key=keys["a"], namespace="own")) >= made["n_tokens"]
    assert cached(chat(url, system=SYSTEM, key=keys["a"], namespace="else")) == 0
    for other in ("b", "a2", "ops"):
        assert cached(chat(url, system=SYSTEM, key=keys[other], namespace="own")) == 0
        listed = ask(url, "/v1/prefixes", key=keys[other]).json["data"]
        assert made["id"] not in [item["id"] for item in listed]
        assert ask(url, f"/v1/prefixes/{made['id']}", method="DELETE", key=keys[other]).status == 404
    listed = ask(url, "/v1/prefixes", key=keys["a"]).json["data"]
    assert made["id"] in [item["id"] for item in listed] and all(
        item["namespace"] in (None, "own", "else") or item["namespace"][0] == "r" for item in listed
    )
    assert ask(url, f"/v1/prefixes/{made['id']}", method="DELETE", key=keys["a"]).status == 200


def test_keys_are_needed_everywhere_but_for_health_and_the_page(url, keys):
    routes = {
        "/v1/models": None,
        "/v1/prefixes": None,
        "/metrics": None,
        "/v1/chat/completions": {},
        "/v1/completions": {},
        "/tokenize": {},
        "/detokenize": {},
    }
    for path, body in routes.items():
        for key in (None, "tl-wrong"):
            answer = ask(url, path, body, key=key)
            assert answer.status == 401 and answer.json["error"]["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer", path
    assert ask(url, "/health").status == 200 and ask(url, "/").status == 200


@pytest.mark.parametrize("length", ["content-length: 2000000", "transfer-encoding: chunked"])
def test_a_body_without_a_key_is_not_read(url, keys, length):
    host, port = url.removeprefix("http://").split(":")
    paths = {"/v1/completions": "", "/tokenize": "Bearer tl-wrong", "/nowhere": "Basic \xff", "/detokenize": f"Bearer {keys['a']}"}
    for path, key in paths.items():
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nauthorization: {key}\r\n{length}\r\n\r\n"
        with socket.create_connection((host, int(port)), 120) as connection:
            connection.sendall(head.encode("latin-1"))
            answer = connection.recv(1 << 16)
            if path == "/detokenize":
                assert answer == b"HTTP/1.1 100 Continue\r\n\r\n"
            else:
                assert answer.startswith(b"HTTP/1.1 401") and b"invalid_api_key" in answer and b"connection: close" in answer
    with socket.create_connection((host, int(port)), 120) as connection:  # nobody reads a body of this
        connection.sendall(f"GET /health HTTP/1.1\r\nhost: x\r\n{length}\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_metrics_are_for_operators(url, keys):
    assert ask(url, "/metrics", key=keys["a"]).status == 403 and ask(url, "/metrics", key=keys["ops"]).status == 200


def test_pinned_tokens_have_a_limit(url, keys):
    def pin(n, first=10):
        return ask(url, "/v1/prefixes", {"tokens": list(range(first, first + n)), "pin": True, "namespace": "pins"}, key=keys["a"])

    assert pin(60).status == 200 and pin(60).status == 200  # the same again takes nothing
    refused = pin(50, 11)
    assert refused.status == 403 and refused.json["error"]["code"] == "pinned_tokens_exceeded"
    assert ask(url, "/v1/prefixes", {"tokens": list(range(11, 61)), "namespace": "pins"}, key=keys["a"]).status == 200
    assert pin(40, 12).status == 200 and ask(url, "/v1/prefixes", {"tokens": list(range(10, 200)), "pin": True}, key=keys["b"]).status == 200


def test_pins_built_at_the_same_time_count_together(url, keys):
    def pin(first):
        return ask(url, "/v1/prefixes", {"tokens": [first] * 300, "pin": True, "loops": 4}, key=keys["pins"]).status

    with ThreadPoolExecutor(6) as threads:
        statuses = list(threads.map(pin, range(10, 16)))
        assert sorted(statuses) == [200] + [403] * 5
        assert set(threads.map(pin, [10 + statuses.index(200)] * 4)) == {200}  # the same one, however often, is one
    listed = ask(url, "/v1/prefixes", key=keys["pins"]).json["data"]
    assert sum(item["n_tokens"] for item in listed if item["pinned"]) == 300


def test_rates_and_open_requests_have_limits(url, keys):
    assert [chat(url, key=keys["slow"]).status for _ in range(3)] == [200, 200, 429]
    spent = [chat(url, key=keys["spent"], max_tokens=30) for _ in range(2)]
    assert [answer.status for answer in spent] == [200, 429] and int(spent[1].headers["retry-after"]) >= 1
    answer = ask(url, "/v1/completions", {"model": NAME, "prompt": ["a", "b"], "max_tokens": 1}, key=keys["one"])
    assert answer.status == 400 and answer.json["error"]["code"] == "too_many_prompts"  # it could never run, so it is not told to try again
    assert chat(url, key=keys["one"]).status == 200 and chat(url, key=keys["b"]).status == 200
    assert chat(url, key=keys["one"], n=99).status == 400 and chat(url, key=keys["one"]).status == 200  # a refused one is not left open


@pytest.mark.parametrize(("name", "path"), [("leaves", "/v1/completions"), ("registers", "/v1/prefixes")])
def test_who_leaves_while_its_prompt_runs_pays_for_it(url, keys, name, path):
    service, tokens = service_of[url], [80] * 400
    tenant = next(tenant for tenant in service.tenants._by_hash.values() if tenant.name == name)
    wait_until(lambda: not (service.engine.n_running or len(service.engine._prefixes)), "what others left is done")
    with held_steps():  # it does not come to a token
        client = http.client.HTTPConnection(url.removeprefix("http://"))
        body = {"tokens": tokens} if "prefixes" in path else {"model": NAME, "prompt": tokens, "max_tokens": 1}
        client.request("POST", path, json.dumps(body), {**JSON, "authorization": f"Bearer {keys[name]}"})
        wait_until(lambda: service.engine.n_running or service.engine._prefixes._building, "its turn has come")
        client.close()
        wait_until(lambda: tenant.n_open == 0, "it has left")
    with pytest.raises(ServeError, match="tokens per minute"):
        tenant.begin(1)
    wait_until(lambda: not service.engine.n_running, "its work has ended")


def test_other_machines_need_keys_or_leave(capsys):
    assert main(["serve", "demo", "--host", "0.0.0.0"]) == 1
    assert "--keys" in capsys.readouterr().err and "--no-auth"
