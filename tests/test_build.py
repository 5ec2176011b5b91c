"""build_native.py: the search for nvcc, its commands, what is built anew, and what the objects may contain."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("build_native", ROOT / "build_native.py")
build_native = importlib.util.module_from_spec(_spec)
sys.modules["build_native"] = build_native
_spec.loader.exec_module(build_native)
BuildError = build_native.BuildError

# An nvcc that knows sm_80 to sm_90, writes down its arguments, and compiles .cu files as C++.
FAKE_NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release 12.4, V12.4.99"; exit 0;;
  --list-gpu-arch) printf 'compute_80\\ncompute_89\\ncompute_90\\n'; exit 0;;
esac
echo "$@" >> "$(dirname "$0")/calls.txt"
for a in "$@"; do
  case "$a" in
    *.cu) source=$a;;
    *.so.new | *.o) target=$a;;
  esac
done
if [ -n "$source" ]; then exec c++ -x c++ -fPIC -c "$source" -o "$target"; fi
exec c++ -shared -o "$target" -Wl,--version-script="$(dirname "$target")/../build/exports.map" "$(dirname "$target")"/../build/*.cu.o
"""


def fake_nvcc(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(FAKE_NVCC)
    nvcc.chmod(0o755)
    return nvcc


@pytest.fixture
def tree(tmp_path):
    """A source tree of one C++ file, one header and no kernels."""
    for folder in ("cpu", "cuda", "include"):
        (tmp_path / folder).mkdir()
    (tmp_path / "include" / "tinyloop.h").write_text("#define VERSION 1\n")
    (tmp_path / "cpu" / "api.cpp").write_text(
        '#include "tinyloop.h"\nextern "C" __attribute__((visibility("default"))) int tl_version() { return VERSION; }\n'
    )
    return tmp_path


def environ(**variables: object) -> dict[str, str]:
    """The variables that a build sees: a PATH with compilers and no nvcc, and these."""
    return {"PATH": "/usr/bin:/bin", **{name: str(value) for name, value in variables.items()}}


def build(tree: Path, env: dict[str, str]) -> None:
    build_native.build_all(tree / "build", tree / "lib", env, tree)


def exported(library: Path) -> set[str]:
    out = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in out.splitlines()}


# ---- the search


def test_nvcc_is_searched_in_the_documented_order(tmp_path):
    names = ("own", "home", "path", "conda", "build")
    nvcc = {name: fake_nvcc(tmp_path / name / "bin") for name in names}
    env = environ(
        TINYLOOP_NVCC=nvcc["own"],
        CUDA_HOME=tmp_path / "home",
        CUDA_PATH=tmp_path / "path",
        CONDA_PREFIX=tmp_path / "conda",
        BUILD_PREFIX=tmp_path / "build",
    )
    fake_nvcc(tmp_path / "on_path")
    env["PATH"] = f"{tmp_path / 'on_path'}:/usr/bin:/bin"
    for name, variable in zip(names, ("TINYLOOP_NVCC", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "BUILD_PREFIX"), strict=True):
        found, searched = build_native.find_nvcc(env)
        assert found == nvcc[name] and searched[-1].startswith(variable)
        del env[variable]
    assert build_native.find_nvcc(env)[0] == tmp_path / "on_path" / "nvcc"


def test_the_default_place_comes_last():
    found, searched = build_native.find_nvcc(environ(PATH="/nowhere"))
    assert searched == ["PATH", "/usr/local/cuda/bin/nvcc"]
    assert found in (None, Path("/usr/local/cuda/bin/nvcc"))


@pytest.mark.parametrize("variable", ["TINYLOOP_NVCC", "CUDA_HOME", "CUDA_PATH"])
def test_a_set_variable_without_nvcc_is_an_error(tmp_path, variable):
    with pytest.raises(BuildError, match=rf"^{variable} is set to .*nvcc.*TINYLOOP_CUDA=off"):
        build_native.wanted_nvcc(environ(**{variable: tmp_path}))
    assert build_native.wanted_nvcc(environ(**{variable: tmp_path}, TINYLOOP_CUDA="off")) == (None, ["TINYLOOP_CUDA=off"])


def test_a_file_that_cannot_run_is_no_nvcc(tmp_path):
    fake_nvcc(tmp_path).chmod(0o644)
    with pytest.raises(BuildError, match=r"is no nvcc"):
        build_native.find_nvcc(environ(TINYLOOP_NVCC=tmp_path / "nvcc"))


def test_a_conda_prefix_without_nvcc_is_passed_over(tmp_path):
    nvcc = fake_nvcc(tmp_path / "on_path")
    assert build_native.find_nvcc(environ(CONDA_PREFIX=tmp_path / "conda", PATH=nvcc.parent))[0] == nvcc


def test_modes_of_tinyloop_cuda(tmp_path):
    nvcc = fake_nvcc(tmp_path)
    for mode in ("auto", "on", "AUTO", ""):
        assert build_native.wanted_nvcc(environ(TINYLOOP_NVCC=nvcc, TINYLOOP_CUDA=mode))[0] == nvcc
    with pytest.raises(BuildError, match=r"TINYLOOP_CUDA is 'yes', expected auto, on or off"):
        build_native.wanted_nvcc(environ(TINYLOOP_CUDA="yes"))


@pytest.mark.skipif(Path("/usr/local/cuda/bin/nvcc").exists(), reason="nvcc is in its default place here")
def test_on_without_nvcc_is_an_error_that_lists_the_places(tmp_path):
    with pytest.raises(BuildError, match=r"TINYLOOP_CUDA=on, and no nvcc was found in CONDA_PREFIX: .*; PATH; /usr/local/cuda"):
        build_native.wanted_nvcc(environ(TINYLOOP_CUDA="on", CONDA_PREFIX=tmp_path))


def test_targets():
    assert build_native.cuda_archs(environ()) == ["80", "89", "90a"]
    assert build_native.cuda_archs(environ(TINYLOOP_CUDA_ARCHS="90a; 80,80")) == ["80", "90a"]
    assert build_native.cuda_archs(environ(TINYLOOP_CUDA_ARCHS="100f,120")) == ["100f", "120"]
    for bad in ("sm_80", "75", "8.0", "90aa", "a", ","):
        with pytest.raises(BuildError, match=r"^TINYLOOP_CUDA_ARCHS"):
            build_native.cuda_archs(environ(TINYLOOP_CUDA_ARCHS=bad))


def test_a_target_that_nvcc_lacks_is_an_error_that_names_it(tmp_path):
    nvcc = fake_nvcc(tmp_path)
    build_native.check_archs(nvcc, ["80", "90a"])
    with pytest.raises(BuildError, match=r"release 12.4.* has no target 100, 120f: .*TINYLOOP_CUDA_ARCHS.*TINYLOOP_CUDA=off"):
        build_native.check_archs(nvcc, ["80", "100", "120f"])


def test_an_nvcc_that_fails_is_an_error_that_says_how_to_go_on(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho no licence >&2\nexit 3\n")
    nvcc.chmod(0o755)
    with pytest.raises(BuildError, match=r"no licence.*TINYLOOP_CUDA=off"):
        build_native.check_archs(nvcc, ["80"])


# ---- commands


def test_nvcc_gets_every_target_and_the_ptx_of_the_lowest(tmp_path):
    command = build_native.nvcc_command(tmp_path / "nvcc", ["g++"], ["80", "90a"], environ())
    assert [a for a in command if a.startswith("-gencode")] == [
        "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_80,code=compute_80"
    ]  # fmt: skip
    only = build_native.nvcc_command(tmp_path / "nvcc", ["g++"], ["90a"], environ())
    assert "-gencode=arch=compute_90,code=compute_90" in only  # PTX of 90a would run on no newer device
    assert "-fmad=false" in command  # contraction would change results
    assert "-Xptxas" not in command


def test_nvcc_takes_the_host_compiler(tmp_path):
    def host(compiler):
        command = build_native.nvcc_command(tmp_path / "nvcc", compiler, ["80"], environ())
        return command[command.index("-ccbin") + 1], command[command.index("-Xcompiler") + 1].split(",")[2:]

    assert host(["/opt/g++-12"]) == ("/opt/g++-12", [])
    assert host(["ccache", "g++", "-B/opt"]) == ("g++", ["-B/opt"])


def test_report_asks_for_registers_and_spills(tmp_path):
    command = build_native.nvcc_command(tmp_path / "nvcc", ["g++"], ["80"], environ(TINYLOOP_REPORT=1))
    assert command[-2:] == ["-Xptxas", "-v"]
    assert "-Xptxas" not in build_native.nvcc_command(tmp_path / "nvcc", ["g++"], ["80"], environ(TINYLOOP_REPORT=0))


def test_conda_headers_are_those_beside_the_nvcc_that_was_found(tmp_path):
    for kind in ("include", "lib"):
        for arch in ("x86_64-linux", "sbsa-linux"):
            (tmp_path / "targets" / arch / kind).mkdir(parents=True)
    for machine, arch in (("x86_64", "x86_64-linux"), ("aarch64", "sbsa-linux")):
        assert build_native.toolkit_folders(tmp_path / "bin" / "nvcc", "include", environ(), machine) == [tmp_path / "targets" / arch / "include"]
    elsewhere = tmp_path / "other" / "bin" / "nvcc"
    assert build_native.toolkit_folders(elsewhere, "lib", environ(CONDA_PREFIX=tmp_path), "x86_64") == []
    conda_build = environ(CONDA_BUILD=1, PREFIX=tmp_path)  # nvcc in BUILD_PREFIX, the runtime in PREFIX
    assert build_native.toolkit_folders(elsewhere, "lib", conda_build, "x86_64") == [tmp_path / "targets" / "x86_64-linux" / "lib"]


def test_code_paths_are_those_of_the_target_machine(tmp_path):
    def objects(machine):
        return {target.name for _, target, _ in build_native.cpu_units(ROOT / "cpu", tmp_path, machine)}

    assert {"matmul_generic.o", "matmul_avx2.o", "matmul_avx512.o", "api.o"} < objects("x86_64")
    assert {o for o in objects("aarch64") if "avx" in o} == set() and "matmul_generic.o" in objects("aarch64")


def test_no_compiler_is_an_error_that_says_what_to_install():
    with pytest.raises(BuildError, match="install g"):
        build_native.host_compiler(environ(PATH="/nowhere"))
    with pytest.raises(BuildError, match="/nowhere/cxx does not run"):
        build_native.target_machine(["/nowhere/cxx"])


# ---- building


def test_a_build_without_nvcc_prints_one_line(tree, capfd):
    build(tree, environ(TINYLOOP_CUDA="off"))
    out, err = capfd.readouterr()
    assert (out, err) == ("tinyloop: no nvcc (TINYLOOP_CUDA=off); building without CUDA\n", "")
    assert exported(tree / "lib" / "libtinyloop_cpu.so") == {"tl_version"}
    assert sorted(p.name for p in (tree / "lib").iterdir()) == ["build.json", "libtinyloop_cpu.so"]


def test_only_what_changed_is_built_anew(tree):
    env = environ(TINYLOOP_CUDA="off")
    (tree / "cpu" / "other.cpp").write_text("int other() { return 1; }\n")

    def built(**more):
        before = {p: p.stat().st_mtime_ns for p in (tree / "build").glob("*.o")}
        build(tree, {**env, **more})
        return sorted(p.name for p in (tree / "build").glob("*.o") if before.get(p) != p.stat().st_mtime_ns)

    def touch(path):  # later than any object: file systems keep time in steps
        later = max(p.stat().st_mtime_ns for p in (tree / "build").glob("*.o")) + 10_000_000
        os.utime(path, ns=(later, later))

    assert built() == ["api.o", "other.o"]
    assert built() == []
    touch(tree / "cpu" / "other.cpp")
    assert built() == ["other.o"]
    touch(tree / "include" / "tinyloop.h")
    assert built() == ["api.o", "other.o"]
    assert built(TINYLOOP_CXXFLAGS="-g") == ["api.o", "other.o"]
    assert built(TINYLOOP_CXXFLAGS="-g") == []


def test_c_that_is_made_again_keeps_its_time_where_it_is_the_same(tmp_path):
    same, other, gone, new = (tmp_path / "package" / f"{name}.c" for name in ("same", "other", "gone", "new"))
    same.parent.mkdir()
    for path in (same, other, gone):
        path.write_text("old")
        os.utime(path, ns=(1_000_000_000, 1_000_000_000))
    with build_native.same_files_keep_their_time(tmp_path):
        same.write_text("old")
        other.write_text("new")
        new.write_text("new")
        gone.unlink()
    assert same.stat().st_mtime_ns == 1_000_000_000
    assert min(path.stat().st_mtime_ns for path in (other, new)) > 1_000_000_000


def test_a_build_that_failed_is_taken_up_again(tree, capfd):
    env = environ(TINYLOOP_CUDA="off")
    build(tree, env)
    good = (tree / "cpu" / "api.cpp").read_text()
    (tree / "cpu" / "api.cpp").write_text("int broken(\n")
    os.utime(tree / "cpu" / "api.cpp", ns=(2**62, 2**62))
    with pytest.raises(BuildError, match=r"^this command failed: c\+\+ .*api\.cpp"):
        build(tree, env)
    assert "error:" in capfd.readouterr().out
    (tree / "cpu" / "api.cpp").write_text(good)
    os.utime(tree / "cpu" / "api.cpp", ns=(0, 0))  # older than the object that was not made
    build(tree, env)
    assert exported(tree / "lib" / "libtinyloop_cpu.so") == {"tl_version"}


def test_relinking_leaves_a_loaded_library_whole(tree):
    env = environ(TINYLOOP_CUDA="off")
    build(tree, env)
    first = (tree / "lib" / "libtinyloop_cpu.so").stat().st_ino
    held = os.open(tree / "lib" / "libtinyloop_cpu.so", os.O_RDONLY)
    before = os.pread(held, 1 << 20, 0)
    (tree / "cpu" / "api.cpp").write_text('extern "C" __attribute__((visibility("default"))) int tl_other() { return 0; }\n')
    os.utime(tree / "cpu" / "api.cpp", ns=(2**62, 2**62))
    build(tree, env)
    assert os.pread(held, 1 << 20, 0) == before
    assert (tree / "lib" / "libtinyloop_cpu.so").stat().st_ino != first
    os.close(held)


def test_ldflags_reach_the_link(tree):
    build(tree, environ(TINYLOOP_CUDA="off", LDFLAGS=f"-Wl,-rpath,{tree}/conda/lib"))
    dynamic = subprocess.run(["readelf", "-d", tree / "lib" / "libtinyloop_cpu.so"], capture_output=True, text=True, check=True).stdout
    assert f"{tree}/conda/lib" in dynamic


# ---- CUDA

KERNEL = """
extern "C" __attribute__((visibility("default"))) int tl_version() { return 1; }
int not_in_the_contract() { return 2; }
"""


def test_kernels_are_built_with_the_nvcc_that_was_found(tree, capfd):
    nvcc = fake_nvcc(tree / "conda" / "bin")
    (tree / "conda" / "targets" / "x86_64-linux" / "include").mkdir(parents=True)
    (tree / "conda" / "targets" / "sbsa-linux" / "include").mkdir(parents=True)
    (tree / "cuda" / "one.cu").write_text(KERNEL)
    (tree / "cuda" / "two.cu").write_text("int two() { return 2; }\n")
    env = environ(CONDA_PREFIX=tree / "conda", TINYLOOP_CUDA_ARCHS="80,90a")
    build(tree, env)
    assert capfd.readouterr().out == ""
    assert exported(tree / "lib" / "libtinyloop.so") == {"tl_version"}
    calls = (nvcc.parent / "calls.txt").read_text().splitlines()
    assert len(calls) == 3 and sum("one.cu " in c for c in calls) == 1 and "-cudart static" in calls[2]
    assert all(f"-I{tree / 'conda' / 'targets'}" in c and f"-I{tree / 'include'}" in c for c in calls)
    build(tree, env)
    assert len((nvcc.parent / "calls.txt").read_text().splitlines()) == 4  # the link alone
    header = tree / "cuda" / "tile.cuh"
    header.write_text("\n")
    os.utime(header, ns=(2**62, 2**62))
    build(tree, env)
    assert len((nvcc.parent / "calls.txt").read_text().splitlines()) == 7


def test_a_library_of_an_earlier_build_goes_when_cuda_is_off(tree):
    fake_nvcc(tree / "bin")
    (tree / "cuda" / "one.cu").write_text(KERNEL)
    build(tree, environ(TINYLOOP_NVCC=tree / "bin" / "nvcc"))
    assert (tree / "lib" / "libtinyloop.so").exists()
    build(tree, environ(TINYLOOP_CUDA="off"))
    assert not (tree / "lib" / "libtinyloop.so").exists()


def test_no_kernels_is_said(tree, capfd):
    fake_nvcc(tree / "bin")
    build(tree, environ(TINYLOOP_NVCC=tree / "bin" / "nvcc"))
    assert capfd.readouterr().out == "tinyloop: cuda/ holds no kernels; building without CUDA\n"


def test_a_build_writes_down_what_it_found(tree):
    import json

    nvcc = fake_nvcc(tree / "bin")
    (tree / "cuda" / "one.cu").write_text(KERNEL)
    build(tree, environ(TINYLOOP_NVCC=nvcc, TINYLOOP_CUDA_ARCHS="80"))
    info = json.loads((tree / "lib" / "build.json").read_text())
    assert info["nvcc"] == str(nvcc) and "12.4" in info["nvcc_version"] and info["cuda_archs"] == ["80"]
    assert info["nvcc_searched"] == [f"TINYLOOP_NVCC: {nvcc}"] and info["compiler"] and info["debug"] is False


def test_a_real_nvcc_compiles_and_reports(tree, capfd):
    try:
        nvcc, _ = build_native.find_nvcc()
    except BuildError as error:
        pytest.skip(str(error))
    if nvcc is None:
        pytest.skip("no nvcc on this machine")
    (tree / "cuda" / "scale.cu").write_text(
        "__global__ void scale(float *x) { x[threadIdx.x] *= 2.0f; }\n"
        'extern "C" __attribute__((visibility("default"))) int tl_scale(float *x) { scale<<<1, 32>>>(x); return (int)cudaGetLastError(); }\n'
    )
    env = {**os.environ, "TINYLOOP_NVCC": str(nvcc), "TINYLOOP_CUDA_ARCHS": "80,90a", "TINYLOOP_REPORT": "1"}
    build(tree, env)
    assert re.search(r"Used \d+ registers", capfd.readouterr().out)
    assert exported(tree / "lib" / "libtinyloop.so") == {"tl_scale"}
    needed = subprocess.run(["readelf", "-d", tree / "lib" / "libtinyloop.so"], capture_output=True, text=True, check=True).stdout
    assert "libcudart" not in needed  # its runtime is inside


# ---- what the objects contain


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Folder with the objects of libtinyloop_cpu.so: those of the last build here, else of a new one."""
    folder = build_native.BUILD
    if not (folder / "matmul_avx512.o").exists() or not os.access(folder, os.W_OK):
        folder = tmp_path_factory.mktemp("objects")
    build_native.build_cpu(folder, tmp_path_factory.mktemp("lib"))  # compiles what is stale
    return folder


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 code paths")
def test_no_code_path_leaks_into_another(objects):
    """Wide registers stand in the functions of their own code path alone: elsewhere they would fault on a lesser processor."""
    for unit in sorted(objects.glob("*.o")):
        if unit.name.endswith(".cu.o"):
            continue
        code = subprocess.run(["objdump", "-d", "--no-show-raw-insn", unit], capture_output=True, text=True, check=True).stdout
        zmm, ymm = "%zmm" in code or "%k1" in code, "%ymm" in code
        vex = bool(re.search(r"^\s+[0-9a-f]+:\s+v[a-z]", code, re.M))
        if unit.stem.endswith("_avx512"):
            continue
        assert not zmm, f"{unit.name} has AVX-512 code"
        assert unit.stem.endswith("_avx2") or not (ymm or vex), f"{unit.name} has AVX code"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 code paths")
def test_units_of_a_code_path_define_nothing_that_the_linker_may_share(objects):
    """A weak or unique symbol made with wide instructions could be the one picked for the whole library; an initialiser would run at load."""
    units = [u for u in objects.glob("*.o") if u.stem.rsplit("_", 1)[-1] in build_native.X86_PATHS]
    assert len(units) == 3 * len(build_native.KERNEL_UNITS)
    for unit in units:
        symbols = subprocess.run(["nm", unit], capture_output=True, text=True, check=True).stdout.splitlines()
        assert not [s for s in symbols if s.split()[-2] in "WVuw"], unit.name
        assert not [s for s in symbols if "_GLOBAL__sub_I" in s], unit.name
        sections = subprocess.run(["readelf", "-SW", unit], capture_output=True, text=True, check=True).stdout
        assert ".init_array" not in sections and ".ctors" not in sections and " COMDAT" not in sections, unit.name


# ---- aarch64

SMOKE = r"""
#include <stdio.h>
#include <string.h>
#include "tinyloop.h"
int main() {
  tl_context_desc desc = {sizeof(tl_context_desc), 2, TL_ISA_BEST, 0};
  tl_context *c;
  if (tl_context_create(&desc, &c)) return 1;
  tl_context_info info = {};
  info.size = sizeof info;
  if (tl_context_get_info(c, &info) || strcmp(info.name, "cpu generic")) return 2;
  static float x[48], w[48], y[48];
  for (int i = 0; i < 48; i++) x[i] = (float)(i - 20), w[i] = 1.0f;
  if (tl_op_rms_norm(c, 1, 48, 1e-6f, x, w, y, nullptr)) return 3;
  double squares = 0;
  for (int i = 0; i < 48; i++) squares += (double)y[i] * y[i];
  if (squares < 47.999 || squares > 48.001) return 4;
  alignas(64) static float packed[16 * 48];
  static float out[16], source[16 * 48];
  for (int i = 0; i < 16 * 48; i++) source[i] = (float)(i % 7);
  tl_matrix m = {sizeof(tl_matrix), TL_F32, 16, 48, 0, packed};
  tl_pack_rows rows = {sizeof(tl_pack_rows), 16, 16, 16, 0, source, nullptr};
  if (tl_matrix_pack(c, &m, &rows, nullptr)) return 5;
  tl_matmul_args args = {sizeof(tl_matmul_args), 1, m, nullptr, x, out};
  if (tl_op_matmul(c, &args, nullptr)) return 6;
  for (int r = 0; r < 16; r++) {
    float want = 0;
    for (int k = 0; k < 48; k++) want += source[r * 48 + k] * x[k];
    if (out[r] != want) return 7;
  }
  if (tl_context_destroy(c)) return 8;
  puts("ok");
}
"""


@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-g++"), reason="no aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)")
def test_the_library_compiles_for_aarch64_and_computes(tmp_path):
    env = {**environ(), "CXX": "aarch64-linux-gnu-g++"}
    library = build_native.build_cpu(tmp_path / "build", tmp_path / "lib", env)
    header = subprocess.run(["readelf", "-h", library], capture_output=True, text=True, check=True).stdout
    assert "AArch64" in header
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not qemu:
        pytest.skip("compiled; no qemu-aarch64 to run it (Debian: qemu-user)")
    (tmp_path / "smoke.cpp").write_text(SMOKE)
    subprocess.run(
        [
            "aarch64-linux-gnu-g++",
            "-std=c++17",
            f"-I{ROOT / 'include'}",
            tmp_path / "smoke.cpp",
            library,
            "-o",
            tmp_path / "smoke",
            f"-Wl,-rpath,{library.parent}",
        ],
        check=True,
    )
    done = subprocess.run([qemu, "-L", "/usr/aarch64-linux-gnu", tmp_path / "smoke"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
