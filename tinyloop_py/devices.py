"""From `device=` to a backend at work."""

from __future__ import annotations

import os
import warnings
from functools import cache

from .context import ISAS, Context
from .cuda_context import CudaContext
from .library import Library
from .native import library_path, require_library


def _cpu_context(threads: int | None) -> Context:
    library = Library(require_library("cpu"))
    isa = os.environ.get("TINYLOOP_CPU_ISA", "best") or "best"
    if isa not in ISAS:
        raise ValueError(f"the environment variable TINYLOOP_CPU_ISA is {isa!r}, expected one of {', '.join(ISAS)}")
    return Context(library, library.usable_cpus() if threads is None else threads, isa)


def _cuda_context(ordinal: int) -> Context:
    return CudaContext(Library(require_library("cuda")), ordinal)


@cache
def _say_once(reason: str) -> None:
    warnings.warn(f"device='auto' takes the CPU, since CUDA cannot be used: {reason}", RuntimeWarning, stacklevel=2)


def open_context(device: str, threads: int | None) -> tuple[Context, str]:
    """A backend for "auto", "cpu", "cuda" or "cuda:N", and the device's name.

    "auto" is the first CUDA device, and the CPU where none can be used; where libtinyloop.so was built, a warning says why, once.

    Raises
    ------
    RuntimeError
        The device cannot be used; the text says what is missing.
    ValueError
        Another text than those, or a number of threads outside 1 to 1024.
    """
    if not isinstance(device, str):
        raise TypeError(f"device must be a str, got {type(device).__name__}")
    kind, _, ordinal = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (ordinal and (kind != "cuda" or not ordinal.isdecimal())) or device.endswith(":"):
        raise ValueError(f"device is {device!r}, expected 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if kind == "cuda":
        return _cuda_context(int(ordinal or 0)), f"cuda:{int(ordinal or 0)}"
    if kind == "auto" and library_path("cuda").is_file():
        try:
            return _cuda_context(0), "cuda:0"
        except RuntimeError as error:
            _say_once(str(error))
    return _cpu_context(threads), "cpu"
