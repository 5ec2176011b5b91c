"""From `device=` to a backend at work."""

from __future__ import annotations

import os
import warnings
from functools import cache

from .context import ISAS, Context
from .cuda_context import CudaContext
from .environment import is_on
from .library import Library
from .native import require_library


def _cpu_context(threads: int | None) -> Context:
    library = Library(require_library("cpu"))
    isa = os.environ.get("TINYLOOP_CPU_ISA", "best") or "best"
    if isa not in ISAS:
        raise ValueError(f"the environment variable TINYLOOP_CPU_ISA is {isa!r}, expected one of {', '.join(ISAS)}")
    return Context(library, library.usable_cpus() if threads is None else threads, isa)


def _cuda_context(ordinal: int) -> Context:
    return CudaContext(Library(require_library("cuda")), ordinal)


AUTO_VARIABLE = "TINYLOOP_CUDA_AUTO"  # experimental: has "auto" take CUDA where it can be used


@cache
def _say_once(reason: str) -> None:
    warnings.warn(f"{AUTO_VARIABLE} is on, and device='auto' takes the CPU, since CUDA cannot be used: {reason}", RuntimeWarning, stacklevel=2)


def open_context(device: str, threads: int | None) -> tuple[Context, str]:
    """A backend for "auto", "cpu", "cuda" or "cuda:N", and the device's name.

    "auto" is the CPU. With TINYLOOP_CUDA_AUTO on, it is the first CUDA device; where none can be used, the CPU, and a warning
    says why, once.

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
    if kind == "auto" and is_on(AUTO_VARIABLE):
        try:
            return _cuda_context(0), "cuda:0"
        except RuntimeError as error:
            _say_once(str(error))
    return _cpu_context(threads), "cpu"
