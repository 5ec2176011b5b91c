"""From `device=` to a backend at work."""

from __future__ import annotations

import os
import warnings
from functools import cache

from .context import ISAS, Context
from .cuda_context import CudaContext
from .cuda_device import NoDeviceError, gpu_is_there, import_bindings
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


def _cuda_context_if_usable() -> Context | None:
    """The first CUDA device, or None, with a warning where there is a GPU."""
    try:
        library = Library(require_library("cuda"))
        import_bindings()
    except RuntimeError as error:  # the driver cannot be asked
        if gpu_is_there():
            _say_once(str(error))
        return None
    try:
        return CudaContext(library, 0)
    except NoDeviceError:
        return None
    except RuntimeError as error:
        _say_once(str(error))
        return None


@cache
def _say_once(reason: str) -> None:
    text = f"device='auto' takes the CPU, since the GPU cannot be used: {reason}. device='cpu' takes it without this warning"
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def open_context(device: str, threads: int | None) -> tuple[Context, str]:
    """A backend for "auto", "cpu", "cuda" or "cuda:N", and the device's name.

    "auto" is the first CUDA device, or the CPU where none can be used; if there is a GPU, a warning says why, once a process.

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
    if kind == "auto":
        context = _cuda_context_if_usable()
        if context is not None:
            return context, "cuda:0"
    return _cpu_context(threads), "cpu"
