"""From `device=` to a backend at work."""

from __future__ import annotations

import os

from .context import ISAS, Context
from .library import Library
from .native import library_path, require_library


def _cpu_context(threads: int | None) -> Context:
    library = Library(require_library("cpu"))
    isa = os.environ.get("TINYLOOP_CPU_ISA", "best") or "best"
    if isa not in ISAS:
        raise ValueError(f"the environment variable TINYLOOP_CPU_ISA is {isa!r}, expected one of {', '.join(ISAS)}")
    return Context(library, library.usable_cpus() if threads is None else threads, isa)


def open_context(device: str, threads: int | None) -> tuple[Context, str]:
    """A backend for "auto", "cpu", "cuda" or "cuda:N", and the device's name.

    Raises
    ------
    RuntimeError
        The device cannot be used; the text says what is missing. "auto" takes the CPU instead.
    ValueError
        Another text than those, or a number of threads outside 1 to 1024.
    """
    if not isinstance(device, str):
        raise TypeError(f"device must be a str, got {type(device).__name__}")
    kind, _, ordinal = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (ordinal and (kind != "cuda" or not ordinal.isdecimal())) or device.endswith(":"):
        raise ValueError(f"device is {device!r}, expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if kind == "cuda":
        require_library("cuda")
        raise RuntimeError(f"{library_path('cuda').name} has no kernels in this version; use device='cpu'")
    return _cpu_context(threads), "cpu"
