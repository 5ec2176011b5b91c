"""Where the native libraries are, and whether they can be loaded."""

from __future__ import annotations

import os
from pathlib import Path

LIBRARY_NAMES = {"cpu": "libtinyloop_cpu.so", "cuda": "libtinyloop.so"}


def library_folder() -> Path:
    """The folder that the build puts the native libraries in."""
    return Path(__file__).resolve().parent / "lib"


def _variable(backend: str) -> str:
    return f"TINYLOOP_{backend.upper()}_LIBRARY"


def library_path(backend: str) -> Path:
    """Path of a backend's library; `TINYLOOP_CPU_LIBRARY` and `TINYLOOP_CUDA_LIBRARY` name another file."""
    override = os.environ.get(_variable(backend))
    return Path(override) if override else library_folder() / LIBRARY_NAMES[backend]


def require_library(backend: str) -> Path:
    """`library_path`, or a RuntimeError that says how to build it."""
    path = library_path(backend)
    if not path.is_file() and os.environ.get(_variable(backend)):
        raise RuntimeError(f"{path.name} is missing from {path.parent}: {_variable(backend)} is {str(path)!r}, which is no file; unset or correct it")
    if not path.is_file():
        reason = "nvcc was not found when tinyloop was installed" if backend == "cuda" else "the build was incomplete"
        raise RuntimeError(
            f"{path.name} is missing from {path.parent}: {reason}. `python -m tinyloop_py` shows what was searched; reinstall to build it"
        )
    return path
