"""A server's pool in its file: what a restart keeps, and what is never written over."""

import asyncio
import json
import os
import resource
import signal
import stat
import subprocess
import sys

import numpy as np
import pytest

for package in ("fastapi", "uvicorn", "httptools", "jinja2", "prometheus_client"):
    pytest.importorskip(package)

from engine_runs import ask as request_of
from engine_runs import prompt
from serving import NAME, SYSTEM, ask, chat, server_here, server_process, tiny_model

import tinyloop_py as tl
from tinyloop_py.saved_pool import save_pool
from tinyloop_py.serve import Engine, folder_lock, pool_file
from tinyloop_py.serve.tenants import add_key


def listed(url, key=None):
    """The prefixes by id, with what a restart must keep."""
    kept = ("n_tokens", "loops", "namespace", "pinned", "automatic", "hits", "preview")
    return {item["id"]: {name: item[name] for name in kept} for item in ask(url, "/v1/prefixes", key=key).json["data"]}


def fill(url, key=None):
    """Registered prefixes of all kinds, and automatic ones."""
    for i, fields in enumerate(({"pin": True}, {"pin": True, "namespace": "own"}, {}, {"namespace": "own", "loops": 3})):
        assert ask(url, "/v1/prefixes", {"tokens": [40 + i] * 30, **fields}, key=key).status == 200
    assert chat(url, system=SYSTEM, key=key).status == 200
    body = {"model": NAME, "prompt": [42] * 30 + [9], "max_tokens": 2, "ignore_eos": True}
    assert ask(url, "/v1/completions", body, key=key).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 30
    ask(url, "/v1/completions", {**body, "prompt": [9]}, key=key)  # too short to be kept, and waits until the turn before it is
    return listed(url, key)


def test_a_restart_keeps_what_was_registered_and_what_came_by_itself(tmp_path):
    keys = tmp_path / "keys.json"
    key, other = add_key(keys, "a", {}), add_key(keys, "b", {})
    settings = {"pool_file": str(tmp_path / "pool"), "auto_prefix": 5000, "max_seq_len": 512, "key_file": str(keys)}
    with server_here(**settings) as (url, _):
        before, others = fill(url, key), fill(url, other)
        assert {(item["pinned"], item["automatic"]) for item in before.values()} == {(True, False), (False, False), (False, True)}
    for _ in range(2):
        with server_here(**settings) as (url, service):
            assert listed(url, key) == before and listed(url, other) == others
            assert service.engine.auto.n_tokens <= service.pool.total_cached_tokens()
    assert set(before).isdisjoint(others)


def test_without_automatic_prefixes_the_registered_ones_come_back_alone(tmp_path):
    settings = {"pool_file": str(tmp_path / "pool"), "max_seq_len": 512}
    with server_here(**settings, auto_prefix=5000) as (url, _):
        before = fill(url)
    with server_here(**settings) as (url, _):
        assert listed(url) == {name: item for name, item in before.items() if not item["automatic"]}


def test_a_smaller_pool_takes_the_pinned_ones_and_the_last_used(tmp_path):
    settings = {"pool_file": str(tmp_path / "pool"), "max_seq_len": 512}
    with server_here(**settings) as (url, _):
        ids = [ask(url, "/v1/prefixes", {"tokens": [40 + i] * 20, "pin": i == 0}).json["id"] for i in range(4)]
        assert ask(url, "/v1/completions", {"model": NAME, "prompt": [41] * 21, "max_tokens": 1}).status == 200  # uses the second
    with server_here(**settings, pool_capacity=3) as (url, _):
        assert set(listed(url)) == {ids[0], ids[1], ids[3]}


def test_more_pins_than_the_pool_takes_are_refused_as_a_whole(tmp_path):
    path = tmp_path / "pool"
    with server_here(pool_file=str(path), max_seq_len=512) as (url, _):
        for i in range(3):
            assert ask(url, "/v1/prefixes", {"tokens": [40 + i] * 20, "pin": True}).status == 200
    before = path.read_bytes()
    with server_here(pool_file=str(path), max_seq_len=512, pool_capacity=2) as (url, service):
        assert listed(url) == {} and service.pool_file.refused and service.model.kv_nbytes == 0
    assert path.read_bytes() == before


def pool_of_three(model):
    pool = tl.PrefixPool(4, eviction="lru")
    for i in range(3):
        model.register_prefix(pool, [40 + i] * 20, namespace="anonymous")
    return pool


def test_what_the_library_saved_counts_as_registered(tmp_path):
    path = tmp_path / "pool"
    with tl.Model(tiny_model(), 512, device="cpu", threads=1) as model:
        pool_of_three(model).save(path)
    with server_here(pool_file=str(path), auto_prefix=5000, max_seq_len=512) as (url, _):
        assert [item["automatic"] for item in listed(url).values()] == [False] * 3


@pytest.mark.parametrize("notes", ["", "[]", "{}", '{"automatic": 1}', '{"automatic": [1]}', '{"automatic": [], "x": 1}', '{"automatic": [', "\x00"])
def test_notes_that_are_not_a_servers_refuse_the_file_as_a_whole(tmp_path, notes):
    path = tmp_path / "pool"
    with tl.Model(tiny_model(), 512, device="cpu", threads=1) as model:
        save_pool(pool_of_three(model), path, notes)
    before = path.read_bytes()
    with server_here(pool_file=str(path), auto_prefix=5000, max_seq_len=512) as (url, service):
        assert listed(url) == {} and service.model.kv_nbytes == 0 and service.status == ("ok", "")
    assert path.read_bytes() == before


def test_notes_about_prefixes_that_are_not_there_name_nothing(tmp_path):
    path = tmp_path / "pool"
    with tl.Model(tiny_model(), 512, device="cpu", threads=1) as model:
        save_pool(pool_of_three(model), path, json.dumps({"automatic": ["prefix-0", "prefix-0"]}))
    with server_here(pool_file=str(path), auto_prefix=5000, max_seq_len=512) as (url, _):
        assert [item["automatic"] for item in listed(url).values()] == [False] * 3


@pytest.mark.parametrize("earlier", [True, False])
def test_what_was_registered_on_purpose_does_not_become_automatic(earlier):
    """A request that would keep the same prefix by itself, after the registration or while it is built."""

    async def main():
        with tl.Model(tiny_model(), 512, device="cpu", threads=1) as model:
            pool = tl.PrefixPool(8, eviction="lru")
            async with Engine(model, pool, auto_prefix=1000, prefill_rows=16) as engine:
                request = request_of(100, 1, keep_first=96, tenant="t", namespace="t", keep_turn=lambda text: prompt(100)[:64])
                registered = [asyncio.ensure_future(engine.register("t", "t", prompt(100)[:n])) for n in (96, 64)]
                if earlier:
                    await asyncio.gather(*registered)
                await engine.submit(request).collect()
                await asyncio.gather(*registered)
                while len(engine._prefixes):
                    await asyncio.sleep(0.001)
                held = [engine.auto.holds("t", None, np.array(prompt(100)[:n], np.int32)) for n in (96, 64)]
                assert held == [False, False] and pool.size() == 2
            pool.clear()

    asyncio.run(asyncio.wait_for(main(), 60))


def end(process, status):
    process.terminate()
    assert process.wait(120) == status, process.log.read_text()
    return process.log.read_text()


def test_of_two_servers_on_one_file_the_second_to_end_writes_nothing_over(tmp_path):
    path = tmp_path / "pool"
    options = ("--pool-file", str(path), "--max-seq-len", "512")
    with server_process(*options) as (url, first), server_process(*options) as (other, second):
        assert ask(url, "/v1/prefixes", {"tokens": [5] * 20}).status == 200
        assert ask(other, "/v1/prefixes", {"tokens": [6] * 20}).status == 200
        end(first, 0)
        saved = path.read_bytes()
        assert "has changed since the start" in end(second, 1)
        assert path.read_bytes() == saved
    assert os.listdir(tmp_path) == ["pool"]


def test_a_pool_file_that_was_moved_away_is_saved_anew(tmp_path):
    path = tmp_path / "pool"
    with server_here(pool_file=str(path), max_seq_len=512) as (url, _):
        assert ask(url, "/v1/prefixes", {"tokens": [5] * 20}).status == 200
    with server_process("--pool-file", str(path), "--max-seq-len", "512") as (url, process):
        before = listed(url)
        path.rename(tmp_path / "old")
        end(process, 0)
    with server_here(pool_file=str(path), max_seq_len=512) as (url, _):
        assert listed(url) == before


def test_servers_that_end_together_save_one_pool_whole(tmp_path):
    path = tmp_path / "pool"
    options = ("--pool-file", str(path), "--max-seq-len", "512")
    with server_process(*options) as (url, first), server_process(*options) as (other, second):
        for i, one in enumerate((url, other)):
            assert ask(one, "/v1/prefixes", {"tokens": [5 + i] * 20}).status == 200
        first.terminate()
        second.terminate()
        assert sorted((first.wait(120), second.wait(120))) == [0, 1]
    with server_here(pool_file=str(path), max_seq_len=512) as (url, service):
        assert len(listed(url)) == 1 and not service.pool_file.refused


def test_a_save_that_fails_is_told_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "pool"
    with server_here(pool_file=str(path), max_seq_len=512) as (url, _):
        assert ask(url, "/v1/prefixes", {"tokens": [5] * 20}).status == 200
    before = path.read_bytes()
    with server_process("--pool-file", str(path), "--max-seq-len", "512") as (url, process):
        assert ask(url, "/v1/prefixes", {"tokens": [6] * 400}).status == 200
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        assert "the pool is not saved" in end(process, 1)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["pool"]


def test_a_new_pool_file_is_its_owners_alone_and_an_old_one_keeps_its_permissions(tmp_path):
    path = tmp_path / "pool"
    for before, after in ((None, 0o600), (0o640, 0o640)):
        if before is not None:
            path.chmod(before)
        with server_here(pool_file=str(path), max_seq_len=512):
            pass
        assert stat.S_IMODE(path.stat().st_mode) == after


def test_a_server_that_is_killed_leaves_its_last_saved_pool(tmp_path):
    path = tmp_path / "pool"
    with server_here(pool_file=str(path), max_seq_len=512) as (url, _):
        assert ask(url, "/v1/prefixes", {"tokens": [5] * 20}).status == 200
        before = listed(url)
    with server_process("--pool-file", str(path), "--max-seq-len", "512") as (url, process):
        assert ask(url, "/v1/prefixes", {"tokens": [6] * 20}).status == 200
        process.kill()
        process.wait()
    with server_here(pool_file=str(path), max_seq_len=512) as (url, _):
        assert listed(url) == before


def test_a_place_where_no_pool_can_be_saved_is_refused_at_the_start(tmp_path, capsys):
    from tinyloop_py.cli import main

    for path, text in ((tmp_path / "none" / "pool", "folder does not exist"), (tmp_path, "expected a file")):
        assert main(["serve", str(tiny_model()), "--pool-file", str(path)]) == 1
        assert text in capsys.readouterr().err


def test_a_folder_that_others_keep_locked_is_an_error_in_the_log(tmp_path, monkeypatch, caplog):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(folder_lock, "LOCK_SECONDS", 0.1)
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        assert not pool_file.PoolFile(str(tmp_path / "pool")).save(tl.PrefixPool(1), ())
    finally:
        os.close(fd)
    assert "locked" in caplog.text
    assert pool_file.PoolFile(str(tmp_path / "pool")).save(tl.PrefixPool(1), ())


KILLED = """
import os, signal, sys
from tinyloop_py.atomic_file import AtomicFile
with AtomicFile(sys.argv[1], 1 << 20) as file:
    file.write(0, b"x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs files without names")
def test_a_process_that_is_killed_while_it_saves_leaves_no_file(tmp_path):
    try:
        os.close(os.open(tmp_path, os.O_RDWR | os.O_TMPFILE))
    except OSError:
        pytest.skip("this file system has no files without names")
    path = tmp_path / "pool"
    path.write_text("old")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert ended.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["pool"] and path.read_text() == "old"
