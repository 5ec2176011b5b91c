"""The server on requests that share prefixes, beside the library on the same requests, and what HTTP costs per request and per token.

8 prefixes of 512 tokens; a request is one of them, 32 tokens of its own and 32 drawn, asked by 1, 8 and 32 clients that each wait for their answer:
four requests a client, of at least one for each prefix and at most --requests.
The library runs the same requests in its own loop of `step_generations`, without server and clients: its gain from the pool is the prediction.
Rounds alternate between pool and no pool, server and library.

    python bench/bench_server.py [--model FILE] [--device cpu] [--clients 1 8 32] [--requests 64] [--rounds 3] [--keep NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, add_model_options, keep, median_ratio, table
from random_models import model_file

import tinyloop_py as tl
from tinyloop_py.lockstep import step_generations
from tinyloop_py.serve import Engine, GenerationRequest
from tinyloop_py.serve.event_parts import EventParts
from tinyloop_py.serve.event_stream import DONE
from tinyloop_py.serve.requests import Piece, Sampling
from tinyloop_py.serve.responses import TextShape
from tinyloop_py.serve.worker import Worker


class Connection(asyncio.Protocol):
    """A client of one connection, which takes what comes with as little work as can be, so that the server is what is timed."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.whole: asyncio.Future[float] | None = None

    async def open(self) -> Connection:
        self.transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, "127.0.0.1", self.port)
        return self

    async def ask(self, request: bytes) -> tuple[float, float]:
        """(seconds to the first bytes of the body, seconds to the end)."""
        self.came, self.first_at, self.n_bytes = bytearray(), 0.0, 0
        self.whole = asyncio.get_running_loop().create_future()
        begin = time.perf_counter()
        self.transport.write(request)
        end = await self.whole
        assert self.came.startswith(b"HTTP/1.1 200") and (self.n_bytes or DONE in self.came[-32:]), self.came
        return self.first_at - begin, end - begin

    def data_received(self, data: bytes) -> None:
        self.came += data
        if not self.first_at:
            head, _, body = self.came.partition(b"\r\n\r\n")
            if not body:
                return
            self.first_at = time.perf_counter()
            if found := re.search(rb"content-length: (\d+)", head):  # a stream has none and ends with an empty chunk
                self.n_bytes = len(head) + 4 + int(found[1])
        if len(self.came) == self.n_bytes if self.n_bytes else self.came.endswith(b"\r\n0\r\n\r\n"):
            self.whole.set_result(time.perf_counter())

    def connection_lost(self, error: Exception | None) -> None:
        if self.whole is not None and not self.whole.done():
            self.whole.set_exception(ConnectionResetError(f"closed after {bytes(self.came)!r}"))


def encoded(path: str, body: dict[str, Any]) -> bytes:
    """A request as it is sent."""
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


def workload(model: tl.Model, args: argparse.Namespace) -> tuple[list[list[int]], list[list[int]]]:
    rng = np.random.default_rng(0)
    random = lambda n: rng.integers(5, model.config.vocab_size, n).tolist()  # noqa: E731
    prefixes = [random(args.prefix) for _ in range(args.prefixes)]
    return prefixes, [prefixes[i % len(prefixes)] + random(args.new) for i in range(args.requests)]


def run_library(model: tl.Model, prompts: list[list[int]], n_clients: int, args: argparse.Namespace, pool: tl.PrefixPool | None) -> dict[str, float]:
    """The requests through the library alone, as many at a time as there are clients, up to what shares a step."""
    waiting, running, firsts = deque(prompts), [], []
    n_slots = min(n_clients, args.max_running)
    begin = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < n_slots:
            generation = model._start(waiting.popleft(), args.out, temperature=0.0, stop_tokens=(), pool=pool, run_prompt=False)
            running.append([generation, time.perf_counter(), False])
        for slot, token in zip(running, step_generations([slot[0] for slot in running], args.prefill_rows), strict=True):
            if token is not None and not slot[2]:
                firsts.append(time.perf_counter() - slot[1])
                slot[2] = True
        running = [slot for slot in running if slot[0].finish_reason is None]
    return {"seconds": time.perf_counter() - begin, "first": statistics.median(firsts)}


async def run_server(port: int, name: str, prompts: list[list[int]], n_clients: int, args: argparse.Namespace, namespace: str) -> dict[str, float]:
    """The requests over HTTP, by clients that each wait for their answer."""
    connections = [await Connection(port).open() for _ in range(n_clients)]
    fixed = {"model": name, "max_tokens": args.out, "temperature": 0, "ignore_eos": True, "stream": True, "namespace": namespace}
    waiting, firsts = deque(encoded("/v1/completions", {**fixed, "prompt": prompt}) for prompt in prompts), []

    async def client(connection: Connection) -> None:
        while waiting:
            firsts.append((await connection.ask(waiting.popleft()))[0])
        connection.transport.close()

    begin = time.perf_counter()
    await asyncio.gather(*map(client, connections))
    return {"seconds": time.perf_counter() - begin, "first": statistics.median(firsts)}


def shared_prefixes(model: tl.Model, port: int, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    prefixes, prompts = workload(model, args)
    pool, rows = tl.PrefixPool(args.prefixes), []
    for prefix in prefixes:
        model.register_prefix(pool, prefix)

    async def register() -> None:
        connection = await Connection(port).open()
        for prefix in prefixes:
            await connection.ask(encoded("/v1/prefixes", {"tokens": prefix, "namespace": "pool"}))
        connection.transport.close()

    asyncio.run(register())
    for n_clients in args.clients:
        asked = prompts[: max(len(prefixes), 4 * n_clients)]
        runs = {
            ("server", "pool"): lambda n=n_clients, p=asked: asyncio.run(run_server(port, name, p, n, args, "pool")),
            ("library", "pool"): lambda n=n_clients, p=asked: run_library(model, p, n, args, pool),
            ("server", "none"): lambda n=n_clients, p=asked: asyncio.run(run_server(port, name, p, n, args, "none")),
            ("library", "none"): lambda n=n_clients, p=asked: run_library(model, p, n, args, None),
        }
        figures: dict[tuple[str, str], list[dict[str, float]]] = {key: [] for key in runs}
        for run in runs.values():
            run()  # warm
        for _ in range(args.rounds):
            for key, run in runs.items():
                figures[key].append(run())
        seconds = {key: [f["seconds"] for f in listed] for key, listed in figures.items()}
        first = {key: statistics.median(f["first"] for f in listed) for key, listed in figures.items()}
        gain = {who: median_ratio(seconds[who, "none"], seconds[who, "pool"]) for who in ("server", "library")}
        rows.append({
            "clients": n_clients, "requests": len(asked), "requests/s, pool": len(asked) / statistics.median(seconds["server", "pool"]),
            "requests/s, none": len(asked) / statistics.median(seconds["server", "none"]), "first token ms, pool": 1e3 * first["server", "pool"],
            "first token ms, none": 1e3 * first["server", "none"], "gain": gain["server"], "gain of the library": gain["library"],
            "gain reached": gain["server"] / gain["library"],
            "time over the library, pool": median_ratio(seconds["server", "pool"], seconds["library", "pool"]),
            "time over the library, none": median_ratio(seconds["server", "none"], seconds["library", "none"]),
            "KV held after it, MB": held_nbytes(port) / 1e6,
        })  # fmt: skip
    return rows


def held_nbytes(port: int) -> float:
    """Bytes of the server's KV pages in use: the pool's, where no request runs."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return next(float(line.split()[-1]) for line in answer.read().decode().splitlines() if line.startswith("tinyloop_kv_bytes"))


def microseconds(call: Any, n: int) -> float:
    begin = time.perf_counter()
    for _ in range(n):
        call()
    return 1e6 * (time.perf_counter() - begin) / n


def costs(model: tl.Model, port: int, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What a request and a token cost beyond the library: one client, a short prompt, streams of two lengths."""
    prompt, short, long = [70, 71, 72], 2, 102

    def library(n: int) -> float:
        begin = time.perf_counter()
        list(model._start(prompt, n, temperature=0.0, stop_tokens=()))
        return time.perf_counter() - begin

    async def over_http(n: int) -> float:
        connection = await Connection(port).open()
        body = {"model": name, "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": True}
        seconds = (await connection.ask(encoded("/v1/completions", body)))[1]
        connection.transport.close()
        return seconds

    async def engine_alone(n: int, repeats: int) -> list[float]:
        async with Engine(model) as engine:
            found = []
            for _ in range(repeats):
                begin = time.perf_counter()
                await engine.submit(GenerationRequest(prompt, n, sampling=Sampling(temperature=0.0), stop_tokens=())).collect()
                found.append(time.perf_counter() - begin)
            return found

    async def hop(n: int) -> float:
        worker = Worker()
        begin = time.perf_counter()
        for _ in range(n):
            await worker.call(int)
        worker.stop()
        return 1e6 * (time.perf_counter() - begin) / n

    n = 5 * args.rounds
    figures: dict[str, dict[int, float]] = {"library": {}, "engine": {}, "HTTP": {}}
    for length in (short, long):
        rounds = [(library(length), asyncio.run(engine_alone(length, 1))[0], asyncio.run(over_http(length))) for _ in range(n)]
        for i, who in enumerate(figures):
            figures[who][length] = statistics.median(r[i] for r in rounds)
    token = {who: 1e6 * (f[long] - f[short]) / (long - short) for who, f in figures.items()}
    request = {who: 1e6 * f[short] - short * token[who] for who, f in figures.items()}
    parts, piece = EventParts(TextShape(name, "tl_0", None, None), False, lambda index: ""), Piece(0, " word", (7,))
    return [
        {"what": "a token: the model alone", "us": token["library"]},
        {"what": "a token: engine over that", "us": token["engine"] - token["library"]},
        {"what": "  of it, the way to the worker's thread and back", "us": asyncio.run(hop(2000))},
        {"what": "a token: HTTP over the engine, in another process", "us": token["HTTP"] - token["engine"]},
        {"what": "  of it, writing the event", "us": microseconds(lambda: parts.of([(0, piece)]), 5000)},
        {"what": "a request: engine over the model", "us": request["engine"] - request["library"]},
        {"what": "a request: HTTP over the engine", "us": request["HTTP"] - request["engine"]},
    ]


@contextlib.contextmanager
def served(path: Path, args: argparse.Namespace) -> Iterator[int]:
    """The port of a server in another process, once it has loaded its model."""
    options = [f"--max-running={args.max_running}", f"--prefill-rows={args.prefill_rows}", f"--device={args.device}", "--max-seq-len=1024"]
    options += [] if args.threads is None else [f"--threads={args.threads}"]
    command = [sys.executable, "-m", "tinyloop_py.cli", "serve", str(path), "--port=0", "--model-name=bench", *options]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "PYTHONPATH": paths})
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line or not (port := int(json.loads(line)["listening"].rpartition(":")[2])) or not is_healthy(port, args.load_seconds):
                log.seek(0)
                raise RuntimeError(f"the server did not start: {log.read()[-2000:]}")
            yield port
        finally:
            server.terminate()
            server.wait()


def is_healthy(port: int, patience: float) -> bool:
    """Whether /health says 200 within `patience` seconds."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/health")
        if connection.getresponse().status == 200:
            return True
        connection.close()
        time.sleep(0.1)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser, tl.demo_model(), threads=None)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    for name, value in (
        ("prefixes", 8),
        ("prefix", 512),
        ("new", 32),
        ("out", 32),
        ("requests", 64),
        ("rounds", 3),
        ("max-running", 8),
        ("prefill-rows", 512),
        ("load-seconds", 120),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", choices=("shared", "costs"), help="the costs show best on a model that takes no time")
    args = parser.parse_args()
    with (
        model_file(args.model) as path,
        served(path, args) as port,
        tl.Model(path, 1024, device=args.device, threads=args.threads) as model,
    ):
        rows = [] if args.only == "costs" else shared_prefixes(model, port, "bench", args)
        parts = [] if args.only == "shared" else costs(model, port, "bench", args)
    for listed in filter(None, (rows, parts)):
        print(table([{name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()} for row in listed]), end="\n\n")
    if args.keep:
        print("kept in", keep(args.keep, {"arguments": vars(args), "shared prefixes": rows, "costs": parts}, args.device))


if __name__ == "__main__":
    main()
