"""Models of `models.py` at work: files are written once a run, models are opened per test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import emulated_cuda
import numpy as np
from models import CONFIGS, random_model

import tinyloop_py as tl
from tinyloop_py.kv_export import export_kv

BACKENDS_VARIABLE = "TINYLOOP_TEST_BACKENDS"  # those named must work; by default the CPU, and CUDA where it can be used
EMULATED = "cuda-emulated"  # of them: device "cuda", its kernels run on the host by tests/cuda_emulator
ISAS = ("avx512", "avx2", "generic")
EDGES = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257)  # around KV pages, attention chunks and step sizes

_folder = tempfile.TemporaryDirectory(prefix="tinyloop-tests-")


@cache
def backends() -> list[str]:
    """The devices that the suite runs on."""
    named = [name.strip() for name in os.environ.get(BACKENDS_VARIABLE, "").split(",") if name.strip()]
    if EMULATED in named:
        if "cuda" in named:
            raise ValueError(f"{BACKENDS_VARIABLE} names both cuda and {EMULATED}, which takes its place")
        emulated_cuda.install()
        named[named.index(EMULATED)] = "cuda"
    if named:
        return named
    try:
        tl.Model(model_file("loop_bare"), 16, device="cuda").close()
    except RuntimeError:
        return ["cpu"]
    return ["cpu", "cuda"]


@cache
def model_file(name: str, dtype: str = "f32", group_size: int | None = None, seed: int = 0) -> Path:
    """A file of the random model of CONFIGS[name]."""
    path = Path(_folder.name) / f"{name}-{dtype}-{group_size}-{seed}.tinyloop"
    tl.save_model(path, CONFIGS[name], random_model(CONFIGS[name], seed, dtype, group_size), dtype=dtype, group_size=group_size)
    return path


def open_model(device: str, name: str = "shipped", dtype: str = "f32", *, group_size: int | None = None, seed: int = 0, **arguments: Any) -> tl.Model:
    """The random model of CONFIGS[name], open; `max_seq_len` is 512 unless given."""
    return tl.Model(model_file(name, dtype, group_size, seed), arguments.pop("max_seq_len", 512), device=device, **arguments)


def page_nbytes(model: tl.Model) -> int:
    """Bytes of one page of every stage of a sequence at the default depth."""
    return sum(s.page_nbytes * (model.config.default_loops if part == 2 else 1) for part, s in enumerate(model._engine.plan.store.spaces) if s)


class Fault:
    """Fails the n-th page taken from now on, and every later one if `lasting`."""

    def __init__(self, model: tl.Model, nth: int, *, lasting: bool = False) -> None:
        self.store, self.nth, self.lasting, self.taken = model._engine.plan.store, nth, lasting, 0

    def __enter__(self) -> Fault:
        self.store.fault = self
        return self

    def __exit__(self, *exc: object) -> None:
        self.store.fault = None

    def __call__(self, part: int) -> None:
        self.taken += 1
        if self.taken == self.nth or (self.lasting and self.taken > self.nth):
            raise tl.OutOfMemoryError("out of memory: injected")


def entry_of(pool: tl.PrefixPool, model: tl.Model, tokens: np.ndarray, loops: int | None = None, window: int = 0) -> Any:
    """The pool's entry of exactly these tokens, or None."""
    return pool._get(model._pool_key(loops, window, None), np.asarray(tokens, np.int32))


def kv_of(model: tl.Model, tokens: np.ndarray, loops: int | None = None, window: int = 0, splits: tuple[int, ...] = ()) -> dict[int, Any]:
    """K and V of a prompt (stage -> first position, keys, values), registered by way of prefixes that end at `splits`."""
    pool = tl.PrefixPool(64)
    for end in (*splits, len(tokens)):
        assert model.register_prefix(pool, tokens[:end], loops, window) == end
    return export_kv(model._engine, entry_of(pool, model, tokens, loops, window).payload)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays are equal to the last bit; so that poison shows, what is not finite never is."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() and bool(np.isfinite(as_float(a)).all())


def as_float(a: np.ndarray) -> np.ndarray:
    """Float32 of an array in a KV type; uint16 is bfloat16."""
    return (a.astype(np.uint32) << 16).view(np.float32) if a.dtype == np.uint16 else a.astype(np.float32)


def same_kv(a: dict[int, Any], b: dict[int, Any]) -> bool:
    """Whether two results of `kv_of` agree to the last bit wherever both still hold a position (a window lets early ones go)."""
    if a.keys() != b.keys():
        return False
    for stage in a:
        first = max(a[stage][0], b[stage][0])
        for ours, theirs in zip(a[stage][1:], b[stage][1:], strict=True):
            if not same_bits(ours[:, :, first - a[stage][0] :], theirs[:, :, first - b[stage][0] :]):
                return False
    return True


def splits_before(n: int) -> Iterator[int]:
    """The edges that a prompt of n tokens has inside it."""
    return (e for e in EDGES if e < n)
