"""Many clients of many tenants at once, with leaving, breaking off and nonsense among them: nothing is lost, nothing grows, nobody crosses.

TINYLOOP_LOAD_SECONDS says how long (5); the full test is 60.
"""

import asyncio
import os
import random
import time

import pytest

httpx = pytest.importorskip("httpx")
for package in ("fastapi", "uvicorn", "httptools", "jinja2", "prometheus_client"):
    pytest.importorskip(package)

from serving import NAME, scratch, server_here

import tinyloop_py as tl
from tinyloop_py.serve.tenants import add_key

SECONDS = float(os.environ.get("TINYLOOP_LOAD_SECONDS", "5"))
N_CLIENTS, N_TENANTS, N_SEEDS = 64, 8, 6


def system_of(tenant: int) -> str:
    return f"Tenant {tenant} speaks here. " + "The same words for all of them follow after this. " * 2


class Client:
    """One client: asks, and sometimes leaves; what it gets whole must be what its tenant's prompt gives, however busy the server."""

    def __init__(self, number: int, url: str, key: str, end: float) -> None:
        self.tenant, self.url, self.end = number % N_TENANTS, url, end
        self.headers = {"authorization": f"Bearer {key}"}
        self.rng = random.Random(number)
        self.answers: dict[tuple[int, int], set[str]] = {}
        self.counts = dict.fromkeys(("whole", "streamed", "left", "refused", "bad"), 0)
        self.most_cached = 0

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=60, verify=False) as http:
            while time.monotonic() < self.end:
                await self.rng.choice((self.whole, self.whole, self.streamed, self.streamed, self.leave, self.nonsense))(http)

    def body(self, seed: int, **fields) -> dict:
        messages = [{"role": "system", "content": system_of(self.tenant)}, {"role": "user", "content": f"Question {seed}"}]
        return {"model": NAME, "messages": messages, "seed": seed, "max_tokens": 12, "ignore_eos": True, **fields}

    async def whole(self, http) -> None:
        seed = self.rng.randrange(N_SEEDS)
        answer = await http.post("/v1/chat/completions", json=self.body(seed))
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            self.counts["refused"] += 1
            await asyncio.sleep(0.05)
            return
        assert answer.status_code == 200, answer.text
        body = answer.json()
        self.counts["whole"] += 1
        self.most_cached = max(self.most_cached, body["usage"]["prompt_tokens_details"]["cached_tokens"])
        self.answers.setdefault((self.tenant, seed), set()).add(body["choices"][0]["message"]["content"])

    async def streamed(self, http) -> None:
        seed, text = self.rng.randrange(N_SEEDS), ""
        async with http.stream("POST", "/v1/chat/completions", json=self.body(seed, stream=True)) as answer:
            if answer.status_code == 429:
                self.counts["refused"] += 1
                return
            assert answer.status_code == 200
            events = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        for event in events[:-1]:
            for choice in httpx.Response(200, text=event).json()["choices"]:
                text += choice["delta"].get("content") or ""
        self.counts["streamed"] += 1
        self.answers.setdefault((self.tenant, seed), set()).add(text)

    async def leave(self, http) -> None:
        """Break off: before anything came, or in the middle."""
        task = asyncio.ensure_future(http.post("/v1/chat/completions", json=self.body(1, max_tokens=300, stream=self.rng.random() < 0.5)))
        await asyncio.sleep(self.rng.random() * 0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.counts["left"] += 1

    async def nonsense(self, http) -> None:
        content = self.rng.choice((b"{", b"\xff", b'{"model": NaN}', b"[" * 10_000))
        answer = await http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        self.counts["bad"] += 1


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(SECONDS + 300)
def test_many_clients_of_many_tenants():
    path = scratch("load-keys.json")
    path.unlink(missing_ok=True)
    keys = [add_key(path, f"tenant{i}", {}) for i in range(N_TENANTS)]
    limits = {"max_queued": 40, "max_seq_len": 512, "auto_prefix": 4000, "pool_capacity": 64, "prefill_rows": 64}
    with server_here(key_file=str(path), **limits) as (url, service):
        begin = time.monotonic()
        sizes: list[int] = []

        async def watch() -> None:
            while time.monotonic() < begin + SECONDS:
                await asyncio.sleep(SECONDS / 10)
                sizes.append(resident_bytes())

        async def load() -> list[Client]:
            clients = [Client(i, url, keys[i % N_TENANTS], begin + SECONDS) for i in range(N_CLIENTS)]
            await asyncio.gather(watch(), *(client.run() for client in clients))
            return clients

        clients = asyncio.run(load())
        counts = {name: sum(client.counts[name] for client in clients) for name in clients[0].counts}
        print(counts, f"{(sizes[-1] - sizes[len(sizes) // 2]) / 2**20:.1f} MiB grown in the second half")
        assert min(counts["whole"], counts["streamed"], counts["left"], counts["bad"]) > 0, counts

        end = time.monotonic() + 30
        while service.engine.n_running or service.engine.n_waiting or len(service.engine._prefixes):
            assert time.monotonic() < end, "work is left over"
            time.sleep(0.02)
        service.pool._check()
        assert all(tenant.n_open == 0 for tenant in service.tenants._by_hash.values())
        assert service.engine.auto.n_tokens <= 4000 and service.engine.alive
        assert {entry.namespace for entry in service.pool.entries()} <= {f"tenant{i}" for i in range(N_TENANTS)}
        check_answers(clients, service.model)
        assert max(client.most_cached for client in clients) > 80  # hits took place
        service.pool.clear()
        assert service.model.kv_nbytes == 0
        if SECONDS >= 30:
            assert sizes[-1] - sizes[len(sizes) // 2] < 32 << 20, sizes


def check_answers(clients: list[Client], model: tl.Model) -> None:
    """Every answer to a prompt is the one that the library gives alone: so nothing of another tenant's is in it."""
    for key in {key for client in clients for key in client.answers}:
        tenant, seed = key
        prompt = model.tokenizer.encode(f"<|system|>{system_of(tenant)}<|end|><|user|>Question {seed}<|end|><|assistant|>").ids
        expected = model.tokenizer.decode(model.generate(prompt, 12, top_k=0, seed=seed, stop_tokens=())[len(prompt) :])
        assert set().union(*(client.answers.get(key, set()) for client in clients)) == {expected}
