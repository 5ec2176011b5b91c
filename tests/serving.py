"""What the tests of the server share: a tiny chat model, a server in a process of its own, and one in this process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from models import random_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import tinyloop_py as tl

ROLES = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
CONFIG = tl.ModelConfig(
    vocab_size=261, dim=64, ffn_dim=96, n_heads=4, n_kv_heads=2, head_dim=16, n_core=1, default_loops=2, trained_loops=4, max_loops=4,
    tied_embeddings=False, logit_scale=0.3, loop_norm="every", final_norm=False,
)  # fmt: skip
NAME = "tiny"
JSON = {"content-type": "application/json"}
SYSTEM = "You are a machine that answers in bytes, and this is long enough to be kept."

_folder = tempfile.TemporaryDirectory(prefix="tinyloop-serve-")


def byte_tokenizer() -> Tokenizer:
    """A token a byte, special tokens for the roles before them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i + len(ROLES) for i, c in enumerate(alphabet)} | {r: i for i, r in enumerate(ROLES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(ROLES))
    return tokenizer


@cache
def tiny_model() -> Path:
    """A random model of a millisecond per token that answers in arbitrary bytes."""
    path = Path(_folder.name) / f"{NAME}.tinyloop"
    tl.save_model(path, CONFIG, random_model(CONFIG), tokenizer=byte_tokenizer(), chat_template=TEMPLATE, stop_ids=(0, 4))
    return path


def scratch(name: str) -> Path:
    """A path in a folder that lasts as long as the test run."""
    return Path(_folder.name) / name


class Answered:
    """An HTTP answer."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


def ask(url: str, path: str, body: Any = None, *, key: str | None = None, method: str | None = None, headers: Any = None) -> Answered:
    """One request with a JSON body (or bytes as they are)."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    fields = {**JSON, **({"authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
    request = urllib.request.Request(url + path, data, fields, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return Answered(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        return Answered(error.code, error.headers, error.read())


def chat(url: str, content: str = "Hello", *, key: str | None = None, system: str | None = None, **fields: Any) -> Answered:
    """One chat completion of 8 tokens."""
    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": content}]
    return ask(url, "/v1/chat/completions", {"model": NAME, "messages": messages, "max_tokens": 8, "ignore_eos": True, **fields}, key=key)


def is_error(answer: Answered, status: int, param: str | None = None, code: str | None = None) -> bool:
    """Whether an answer is an error of the API, with this status (and field, and name)."""
    error = answer.json["error"]
    return bool(
        answer.status == status and set(answer.json) == {"error"} and set(error) == {"message", "type", "param", "code"} and error["message"]
        and (param is None or error["param"] == param) and (code is None or error["code"] == code)
    )  # fmt: skip


def slow_steps(monkeypatch: Any, seconds: float = 0.02) -> None:
    """Steps at a pace that leaves time to leave: an answer does not end by itself meanwhile."""
    from tinyloop_py.serve import runner

    step = runner.step_generations

    def slowly(generations: Any, rows: int) -> Any:
        time.sleep(seconds)
        return step(generations, rows)

    monkeypatch.setattr(runner, "step_generations", slowly)


def wait_until(condition: Any, what: str, seconds: float = 120.0) -> None:
    """Wait for what comes soon; the limit only keeps a failing test from hanging."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not: {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def server_process(*options: str, model: Path | str | None = None, wait: bool = True) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`tinyloop serve` on a free port; (its URL, its process). The log goes to the file `process.log`."""
    log = tempfile.NamedTemporaryFile("w+", dir=_folder.name, suffix=".log", delete=False)  # noqa: SIM115
    command = [
        sys.executable,
        "-m",
        "tinyloop_py.cli",
        "serve",
        str(model or tiny_model()),
        "--port",
        "0",
        "--threads",
        "1",
        "--device",
        "cpu",
        *options,
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(tl.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
    process.log = Path(log.name)  # type: ignore[attr-defined]
    try:
        line = process.stdout.readline()  # type: ignore[union-attr]
        assert line, Path(log.name).read_text()
        url = json.loads(line)["listening"]
        if wait:
            wait_until(lambda: ask(url, "/health").status == 200, "healthy")
        yield url, process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()  # type: ignore[union-attr]
        log.close()


@contextlib.contextmanager
def server_here(wait: bool = True, **settings: Any) -> Iterator[tuple[str, Any]]:
    """A server on a thread of this process; (its URL, its Service)."""
    from tinyloop_py.serve.server import make_server
    from tinyloop_py.serve.settings import Settings

    server = make_server(Settings(str(settings.pop("model", tiny_model())), device="cpu", threads=1, **settings), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), "started")
        port = server.servers[0].sockets[0].getsockname()[1]
        service = server.service
        if wait:
            wait_until(lambda: ask(f"http://127.0.0.1:{port}", "/health").status == 200, "healthy")
        yield f"http://127.0.0.1:{port}", service
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def loads(text: str) -> list[Any]:
    """The events of a stream, [DONE] left out."""
    events = [line[len("data: ") :] for line in text.splitlines() if line.startswith("data: ")]
    assert events and events[-1] == "[DONE]", text
    return [json.loads(event) for event in events[:-1]]
