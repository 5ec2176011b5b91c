"""Builds the native libraries into tinyloop_py/lib: libtinyloop_cpu.so always, libtinyloop.so where nvcc is found.

Environment variables:

================== ==================================================================================================
TINYLOOP_CUDA       auto (default: build where nvcc is found), on (no nvcc is an error), off
TINYLOOP_NVCC       path of nvcc; then CUDA_HOME, CUDA_PATH, CONDA_PREFIX or BUILD_PREFIX, PATH, /usr/local/cuda
TINYLOOP_CUDA_ARCHS targets, default 80,89,90a: machine code for each, and PTX of the lowest for newer devices
TINYLOOP_REPORT     1 prints registers and spills of every kernel
TINYLOOP_DEBUG      1 builds the Cython modules with bounds checks
CXX                 the host compiler, also nvcc's
================== ==================================================================================================
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent
DEFAULT_ARCHS = "80,89,90a"

# Units compiled once per code path, and the flags of each path (simd.h says what TL_ISA stands for).
KERNEL_UNITS = ("attention", "logits", "matmul", "pack", "rows")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx512bf16", "-mprefer-vector-width=512")
X86_PATHS = {"generic": (1, ()), "avx2": (2, AVX2), "avx512": (3, AVX512)}

# Contraction is off, so that a fused multiply-add is one that the source asks for; GCC 12 warns about its own intrinsics.
CXX_FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread",
    "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip


class BuildError(Exception):
    """The build cannot go on; the text says what to do."""


# ---- finding compilers


def host_compiler(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The C++ compiler as an argument list: CXX, else c++ or g++ on the PATH."""
    if environ.get("CXX"):
        return shlex.split(environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name, path=environ.get("PATH")):
            return [name]
    raise BuildError("no C++ compiler found: install g++ or set CXX")


def find_nvcc(environ: Mapping[str, str] = os.environ) -> tuple[Path | None, list[str]]:
    """nvcc and the list of places looked at, in the order of the module's text.

    Raises
    ------
    BuildError
        TINYLOOP_NVCC, CUDA_HOME or CUDA_PATH is set and holds no nvcc.
    """
    searched = []
    for name, suffix, required in (
        ("TINYLOOP_NVCC", "", True), ("CUDA_HOME", "bin/nvcc", True), ("CUDA_PATH", "bin/nvcc", True),
        ("CONDA_PREFIX", "bin/nvcc", False), ("BUILD_PREFIX", "bin/nvcc", False),
    ):  # fmt: skip
        value = environ.get(name)
        if not value:
            continue
        path = Path(value) / suffix if suffix else Path(value)
        searched.append(f"{name}: {path}")
        if os.access(path, os.X_OK) and path.is_file():
            return path, searched
        if required:
            raise BuildError(f"{name} is set to {value}, and {path} is no nvcc; correct it, unset it, or set TINYLOOP_CUDA=off")
    searched.append("PATH")
    if found := shutil.which("nvcc", path=environ.get("PATH")):
        return Path(found), searched
    default = Path("/usr/local/cuda/bin/nvcc")
    searched.append(str(default))
    return (default, searched) if os.access(default, os.X_OK) else (None, searched)


def wanted_nvcc(environ: Mapping[str, str] = os.environ) -> tuple[Path | None, list[str]]:
    """`find_nvcc` under TINYLOOP_CUDA: none where it is off, an error where it is on and there is none."""
    mode = environ.get("TINYLOOP_CUDA", "auto").lower() or "auto"
    if mode not in ("auto", "on", "off"):
        raise BuildError(f"TINYLOOP_CUDA is {mode!r}, expected auto, on or off")
    if mode == "off":
        return None, ["TINYLOOP_CUDA=off"]
    nvcc, searched = find_nvcc(environ)
    if nvcc is None and mode == "on":
        raise BuildError(f"TINYLOOP_CUDA=on, and no nvcc was found in {'; '.join(searched)}")
    return nvcc, searched


def cuda_archs(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Targets of the CUDA build, lowest first, such as ["80", "89", "90a"]."""
    archs = [a.strip() for a in (environ.get("TINYLOOP_CUDA_ARCHS") or DEFAULT_ARCHS).replace(";", ",").split(",") if a.strip()]
    for arch in archs:
        if not arch.rstrip("af").isdecimal() or int(arch.rstrip("af")) < 80:
            raise BuildError(f"TINYLOOP_CUDA_ARCHS has {arch!r}, expected numbers from 80 on, such as {DEFAULT_ARCHS}")
    return sorted(set(archs), key=lambda a: (int(a.rstrip("af")), a))


# ---- commands


def cpu_units(source: Path, build: Path, machine: str) -> list[tuple[Path, Path, list[str]]]:
    """(source, object, flags) of every unit of libtinyloop_cpu.so on a machine such as "x86_64"."""
    paths = X86_PATHS if machine in ("x86_64", "AMD64") else {"generic": (1, ())}
    units = []
    for file in sorted(source.glob("*.cpp")):
        if file.stem not in KERNEL_UNITS:
            units.append((file, build / f"{file.stem}.o", []))
            continue
        for name, (isa, flags) in paths.items():
            units.append((file, build / f"{file.stem}_{name}.o", [*flags, f"-DTL_ISA={isa}"]))
    return units


def nvcc_command(nvcc: Path, compiler: Sequence[str], archs: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[str]:
    """nvcc with the flags that every .cu file is compiled with."""
    command = [str(nvcc), "-O3", "-std=c++17", "-fmad=false", "-lineinfo", "-ccbin", compiler[0], "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    command += ["--threads", "1", f"-I{ROOT / 'include'}", f"-I{ROOT / 'cuda'}"]
    for arch in archs:
        command.append(f"-gencode=arch=compute_{arch},code=sm_{arch}")
    command.append(f"-gencode=arch=compute_{archs[0]},code=compute_{archs[0]}")
    prefix = environ.get("CONDA_PREFIX") or environ.get("BUILD_PREFIX")
    if prefix:  # conda keeps the headers of the target apart
        command += [f"-I{folder}" for folder in sorted(Path(prefix).glob("targets/*/include"))]
    if environ.get("TINYLOOP_REPORT", "0") not in ("", "0"):
        command += ["-Xptxas", "-v"]
    return command


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.stdout or done.stderr:
        print(done.stdout + done.stderr, end="", flush=True)
    if done.returncode:
        raise BuildError(f"this command failed: {shlex.join(command)}")


def _is_fresh(target: Path, sources: Sequence[Path]) -> bool:
    return target.exists() and all(target.stat().st_mtime >= s.stat().st_mtime for s in sources)


def _compile(jobs: Sequence[tuple[list[str], Path, Path]], headers: Sequence[Path]) -> None:
    """Runs (command, source, object) jobs whose object is older than its source or a header, as many at a time as there are cores."""
    stale = [(command, target) for command, source, target in jobs if not _is_fresh(target, [source, *headers, Path(__file__)])]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()) as pool:
        list(pool.map(_run, [[*command, "-o", str(target)] for command, target in stale]))


# ---- libraries


def build_cpu(build: Path, lib: Path, machine: str | None = None) -> Path:
    """Compiles and links libtinyloop_cpu.so."""
    compiler = host_compiler()
    build.mkdir(parents=True, exist_ok=True)
    lib.mkdir(parents=True, exist_ok=True)
    include = [f"-I{ROOT / 'include'}", f"-I{ROOT / 'cpu'}"]
    units = cpu_units(ROOT / "cpu", build, machine or platform.machine())
    headers = [*ROOT.glob("cpu/*.h"), *ROOT.glob("include/*.h")]
    _compile([([*compiler, *CXX_FLAGS, *include, *flags, "-c", str(source)], source, target) for source, target, flags in units], headers)
    library = lib / "libtinyloop_cpu.so"
    _run([*compiler, "-shared", "-pthread", "-Wl,--no-undefined", "-o", str(library), *(str(target) for _, target, _ in units)])
    return library


def build_cuda(build: Path, lib: Path, nvcc: Path) -> Path | None:
    """Compiles and links libtinyloop.so, CUDA's runtime inside; None where there are no kernels."""
    sources = sorted((ROOT / "cuda").glob("*.cu"))
    if not sources:
        return None
    build.mkdir(parents=True, exist_ok=True)
    lib.mkdir(parents=True, exist_ok=True)
    base = nvcc_command(nvcc, host_compiler(), cuda_archs())
    headers = [*ROOT.glob("cuda/*.h"), *ROOT.glob("cuda/*.cuh"), *ROOT.glob("include/*.h")]
    jobs = [([*base, "-c", str(source)], source, build / f"{source.stem}.o") for source in sources]
    _compile(jobs, headers)
    library = lib / "libtinyloop.so"
    _run([*base, "-shared", "-cudart", "static", "-o", str(library), *(str(target) for _, _, target in jobs)])
    return library


def build_all(build: Path, lib: Path) -> None:
    """Builds what this machine can, and says in one line what was left out."""
    build_cpu(build / "cpu", lib)
    nvcc, searched = wanted_nvcc()
    if nvcc is None:
        print(f"tinyloop: no nvcc ({'; '.join(searched)}); building without CUDA", flush=True)
    else:
        build_cuda(build / "cuda", lib, nvcc)


if __name__ == "__main__":
    build_all(ROOT / "build" / "native", ROOT / "tinyloop_py" / "lib")
