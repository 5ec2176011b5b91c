"""Builds the native libraries into tinyloop_py/lib: libtinyloop_cpu.so always, libtinyloop.so where nvcc is found.

`pip install .` does it, and `python build_native.py` alone after a change in cpu/ or cuda/ of an editable install.

Environment variables:

=================== ==================================================================================================
TINYLOOP_CUDA       auto (default: build where nvcc is found), on (no nvcc is an error), off
TINYLOOP_NVCC       path of nvcc; then CUDA_HOME, CUDA_PATH, CONDA_PREFIX or BUILD_PREFIX, PATH, /usr/local/cuda
TINYLOOP_CUDA_ARCHS targets, default 80,89,90a: machine code for each, and PTX of the lowest for newer devices
TINYLOOP_REPORT     1 prints registers and spills of every kernel
TINYLOOP_DEBUG      1 builds the Cython modules with bounds checks
TINYLOOP_CXXFLAGS   more flags for compiling and linking the C++ sources, such as -g -fsanitize=address
CXX, LDFLAGS        the host compiler, also nvcc's, and flags for linking
=================== ==================================================================================================
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "native"
LIB = ROOT / "tinyloop_py" / "lib"
BUILD_INFO = "build.json"  # beside the libraries: what they were built with, for `python -m tinyloop_py`
DEFAULT_ARCHS = "80,89,90a"

# Units compiled once per code path, and the flags of each path (simd.h says what TL_ISA stands for).
KERNEL_UNITS = ("attention", "attention_codes", "kv_codes", "logits", "matmul", "pack", "rows")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx512bf16", "-mprefer-vector-width=512")
X86_PATHS = {"generic": (1, ()), "avx2": (2, AVX2), "avx512": (3, AVX512)}

# Contraction is off, so that a fused multiply-add is one that the source asks for; GCC 12 warns about its own intrinsics.
# CXXFLAGS is not read: an -march or -ffast-math in it would change results, or run on no other machine.
CXX_FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread",
    "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
EXPORTS = "{ global: tl_*; local: *; };\n"  # a version script: nothing but the contract is visible


class BuildError(Exception):
    """The build cannot go on; the text says what to do."""


def is_on(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a variable that is 1 or 0 is set to anything but 0."""
    return environ.get(name, "0") not in ("", "0")


@contextlib.contextmanager
def same_files_keep_their_time(folder: Path) -> Iterator[None]:
    """C that Cython makes again and is the same is not compiled again: in pip's fresh environments Cython's own files are always newer."""
    before = {path: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).digest()) for path in folder.rglob("*.c")}
    yield
    for path, (time_ns, digest) in before.items():
        if path.exists() and hashlib.sha256(path.read_bytes()).digest() == digest:
            os.utime(path, ns=(time_ns, time_ns))


# ---- finding compilers


def host_compiler(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The C++ compiler as an argument list: CXX, else c++ or g++ on the PATH."""
    if environ.get("CXX"):
        return shlex.split(environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name, path=environ.get("PATH")):
            return [name]
    raise BuildError("no C++ compiler found: install g++ or set CXX")


def target_machine(compiler: Sequence[str]) -> str:
    """The processor that a compiler makes code for, such as "x86_64" or "aarch64"; a cross compiler's is not this machine's."""
    try:
        done = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"the C++ compiler {shlex.join(compiler)} does not run: {error}") from None
    return done.stdout.strip().split("-")[0] or platform.machine()


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


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
        if _is_program(path):
            return path, searched
        if required:
            raise BuildError(f"{name} is set to {value}, and {path} is no nvcc; correct it, unset it, or set TINYLOOP_CUDA=off")
    searched.append("PATH")
    if found := shutil.which("nvcc", path=environ.get("PATH", os.defpath)):
        return Path(found), searched
    default = Path("/usr/local/cuda/bin/nvcc")
    searched.append(str(default))
    return (default if _is_program(default) else None), searched


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
        number = arch[:-1] if arch[-1] in "af" else arch
        if not number.isascii() or not number.isdecimal() or int(number) < 80:
            raise BuildError(f"TINYLOOP_CUDA_ARCHS has {arch!r}, expected numbers from 80 on, such as {DEFAULT_ARCHS}")
    if not archs:
        raise BuildError(f"TINYLOOP_CUDA_ARCHS names no target, expected numbers such as {DEFAULT_ARCHS}")
    return sorted(set(archs), key=lambda a: (int(a.rstrip("af")), a))


def check_archs(nvcc: Path, archs: Sequence[str]) -> None:
    """A BuildError where nvcc does not run, or lacks one of the targets."""
    done = _capture([str(nvcc), "--list-gpu-arch"], "set TINYLOOP_NVCC to one that does, or TINYLOOP_CUDA=off to build without CUDA")
    known = {line.strip().removeprefix("compute_") for line in done.splitlines()}
    if missing := [a for a in archs if a.rstrip("af") not in known]:
        version = next((line for line in _capture([str(nvcc), "--version"], "").splitlines() if "release" in line), "this version")
        raise BuildError(
            f"{nvcc} ({version}) has no target {', '.join(missing)}: take a newer CUDA toolkit, set TINYLOOP_CUDA_ARCHS, "
            f"or TINYLOOP_CUDA=off to build without CUDA"
        )


# ---- commands


def cpu_units(source: Path, build: Path, machine: str) -> list[tuple[Path, Path, list[str]]]:
    """(source, object, flags) of every unit of libtinyloop_cpu.so on a machine such as "x86_64"."""
    paths = X86_PATHS if machine in ("x86_64", "AMD64") else {"generic": (1, ())}
    units: list[tuple[Path, Path, list[str]]] = []
    for file in sorted(source.glob("*.cpp")):
        if file.stem not in KERNEL_UNITS:
            units.append((file, build / f"{file.stem}.o", []))
            continue
        for name, (isa, flags) in paths.items():
            units.append((file, build / f"{file.stem}_{name}.o", [*flags, f"-DTL_ISA={isa}"]))
    return units


def toolkit_folders(nvcc: Path, kind: str, environ: Mapping[str, str] = os.environ, machine: str | None = None) -> list[Path]:
    """Folders of a kind ("include" or "lib") that conda keeps apart from nvcc, under targets/<arch>; those that exist.

    They lie in the prefix of nvcc, and in conda-build in PREFIX.
    """
    arch = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}.get(machine or platform.machine(), "")
    prefixes = [nvcc.parent.parent, *([Path(environ["PREFIX"])] if environ.get("CONDA_BUILD") and environ.get("PREFIX") else [])]
    return [folder for prefix in prefixes if (folder := prefix / "targets" / arch / kind).is_dir()]


def nvcc_command(nvcc: Path, compiler: Sequence[str], archs: Sequence[str], environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> list[str]:
    """nvcc with the flags that every .cu file is compiled with."""
    launchers = [i for i, word in enumerate(compiler) if Path(word).name in ("ccache", "sccache")]
    host, *more = compiler[launchers[-1] + 1 :] if launchers else compiler
    command = [str(nvcc), "-O3", "-std=c++17", "-fmad=false", "-lineinfo", "-ccbin", host]
    command += ["-Xcompiler", ",".join(("-fPIC", "-fvisibility=hidden", *more))]
    command += ["--threads", "1", f"-I{root / 'include'}", f"-I{root / 'cuda'}"]
    for arch in archs:
        command.append(f"-gencode=arch=compute_{arch},code=sm_{arch}")
    lowest = archs[0].rstrip("af")  # PTX of an "a" target would run on no newer device
    command.append(f"-gencode=arch=compute_{lowest},code=compute_{lowest}")
    command += [f"-I{folder}" for folder in toolkit_folders(nvcc, "include", environ)]
    if is_on("TINYLOOP_REPORT", environ):
        command += ["-Xptxas", "-v"]
    return command


def _capture(command: Sequence[str], advice: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run ({error}): {advice}") from None
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} fails ({(done.stderr or done.stdout).strip()}): {advice}")
    return done.stdout


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from None
    if done.stdout or done.stderr:
        print(done.stdout + done.stderr, end="", flush=True)
    if done.returncode:
        raise BuildError(f"this command failed: {shlex.join(command)}")


@dataclass(frozen=True)
class Job:
    """One object file: the command that makes it, less its output, and the files it depends on."""

    command: tuple[str, ...]
    target: Path
    sources: tuple[Path, ...]

    @property
    def record(self) -> Path:
        """File that holds the command which made the target; written last, so a broken build leaves none."""
        return self.target.with_suffix(".command")

    def is_stale(self) -> bool:
        """Whether the target is missing, older than a source or header, or made by another command."""
        try:
            made = self.target.stat().st_mtime_ns
            return self.record.read_text() != shlex.join(self.command) or any(s.stat().st_mtime_ns > made for s in self.sources)
        except OSError:
            return True

    def run(self) -> None:
        self.record.unlink(missing_ok=True)
        _run([*self.command, "-o", str(self.target)])
        self.record.write_text(shlex.join(self.command))


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_all(jobs: Iterable[Job]) -> None:
    """Runs the stale jobs, as many at a time as there are cores."""
    with ThreadPoolExecutor(n_cores()) as pool:
        list(pool.map(Job.run, [job for job in jobs if job.is_stale()]))


def link(command: Sequence[str], build: Path, library: Path, visible: str = EXPORTS) -> Path:
    """Links into a new file that then takes the library's place, so that a process which has it loaded goes on."""
    exports = build / "exports.map"
    exports.write_text(visible)
    new = library.with_name(library.name + ".new")
    _run([*command, "-Xlinker", f"--version-script={exports}", "-o", str(new)])
    new.replace(library)
    return library


# ---- libraries


def build_cpu(build: Path = BUILD, lib: Path = LIB, environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> Path:
    """Compiles and links libtinyloop_cpu.so."""
    compiler = host_compiler(environ)
    more = shlex.split(environ.get("TINYLOOP_CXXFLAGS", ""))
    build.mkdir(parents=True, exist_ok=True)
    lib.mkdir(parents=True, exist_ok=True)
    base = [*compiler, *CXX_FLAGS, *more, f"-I{root / 'include'}", f"-I{root / 'cpu'}"]
    headers = (*root.glob("cpu/*.h"), *root.glob("include/*.h"))
    units = cpu_units(root / "cpu", build, target_machine(compiler))
    compile_all(Job((*base, *flags, "-c", str(source)), target, (source, *headers)) for source, target, flags in units)
    objects = [str(target) for _, target, _ in units]
    defined = [] if any(flag.startswith("-fsanitize") for flag in more) else ["-Wl,--no-undefined"]  # a sanitizer's runtime comes from outside
    command = [*compiler, "-shared", "-pthread", *defined, *more, *objects, *shlex.split(environ.get("LDFLAGS", ""))]
    return link(command, build, lib / "libtinyloop_cpu.so")


def build_cuda(nvcc: Path, build: Path = BUILD, lib: Path = LIB, environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> Path | None:
    """Compiles and links libtinyloop.so, CUDA's runtime inside; None where there are no kernels."""
    sources = sorted((root / "cuda").glob("*.cu"))
    if not sources:
        return None
    archs = cuda_archs(environ)
    check_archs(nvcc, archs)
    build.mkdir(parents=True, exist_ok=True)
    lib.mkdir(parents=True, exist_ok=True)
    base = nvcc_command(nvcc, host_compiler(environ), archs, environ, root)
    headers = (*root.glob("cuda/*.h"), *root.glob("cuda/*.cuh"), *root.glob("include/*.h"))
    jobs = [Job((*base, "-c", str(source)), build / f"{source.stem}.cu.o", (source, *headers)) for source in sources]
    compile_all(jobs)
    folders = [f"-L{folder}" for folder in toolkit_folders(nvcc, "lib", environ)]
    return link([*base, "-shared", "-cudart", "static", *folders, *(str(job.target) for job in jobs)], build, lib / "libtinyloop.so")


def build_all(build: Path = BUILD, lib: Path = LIB, environ: Mapping[str, str] = os.environ, root: Path = ROOT) -> None:
    """Builds what this machine can, says in one line what was left out, and writes down what was found."""
    nvcc, searched = wanted_nvcc(environ)
    build_cpu(build, lib, environ, root)
    library = None
    if nvcc is None:
        print(f"tinyloop: no nvcc ({'; '.join(searched)}); building without CUDA", flush=True)
    else:
        library = build_cuda(nvcc, build, lib, environ, root)
        if library is None:
            print("tinyloop: cuda/ holds no kernels; building without CUDA", flush=True)
    if library is None:
        (lib / "libtinyloop.so").unlink(missing_ok=True)  # an earlier build's
    write_info(lib, nvcc, searched, library is not None, environ)


def write_info(lib: Path, nvcc: Path | None, searched: Sequence[str], has_cuda: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Writes build.json: compilers, the search for nvcc, targets, and whether the Cython modules check bounds."""
    compiler = host_compiler(environ)
    info = {
        "debug": is_on("TINYLOOP_DEBUG", environ),
        "compiler": _first_line([*compiler, "--version"]),
        "machine": target_machine(compiler),
        "nvcc_searched": list(searched),
        "nvcc": None if nvcc is None else str(nvcc),
        "nvcc_version": None if nvcc is None else _first_line([str(nvcc), "--version"], "release"),
        "cuda_archs": cuda_archs(environ) if has_cuda else [],
    }
    (lib / BUILD_INFO).write_text(json.dumps(info, indent=1) + "\n")


def _first_line(command: Sequence[str], word: str = "") -> str | None:
    """The first line of a program's output that has a word in it, or None."""
    try:
        out = subprocess.run(command, capture_output=True, text=True).stdout
    except OSError:
        return None
    return next((line.strip() for line in out.splitlines() if word in line and line.strip()), None)


if __name__ == "__main__":
    try:
        build_all()
    except BuildError as error:
        sys.exit(f"tinyloop: {error}")
