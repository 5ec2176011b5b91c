"""What a bug report starts with: versions, the machine, the backends found and why others were not.

Nothing here raises: whatever cannot be found out is reported as the error that stood in the way.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .native import library_folder, library_path

PACKAGES = ("tinyloop", "numpy", "tokenizers", "cuda-python", "cuda-bindings", "safetensors", "gguf", "rich", "torch", "transformers")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "CONDA_PREFIX",
    "CUDA_HOME",
    "CUDA_PATH",
    "CXX",
    "OMP_PROC_BIND",
    "OMP_NUM_THREADS",
)
CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "asimd")


def _try(ask: Callable[[], Any]) -> Any:
    """What `ask` returns, or the text of what it raises."""
    try:
        return ask()
    except Exception as error:  # a diagnosis goes on, whatever one part of it meets
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> dict[str, Any]:
    """Name, and which of the instruction sets that the code paths need."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {"name": fields.get("model name", platform.machine()), "features": [flag for flag in CPU_FLAGS if flag in flags]}


def _build_info() -> dict[str, Any]:
    """What the build wrote down beside the libraries."""
    info: dict[str, Any] = json.loads((library_folder() / "build.json").read_text(encoding="utf-8"))
    return info


def _backend(device: str) -> dict[str, Any]:
    """What a model on this device would run on; raises what `Model` would."""
    from .devices import open_context

    context, _ = open_context(device, None)
    try:
        return {"runs_on": context.name, "numerics_id": context.numerics_id, "threads": context.n_threads}
    finally:
        context.close()


def _cuda_devices() -> dict[str, Any]:
    """The driver, the runtime and the devices as cuda-python sees them."""
    from cuda.bindings import runtime

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        status, *results = function(*arguments)
        if int(status) != 0:
            raise RuntimeError(f"{function.__name__} returned {getattr(status, 'name', status)}")
        return results[0]

    found: dict[str, Any] = {"driver_supports": call(runtime.cudaDriverGetVersion), "runtime": call(runtime.cudaRuntimeGetVersion)}
    found["devices"] = []
    for ordinal in range(call(runtime.cudaGetDeviceCount)):
        properties = call(runtime.cudaGetDeviceProperties, ordinal)
        name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
        found["devices"].append({"name": name, "sm": f"{properties.major}{properties.minor}", "memory_nbytes": int(properties.totalGlobalMem)})
    return found


def _library(backend: str) -> dict[str, Any]:
    """Where a backend's library is, and whether it loads."""
    path = library_path(backend)
    if not path.is_file():
        return {"path": str(path), "state": "missing"}
    from .library import Library

    loaded = _try(lambda: Library(path))
    return {"path": str(path), "nbytes": path.stat().st_size, "state": loaded if isinstance(loaded, str) else "loads"}


def _demo_model() -> dict[str, Any]:
    path = Path(__file__).resolve().parent / "models" / "demo.tinyloop"
    return {"path": str(path), "state": f"{path.stat().st_size:,} bytes" if path.is_file() else "missing"}


def diagnose(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Everything that a report of a fault should say, as plain values for JSON."""
    return {
        "packages": {name: _package_version(name) for name in PACKAGES},
        "package_folder": str(library_folder().parent),
        "python": f"{platform.python_implementation()} {sys.version.split()[0]} ({sys.executable})",
        "platform": f"{platform.platform()}, {platform.libc_ver()[0]} {platform.libc_ver()[1]}",
        "processor": _try(_processor),
        "build": _try(_build_info),
        "libraries": {backend: _try(lambda backend=backend: _library(backend)) for backend in ("cpu", "cuda")},  # type: ignore[misc]
        "backends": {device: _try(lambda device=device: _backend(device)) for device in ("cpu", "cuda")},  # type: ignore[misc]
        "cuda_python": _try(_cuda_devices),
        "demo_model": _try(_demo_model),
        "environment": {name: value for name, value in sorted(environ.items()) if name.startswith("TINYLOOP_") or name in VARIABLES},
    }


def as_text(report: Mapping[str, Any]) -> str:
    """A report as lines, one a fact, indented by what they belong to."""
    lines: list[str] = []

    def add(name: str, value: Any, indent: int) -> None:
        head = "  " * indent + (name if name.isupper() else name.replace("_", " "))
        if isinstance(value, Mapping) and value:
            lines.append(head)
            for key, item in value.items():
                add(key, item, indent + 1)
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            for i, item in enumerate(value):
                add(f"{name} {i}", item, indent)
        else:
            lines.append(f"{head}: {_plain(value)}")

    for name, value in report.items():
        add(name, value, 0)
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value) if value != {} else "none"
