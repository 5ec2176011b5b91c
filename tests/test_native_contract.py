"""The native libraries against include/tinyloop.h: what they export, what they refuse, and what each single operation computes."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import threading
from ctypes import byref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract import CONSTANTS, FUNCTIONS, ROOT, STRUCTS, load, struct
from sampling_reference import sample

from tinyloop_py.library import EXPORTS, Library
from tinyloop_py.native import library_path

CPU = library_path("cpu")
BUILT = [path for path in (CPU, library_path("cuda")) if path.is_file()]
C = CONSTANTS
DTYPES = {"f32": C["TL_F32"], "bf16": C["TL_BF16"], "f16": C["TL_F16"], "int8": C["TL_INT8"]}
PATHS = {"avx512": C["TL_ISA_AVX512"], "avx2": C["TL_ISA_AVX2"], "generic": C["TL_ISA_GENERIC"]}
WIDTHS = (1, 2, 3, 37, 63, 64, 65, 255, 256, 257, 300, 513)  # around lanes, int8 groups and chunks of the inner dimension


@pytest.fixture(scope="module")
def lib() -> ctypes.CDLL:
    return load(CPU)


def compile_and_run(tmp_path: Path, source: str) -> str:
    """Standard output of a C program that includes tinyloop.h."""
    (tmp_path / "program.c").write_text('#include <stddef.h>\n#include <stdio.h>\n#include "tinyloop.h"\n' + source)
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    subprocess.run(
        [compiler, "-Wall", "-Werror", "-pedantic", "-std=c11", f"-I{ROOT / 'include'}", "program.c", "-o", "program"], cwd=tmp_path, check=True
    )
    return subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True).stdout


# ---- names, layouts, version


@pytest.mark.parametrize("path", BUILT, ids=lambda p: p.name)
def test_a_library_exports_the_contract_and_nothing_else(path):
    out = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1] for line in out.splitlines()} == set(FUNCTIONS)


def test_the_table_of_pointers_is_complete_typed_and_in_order():
    text = (ROOT / "tinyloop_py" / "abi.pxd").read_text().split("cdef struct tl_functions:")[1]
    table = re.findall(r"^ {4}(.+?)\(\*(\w+)\)\((.*)\) noexcept nogil$", text, re.M)
    assert tuple(name for _, name, _ in table) == EXPORTS
    assert {f"tl_{name}" for name in EXPORTS} == set(FUNCTIONS)
    for result, name, arguments in table:
        declared = FUNCTIONS[f"tl_{name}"]
        assert result.strip() == declared.result, name
        assert [a.replace(" ", "") for a in arguments.split(",") if a] == [kind.replace(" ", "") for kind, _ in declared.parameters], name


def test_layouts_are_those_of_the_c_compiler(tmp_path):
    """`contract` reads the header's text: what it makes of it is what C makes of it, in plain C and with no padding surprise."""
    lines, want = [], []
    for name, kind in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        want.append(f"{name} {ctypes.sizeof(kind)}")
        for field, *_ in kind._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            want.append(f"{name}.{field} {getattr(kind, field).offset}")
    assert compile_and_run(tmp_path, "int main(void) {" + "\n".join(lines) + "return 0; }").splitlines() == want


def test_every_struct_begins_with_its_size():
    for name, kind in STRUCTS.items():
        assert kind._fields_[0] == ("size", ctypes.c_uint32), name


def test_cython_declares_every_field_in_order():
    text = (ROOT / "tinyloop_py" / "abi.pxd").read_text()
    for name, kind in STRUCTS.items():
        body = re.search(rf"^ {{4}}struct {name}:\n((?: {{8}}.*\n)+)", text, re.M)
        if body is None:
            continue  # not used by Cython
        names = [re.sub(r"\[.*", "", n).strip(" *").split()[-1].strip("*") for line in body[1].splitlines() for n in line.split(",")]
        assert names == [field for field, *_ in kind._fields_], name


def fake_library(folder: Path, exports: list[str], version: int) -> Path:
    body = "".join(f"int tl_{n}(void) {{ return {version if n == 'abi_version' else 0}; }}\n" for n in exports)
    (folder / "fake.c").write_text(body)
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "fake.c", "-o", "fake.so"], cwd=folder, check=True)
    return folder / "fake.so"


def test_a_library_of_another_version_is_refused(tmp_path):
    path = fake_library(tmp_path, list(EXPORTS), C["TL_ABI_VERSION"] + 1)
    with pytest.raises(
        RuntimeError, match=rf"fake\.so has contract version {C['TL_ABI_VERSION'] + 1}, expected {C['TL_ABI_VERSION']}; reinstall tinyloop"
    ):
        Library(path)


def test_a_library_without_an_export_is_refused(tmp_path):
    path = fake_library(tmp_path, [n for n in EXPORTS if n != "plan_bind"], C["TL_ABI_VERSION"])
    with pytest.raises(RuntimeError, match=r"fake\.so lacks tl_plan_bind: .*reinstall"):
        Library(path)


def test_what_is_no_library_is_refused(tmp_path):
    (tmp_path / "text.so").write_text("no library")
    for path in (tmp_path / "text.so", tmp_path / "absent.so"):
        with pytest.raises(RuntimeError, match=rf"{path.name} does not load"):
            Library(path)


def test_the_version_is_that_of_the_header(lib):
    assert lib.tl_abi_version() == C["TL_ABI_VERSION"]


# ---- handles and memory for the tests below


def aligned(nbytes: int) -> np.ndarray:
    """Zeroed bytes at an address that 64 divides."""
    memory = np.zeros(nbytes + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + nbytes]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values that a float type holds exactly: nearest, ties to even."""
    x = np.asarray(x, np.float32)
    if dtype == "bf16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return x.astype(np.float16).astype(np.float32) if dtype == "f16" else x


def as_stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """The bytes of such values in that type."""
    return x.astype(np.float16) if dtype == "f16" else (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else x


class Cpu:
    """A context of the CPU library, called through ctypes."""

    def __init__(self, lib: ctypes.CDLL, isa: str = "best", threads: int = 1) -> None:
        self.lib, self.handle = lib, ctypes.c_void_p()
        desc = struct("tl_context_desc", n_threads=threads, isa=PATHS.get(isa, C["TL_ISA_BEST"]))
        status = lib.tl_context_create(byref(desc), byref(self.handle))
        if status == C["TL_ERR_UNSUPPORTED"]:
            pytest.skip(f"{isa}: {lib.tl_last_error().decode()}")
        self.check(status)

    def __enter__(self) -> Cpu:
        return self

    def __exit__(self, *error: object) -> None:
        self.check(self.lib.tl_context_destroy(self.handle))

    def check(self, status: int) -> None:
        assert status == C["TL_OK"], self.lib.tl_last_error().decode()

    def pack(self, w: np.ndarray, dtype: str, scales: np.ndarray | None = None, group: int = 0, n_out: int = 0, **places: int) -> Any:
        """A tl_matrix of the rows of w, which are in the dtype's bytes."""
        n_rows, n_in = w.shape
        matrix = struct("tl_matrix", dtype=DTYPES[dtype], n_out=n_out or -(-n_rows // 16) * 16, n_in=n_in, group_size=group)
        nbytes = ctypes.c_uint64()
        self.check(self.lib.tl_matrix_nbytes(self.handle, byref(matrix), byref(nbytes)))
        matrix.kept["data"] = data = aligned(nbytes.value)
        matrix.data = data.ctypes.data
        self.add(matrix, w, scales, **places)
        return matrix

    def add(self, matrix: Any, w: np.ndarray, scales: np.ndarray | None = None, block: int = 0, stride: int = 0, offset: int = 0) -> None:
        w = np.ascontiguousarray(w)
        rows = struct("tl_pack_rows", n_rows=len(w), block=block or len(w), stride=stride or len(w), offset=offset, src=w)
        if scales is not None:
            scales = np.ascontiguousarray(scales, np.float32)
            rows.scales = scales.ctypes.data
        self.check(self.lib.tl_matrix_pack(self.handle, byref(matrix), byref(rows), None))

    def matmul(self, matrix: Any, a: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        a = np.ascontiguousarray(a, np.float32)
        y = np.full((len(a), matrix.n_out), np.nan, np.float32)
        args = struct("tl_matmul_args", n_rows=len(a), weight=matrix, a=a, y=y)
        if bias is not None:
            args.bias = bias.ctypes.data
        self.check(self.lib.tl_op_matmul(self.handle, byref(args), None))
        return y

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        y = np.full_like(x, np.nan)
        self.check(self.lib.tl_op_rms_norm(self.handle, *x.shape, eps, x.ctypes.data, weight.ctypes.data, y.ctypes.data, None))
        return y

    def activation(self, act: str, up: np.ndarray, gate: np.ndarray | None = None) -> np.ndarray:
        y = np.full_like(up, np.nan)
        address = None if gate is None else gate.ctypes.data
        self.check(self.lib.tl_op_activation(self.handle, C[f"TL_ACT_{act}"], len(up), address, up.ctypes.data, y.ctypes.data, None))
        return y

    def sample(self, logits: np.ndarray, **settings: Any) -> int:
        sampling = struct("tl_sampling", **{"top_p": 1.0, "repetition_penalty": 1.0, "temperature": 1.0, **settings})
        work = np.empty(self.lib.tl_op_sample_work_floats(len(logits)), np.float32)
        token = ctypes.c_int32(-1)
        self.check(self.lib.tl_op_sample(self.handle, len(logits), byref(sampling), logits.ctypes.data, work.ctypes.data, byref(token), None))
        return token.value


@pytest.fixture(params=PATHS)
def cpu(lib, request):
    with Cpu(lib, request.param, threads=2) as cpu:
        yield cpu


# ---- what is refused


class Tiny:
    """The smallest plan: an embedding and a head over 21 tokens of 20 values; every valid argument that the exports take."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib, self.cpu = lib, Cpu(lib)
        rng = np.random.default_rng(0)
        self.weights = rng.standard_normal((21, 20)).astype(np.float32)
        self.matrix = self.cpu.pack(self.weights, "f32")
        self.norm = np.ones(20, np.float32)
        self.phases = (STRUCTS["tl_phase"] * 2)(
            struct("tl_phase", kind=C["TL_PHASE_EMBED"], scale=1.0, weight=self.matrix),
            struct("tl_phase", kind=C["TL_PHASE_HEAD"], part=1, scale=1.0, weight=self.matrix, norm=self.norm),
        )
        self.desc = struct(
            "tl_plan_desc", vocab_size=21, dim=20, ffn_dim=4, n_heads=2, n_kv_heads=1, head_dim=8, norm_eps=1e-6, kv_dtype=C["TL_F16"], max_rows=4,
            max_out=2, max_pos=32, table_stride=2, n_phases=2, section=[0, 1, 1, 1, 2], phases=self.phases,
        )  # fmt: skip
        self.plan = ctypes.c_void_p()
        self.cpu.check(lib.tl_plan_create(self.cpu.handle, byref(self.desc), byref(self.plan)))
        nbytes = ctypes.c_uint64()
        self.cpu.check(lib.tl_plan_scratch_nbytes(self.plan, byref(nbytes)))
        self.scratch = aligned(nbytes.value)
        self.cpu.check(lib.tl_plan_bind(self.plan, self.scratch.ctypes.data))
        self.tokens, self.zeros = np.array([3, 20, 0], np.int32), np.zeros(4, np.int32)
        self.tables = (ctypes.c_void_p * 1)(self.zeros.ctypes.data)
        self.out_row, self.logits = np.array([0, 2], np.int32), np.full((2, 21), np.nan, np.float32)
        self.batch = struct(
            "tl_batch", n_rows=3, sections=C["TL_RUN_ALL"], token=self.tokens, pos=np.arange(3, dtype=np.int32), seq=self.zeros,
            page_table=self.tables, n_out=2, out_row=self.out_row, logits=self.logits,
        )  # fmt: skip
        self.out = ctypes.c_uint64()
        self.floats = np.ones(4096, np.float32)

    def arguments(self) -> dict[str, tuple[Any, ...]]:
        """Valid arguments of every export but those that take none and the two that end a handle."""
        h, f, out = self.cpu.handle, self.floats.ctypes.data, byref(self.out)
        rows = struct("tl_pack_rows", n_rows=21, block=21, stride=21, src=self.weights)
        matmul = struct("tl_matmul_args", n_rows=1, weight=self.matrix, a=self.floats, y=self.floats.copy())
        sampling = struct("tl_sampling", top_p=1.0, repetition_penalty=1.0)
        desc, info = struct("tl_context_desc", n_threads=1), struct("tl_context_info")
        return {
            "tl_context_create": (byref(desc), byref(ctypes.c_void_p())),
            "tl_context_get_info": (h, byref(info)),
            "tl_matrix_nbytes": (h, byref(self.matrix), out),
            "tl_matrix_pack": (h, byref(self.matrix), byref(rows), None),
            "tl_plan_create": (h, byref(self.desc), byref(ctypes.c_void_p())),
            "tl_plan_page_nbytes": (byref(self.desc), 0, out),
            "tl_plan_row_nbytes": (byref(self.desc), out, byref(ctypes.c_uint64())),
            "tl_plan_operand_page_nbytes": (byref(self.desc), 0, out),
            "tl_plan_scratch_nbytes": (self.plan, out),
            "tl_plan_bind": (self.plan, self.scratch.ctypes.data),
            "tl_plan_enqueue": (self.plan, byref(self.batch), None),
            "tl_plan_n_clamped": (self.plan, out),
            "tl_plan_export_page": (self.plan, 0, 0, f, f, None),
            "tl_plan_import_page": (self.plan, 0, 0, f, f, None),
            "tl_plan_export_operands": (self.plan, 0, 0, f, None),
            "tl_plan_import_operands": (self.plan, 0, 0, f, None),
            "tl_op_matmul": (h, byref(matmul), None),
            "tl_op_rms_norm": (h, 1, 16, 1e-6, f, f, f, None),
            "tl_op_activation": (h, 0, 16, f, f, f, None),
            "tl_op_sample_work_floats": (21,),
            "tl_op_sample": (h, 16, byref(sampling), f, f, out, None),
            "tl_probe_read": (h, f, 4096, 1, byref(ctypes.c_double()), None),
        }

    def refuses(self, name: str, arguments: tuple[Any, ...], *words: str) -> None:
        status = getattr(self.lib, name)(*arguments)
        text = self.lib.tl_last_error().decode()
        assert status == C["TL_ERR_INVALID"], f"{name} took it"
        assert text and all(word in text for word in words), text


@pytest.fixture(scope="module")
def tiny(lib):
    return Tiny(lib)


NO_PAGES = {  # the tiny plan has no layers, hence no pages
    "tl_plan_export_page": b"no layers", "tl_plan_import_page": b"no layers",
    "tl_plan_export_operands": b"no operands", "tl_plan_import_operands": b"no operands",
}  # fmt: skip


def test_valid_arguments_are_taken(lib, tiny):
    ends = {"tl_abi_version", "tl_last_error", "tl_usable_cpus", "tl_context_destroy", "tl_plan_destroy"}
    assert set(tiny.arguments()) == set(FUNCTIONS) - ends
    for name, arguments in tiny.arguments().items():
        status = getattr(lib, name)(*arguments)
        if name in NO_PAGES:
            assert status == C["TL_ERR_INVALID"] and NO_PAGES[name] in lib.tl_last_error()
        elif name != "tl_op_sample_work_floats":
            assert status == C["TL_OK"], name
    x = tiny.weights[tiny.tokens[[0, 2]]].astype(np.float64)
    want = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) @ tiny.weights.T.astype(np.float64)
    np.testing.assert_allclose(tiny.logits, want, rtol=1e-5, atol=1e-5)


def test_null_is_refused_wherever_a_pointer_is_needed(tiny):
    optional = {("tl_op_activation", "gate")}
    for name, arguments in tiny.arguments().items():
        for i in FUNCTIONS[name].pointers():
            if (name, FUNCTIONS[name].parameters[i][1]) not in optional:
                tiny.refuses(name, (*arguments[:i], None, *arguments[i + 1 :]))


def test_ending_nothing_is_no_error(lib):
    assert lib.tl_context_destroy(None) == C["TL_OK"]
    assert lib.tl_plan_destroy(None) == C["TL_OK"]


NUMBERS = [
    ("tl_plan_page_nbytes", 1, (-1, 3)),
    ("tl_plan_export_page", 1, (-1, 3)),
    ("tl_plan_export_page", 2, (-1,)),
    ("tl_plan_import_page", 1, (-1, 3)),
    ("tl_plan_operand_page_nbytes", 1, (-1, 3)),
    ("tl_plan_export_operands", 1, (-1, 3)),
    ("tl_plan_export_operands", 2, (-1,)),
    ("tl_plan_import_operands", 1, (-1, 3)),
    ("tl_op_rms_norm", 1, (0, -1)),
    ("tl_op_rms_norm", 2, (0, -1)),
    ("tl_op_activation", 1, (-1, 3)),
    ("tl_op_activation", 2, (0, -1, 1 << 31)),
    ("tl_op_sample", 1, (0, -1)),
    ("tl_probe_read", 2, (0, 100)),
    ("tl_probe_read", 3, (0, -1)),
]


@pytest.mark.parametrize(("name", "place", "values"), NUMBERS, ids=lambda v: str(v))
def test_numbers_out_of_range_are_refused(tiny, name, place, values):
    for value in values:
        arguments = tiny.arguments()[name]
        tiny.refuses(name, (*arguments[:place], value, *arguments[place + 1 :]))


def changed(value: Any, **fields: Any) -> Any:
    """A copy of a struct with other fields."""
    copy = type(value).from_buffer_copy(value)
    copy.kept = (value, fields)
    for name, field in fields.items():
        setattr(copy, name, field)
    return copy


def test_structs_of_another_size_are_refused(tiny):
    for name, arguments in tiny.arguments().items():
        for i, (kind, _) in enumerate(FUNCTIONS[name].parameters):
            bare = kind.replace("const ", "").rstrip(" *")
            if bare in STRUCTS and kind.count("*") == 1 and bare not in ("tl_context", "tl_plan"):
                tiny.refuses(name, (*arguments[:i], byref(changed(arguments[i]._obj, size=4)), *arguments[i + 1 :]), f"{bare}.size")


CONTEXTS = [({"n_threads": 0}, "n_threads"), ({"n_threads": 1025}, "n_threads"), ({"n_threads": -1}, "n_threads")]
MATRICES = [
    ({"dtype": 4}, "dtype"), ({"dtype": -1}, "dtype"), ({"n_out": 0}, "n_out"), ({"n_out": 17}, "n_out"), ({"n_in": 0}, "n_in"),
    ({"group_size": -64}, "group_size"), ({"group_size": 16, "dtype": 3}, "group_size"), ({"group_size": 64}, "float matrix"),
]  # fmt: skip
ROWS = [
    ({"n_rows": 0}, "map"), ({"block": 0}, "map"), ({"stride": 20}, "map"),
    ({"offset": -1}, "map"), ({"offset": 16}, "past"), ({"n_rows": 33}, "past"),
    ({"block": 1, "stride": 1 << 30}, "past"), ({"n_rows": 2**31 - 1, "block": 1, "stride": 2**31 - 1, "offset": 2**31 - 1}, "past"),
]  # fmt: skip
PLANS = [
    ({"vocab_size": 0}, "positive"), ({"dim": -1}, "positive"), ({"n_kv_heads": 0}, "positive"), ({"n_heads": 3, "n_kv_heads": 2}, "n_kv_heads"),
    ({"head_dim": 7}, "head_dim"), ({"head_dim": 258}, "head_dim"), ({"rotary_dim": 10}, "rotary_dim"), ({"rotary_dim": 3}, "rotary_dim"),
    ({"rotary_dim": 4}, "rope tables"), ({"kv_dtype": 5}, "kv_dtype"), ({"max_rows": 0}, "max_rows"), ({"max_out": 0}, "max_out"),
    ({"max_pos": 0}, "max_pos"), ({"table_stride": 1}, "table_stride"), ({"n_phases": 0}, "phases"), ({"phases": None}, "phases"),
    ({"vocab_size": 40}, "shape"), ({"dim": 24}, "shape"),
]  # fmt: skip
PHASES = [
    ({"kind": 10}, "kind"), ({"kind": -1}, "kind"),
    ({"part": 3}, "part"), ({"kind": C["TL_PHASE_QKV"]}, "layer"), ({"kind": C["TL_PHASE_NORM"]}, "shape"),
    ({"kind": C["TL_PHASE_NORM"], "weight": STRUCTS["tl_matrix"]()}, "norm"), ({"weight": STRUCTS["tl_matrix"]()}, "weight"),
    ({"kind": C["TL_PHASE_HEAD"]}, "head"),
]  # fmt: skip
BATCHES = [
    ({"n_rows": 5}, "n_rows"), ({"n_rows": -1}, "n_rows"), ({"n_rows": 0}, "no rows"),
    ({"n_out": 3}, "n_out"), ({"n_out": -1}, "n_out"), ({"sections": 0}, "sections"),
    ({"sections": 32}, "sections"), ({"sections": 16}, "sections"), ({"sections": 17}, "rebuild"), ({"window": -1}, "window"),
    ({"loop_end": -1}, "loop"), ({"loop_begin": -1}, "loop"), ({"token": None}, "rows"),
    ({"pos": None}, "rows"), ({"seq": None}, "rows"),
    ({"page_table": None}, "rows"), ({"out_row": None}, "out_row"), ({"sections": C["TL_RUN_HEAD"]}, "head-only"),
    ({"sections": C["TL_RUN_CODA"]}, "x_in"), ({"sections": C["TL_RUN_CODA"], "x_in": 64, "e_out": 64}, "e_out"),
    ({"sections": C["TL_RUN_PRELUDE"], "x_out": 64}, "x_out"),
]  # fmt: skip
SAMPLINGS = [
    ({"temperature": -1.0}, "temperature"), ({"temperature": float("nan")}, "temperature"),
    ({"repetition_penalty": 0.0}, "penalty"), ({"top_p": 0.0}, "top_p"),
    ({"min_p": -0.5}, "min_p"), ({"n_bias": 1}, "bias"), ({"n_bias": -1}, "bias"), ({"n_history": 1}, "history"), ({"n_history": -1}, "history"),
]  # fmt: skip


def test_fields_of_a_context_are_checked(tiny):
    for change, word in CONTEXTS:
        tiny.refuses("tl_context_create", (byref(struct("tl_context_desc", **{"n_threads": 1, **change})), byref(ctypes.c_void_p())), word)
    desc = struct("tl_context_desc", n_threads=1, isa=9)
    assert tiny.lib.tl_context_create(byref(desc), byref(ctypes.c_void_p())) == C["TL_ERR_UNSUPPORTED"]


def test_fields_of_a_matrix_are_checked(tiny):
    for change, word in MATRICES:
        tiny.refuses("tl_matrix_nbytes", (tiny.cpu.handle, byref(changed(tiny.matrix, **change)), byref(tiny.out)), word)
    args = struct("tl_matmul_args", n_rows=1, weight=changed(tiny.matrix, data=tiny.matrix.data + 4), a=tiny.floats, y=tiny.floats)
    tiny.refuses("tl_op_matmul", (tiny.cpu.handle, byref(args), None), "aligned")


def test_fields_of_a_pack_are_checked(tiny):
    for change, word in ROWS:
        rows = struct("tl_pack_rows", **{"n_rows": 21, "block": 21, "stride": 21, "src": tiny.weights, **change})
        tiny.refuses("tl_matrix_pack", (tiny.cpu.handle, byref(tiny.matrix), byref(rows), None), word)


def test_fields_of_a_plan_are_checked(tiny):
    for change, word in PLANS:
        tiny.refuses("tl_plan_create", (tiny.cpu.handle, byref(changed(tiny.desc, **change)), byref(ctypes.c_void_p())), word)
    for change, word in PHASES:
        phases = (STRUCTS["tl_phase"] * 2)(changed(tiny.phases[0], **change), tiny.phases[1])
        desc = changed(tiny.desc, phases=ctypes.addressof(phases))
        tiny.refuses("tl_plan_create", (tiny.cpu.handle, byref(desc), byref(ctypes.c_void_p())), word)
    for section in ([1, 1, 1, 1, 2], [0, 1, 1, 1, 1], [0, 1, 0, 1, 2], [0, 2, 2, 2, 2]):
        desc = changed(tiny.desc, section=(ctypes.c_int32 * 5)(*section))
        tiny.refuses("tl_plan_create", (tiny.cpu.handle, byref(desc), byref(ctypes.c_void_p())), "section")


@pytest.mark.parametrize("kv_dtype", ["F32", "BF16", "F16", "INT8", "INT4"])
@pytest.mark.parametrize("head_dim", [2, 8, 48, 64, 80, 96, 128, 256])
def test_pages_come_back_from_the_canonical_layout(tiny, head_dim, kv_dtype):
    """Any bits, page 1 of two: nothing is lost or moved, and page 0 stays as it is."""
    nbytes, k_row, v_row = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
    desc = changed(tiny.desc, kv_dtype=C[f"TL_{kv_dtype}"], head_dim=head_dim, n_kv_heads=2, n_layers=(ctypes.c_int32 * 3)(0, 0, 3))
    tiny.cpu.check(tiny.lib.tl_plan_page_nbytes(byref(desc), 2, byref(nbytes)))
    tiny.cpu.check(tiny.lib.tl_plan_row_nbytes(byref(desc), byref(k_row), byref(v_row)))
    pages = aligned(2 * nbytes.value)
    pages[:] = 0x5A
    desc = changed(desc, kv_base=(ctypes.c_void_p * 3)(None, None, pages.ctypes.data))
    plan = ctypes.c_void_p()
    tiny.cpu.check(tiny.lib.tl_plan_create(tiny.cpu.handle, byref(desc), byref(plan)))
    rng = np.random.default_rng(head_dim)
    keys, values = (rng.integers(0, 256, 3 * 2 * 16 * n.value, dtype=np.uint8) for n in (k_row, v_row))
    got = [np.zeros_like(keys), np.zeros_like(values)]
    tiny.cpu.check(tiny.lib.tl_plan_import_page(plan, 2, 1, keys.ctypes.data, values.ctypes.data, None))
    tiny.cpu.check(tiny.lib.tl_plan_export_page(plan, 2, 1, got[0].ctypes.data, got[1].ctypes.data, None))
    tiny.cpu.check(tiny.lib.tl_plan_destroy(plan))
    assert np.array_equal(got[0], keys) and np.array_equal(got[1], values)
    assert (pages[: nbytes.value] == 0x5A).all()


def test_fields_of_a_batch_are_checked(tiny):
    for change, word in BATCHES:
        tiny.refuses("tl_plan_enqueue", (tiny.plan, byref(changed(tiny.batch, **change)), None), word)
    good = struct("tl_sampling", top_p=1.0, repetition_penalty=1.0)
    drawn = np.zeros(2, np.int32)
    for change, word in SAMPLINGS:
        samplings = (STRUCTS["tl_sampling"] * 2)(good, changed(good, **change))
        batch = changed(tiny.batch, sampling=ctypes.addressof(samplings), sampled=drawn.ctypes.data)
        tiny.refuses("tl_plan_enqueue", (tiny.plan, byref(batch), None), word)
        tiny.refuses("tl_op_sample", (tiny.cpu.handle, 16, byref(samplings[1]), *tiny.arguments()["tl_op_sample"][3:]), word)


def test_rows_that_step_by_themselves_are_cudas_alone(tiny):
    rows, drawn = np.arange(1, dtype=np.int32), np.zeros(1, np.int32)
    sampling, decode = struct("tl_sampling", top_p=1.0, repetition_penalty=1.0), struct("tl_decode", n_left=1)
    batch = changed(
        tiny.batch, n_rows=1, n_out=1, out_row=rows.ctypes.data, sampled=drawn.ctypes.data,
        sampling=ctypes.addressof(sampling), decode=ctypes.addressof(decode),
    )  # fmt: skip
    assert tiny.lib.tl_plan_enqueue(tiny.plan, byref(batch), None) == C["TL_ERR_UNSUPPORTED"]
    assert b"CUDA" in tiny.lib.tl_last_error()


def test_rows_go_on_at_a_further_loop(lib):
    """Two loops at once, and one after the other through x_out, e_out, x_in and e_in: the same bits, and e is the embedding."""
    tiny = Tiny(lib)
    state = struct("tl_phase", kind=C["TL_PHASE_STATE_INIT"], option=C["TL_INIT_ZERO"], flags=C["TL_PHASE_SAVE_INPUT"], scale=1.0)
    inject = struct("tl_phase", kind=C["TL_PHASE_INJECT"], part=C["TL_STAGE_CORE"], scale=1.0)
    norm = struct("tl_phase", kind=C["TL_PHASE_NORM"], part=C["TL_STAGE_CORE"], norm=np.linspace(0.5, 2, 20, dtype=np.float32))
    phases = (STRUCTS["tl_phase"] * 5)(tiny.phases[0], state, inject, norm, tiny.phases[1])
    desc = changed(tiny.desc, n_phases=5, section=(ctypes.c_int32 * 5)(0, 2, 4, 4, 5), phases=ctypes.addressof(phases))
    plan, nbytes = ctypes.c_void_p(), ctypes.c_uint64()
    tiny.cpu.check(lib.tl_plan_create(tiny.cpu.handle, byref(desc), byref(plan)))
    tiny.cpu.check(lib.tl_plan_scratch_nbytes(plan, byref(nbytes)))
    scratch = aligned(nbytes.value)
    tiny.cpu.check(lib.tl_plan_bind(plan, scratch.ctypes.data))

    def run(**fields: Any) -> np.ndarray:
        tiny.logits[:] = np.nan
        tiny.cpu.check(lib.tl_plan_enqueue(plan, byref(changed(tiny.batch, **fields)), None))
        return tiny.logits.copy()

    x, e = np.full((2, 3, 20), np.nan, np.float32)
    whole = run(loop_end=2)
    run(loop_end=1, x_out=x.ctypes.data, e_out=e.ctypes.data)
    assert e.tobytes() == tiny.weights[tiny.tokens].tobytes()
    scratch[:] = 0xFF  # what is not handed over is NaN
    behind = C["TL_RUN_CORE"] | C["TL_RUN_CODA"] | C["TL_RUN_HEAD"]
    further = {"sections": behind, "loop_begin": 1, "loop_end": 2, "x_in": x.ctypes.data}
    got = run(**further, e_in=e.ctypes.data)
    assert got.tobytes() == whole.tobytes() and np.isfinite(got).all()
    assert run(loop_begin=1, loop_end=2, x_in=x.ctypes.data).tobytes() == whole.tobytes()  # the prelude runs again and gives e
    tiny.refuses("tl_plan_enqueue", (plan, byref(changed(tiny.batch, **further)), None), "e_in")
    tiny.cpu.check(lib.tl_plan_destroy(plan))


def test_a_plan_without_scratch_memory_does_not_run(tiny):
    plan = ctypes.c_void_p()
    tiny.cpu.check(tiny.lib.tl_plan_create(tiny.cpu.handle, byref(tiny.desc), byref(plan)))
    tiny.refuses("tl_plan_enqueue", (plan, byref(tiny.batch), None), "scratch")
    tiny.refuses("tl_plan_bind", (plan, tiny.scratch.ctypes.data + 8), "aligned")
    tiny.cpu.check(tiny.lib.tl_plan_destroy(plan))


def test_the_error_text_belongs_to_the_thread(lib):
    lib.tl_plan_bind(None, None)
    mine, others = lib.tl_last_error(), []
    threading.Thread(target=lambda: others.append((lib.tl_last_error(), lib.tl_context_create(None, None), lib.tl_last_error()))).start()
    while not others:
        pass
    assert others[0][0] == b"" and others[0][2] != mine and lib.tl_last_error() == mine


def test_usable_cpus_are_those_of_the_process(lib):
    assert lib.tl_usable_cpus() == len(os.sched_getaffinity(0))


def test_what_a_context_says_of_itself(lib):
    for isa in PATHS:
        with Cpu(lib, isa, threads=2) as cpu:
            info = struct("tl_context_info")
            cpu.check(lib.tl_context_get_info(cpu.handle, byref(info)))
            assert (info.n_threads, info.isa, info.name) == (2, PATHS[isa], b"cpu " + isa.encode())
            assert isa.encode() in info.numerics_id


# ---- matrix products


def random_matrix(rng: np.random.Generator, n_out: int, n_in: int, dtype: str, group: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """(stored bytes, scales, the float64 matrix that they stand for), rows and entries of unequal size."""
    if dtype == "int8":
        q = rng.integers(-127, 128, (n_out, n_in)).astype(np.int8)
        n_scales = -(-n_in // group) if group else 1
        scales = (rng.random((n_out, n_scales)) + 0.1).astype(np.float32)
        columns = np.arange(n_in) // group if group else np.zeros(n_in, int)
        return q, scales, q * scales.astype(np.float64)[:, columns]
    w = rounded(rng.standard_normal((n_out, n_in)) * np.exp(rng.standard_normal((n_out, 1))), dtype)
    return as_stored(w, dtype), None, w.astype(np.float64)


def operand(a: np.ndarray, dtype: str) -> np.ndarray:
    """The float64 values that a product works on: rounded to the float type, or to int8 in groups of TL_INT8_GROUP."""
    if dtype != "int8":
        return rounded(np.clip(a, -65504, 65504) if dtype == "f16" else a, dtype).astype(np.float64)
    out = np.empty(a.shape, np.float64)
    for begin in range(0, a.shape[1], C["TL_INT8_GROUP"]):
        part = a[:, begin : begin + C["TL_INT8_GROUP"]]
        top = np.abs(part).max(1, keepdims=True)
        inverse = np.where(top > 0, np.float32(127) / np.where(top > 0, top, 1), 0).astype(np.float32)
        q = np.rint(part * inverse).astype(np.float64)
        out[:, begin : begin + C["TL_INT8_GROUP"]] = q * (top * np.float32(1 / 127)).astype(np.float64)
    return out


KINDS = [("f32", 0), ("bf16", 0), ("f16", 0), ("int8", 0), ("int8", 32), ("int8", 64), ("int8", 128)]


@pytest.mark.parametrize(("dtype", "group"), KINDS)
def test_matmul_against_float64(cpu, dtype, group):
    for n_in in WIDTHS:
        rng = np.random.default_rng([n_in, group])
        stored, scales, w = random_matrix(rng, 80, n_in, dtype, group)  # five panels: every tile leaves some over
        matrix = cpu.pack(stored, dtype, scales, group)
        a = (rng.standard_normal((13, n_in)) * np.exp(rng.standard_normal((13, 1)))).astype(np.float32)
        bias = rng.standard_normal(80).astype(np.float32)
        x = operand(a, dtype)
        bound = 1e-6 * (np.abs(x) @ np.abs(w).T + np.abs(bias))
        assert (np.abs(cpu.matmul(matrix, a, bias) - (x @ w.T + bias)) <= bound).all(), n_in
        assert (np.abs(cpu.matmul(matrix, a) - x @ w.T) <= bound).all(), n_in


@pytest.mark.parametrize(("dtype", "group"), KINDS)
def test_matmul_of_rows_alone_equals_rows_together(cpu, dtype, group):
    rng = np.random.default_rng(5)
    for n_in in (37, 257, 513):
        stored, scales, _ = random_matrix(rng, 80, n_in, dtype, group)
        matrix = cpu.pack(stored, dtype, scales, group)
        a = rng.standard_normal((30, n_in)).astype(np.float32)
        together = cpu.matmul(matrix, a)
        for n in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 29):
            assert cpu.matmul(matrix, a[30 - n :]).tobytes() == together[30 - n :].tobytes(), n
        assert b"".join(cpu.matmul(matrix, row[None]).tobytes() for row in a) == together.tobytes()


@pytest.mark.parametrize(("dtype", "group"), KINDS)
def test_matmul_of_a_panel_alone_equals_the_whole_matrix(cpu, dtype, group):
    rng = np.random.default_rng(6)
    stored, scales, _ = random_matrix(rng, 176, 300, dtype, group)
    whole = cpu.pack(stored, dtype, scales, group)
    a = rng.standard_normal((5, 300)).astype(np.float32)
    together = cpu.matmul(whole, a)
    for first in range(0, 176, 16):
        rows = slice(first, first + 16)
        alone = cpu.pack(stored[rows], dtype, None if scales is None else scales[rows], group)
        assert cpu.matmul(alone, a).tobytes() == np.ascontiguousarray(together[:, rows]).tobytes()


@pytest.mark.parametrize("isa", PATHS)
def test_matmul_is_the_same_with_any_number_of_threads(lib, isa):
    rng = np.random.default_rng(7)
    stored, _, _ = random_matrix(rng, 80, 300, "bf16", 0)
    a = rng.standard_normal((40, 300)).astype(np.float32)
    results = set()
    for threads in (1, 2, 3):
        with Cpu(lib, isa, threads) as cpu:
            results.add(cpu.matmul(cpu.pack(stored, "bf16"), a).tobytes())
    assert len(results) == 1


@pytest.mark.parametrize(("dtype", "group"), KINDS)
def test_matrices_packed_together_keep_their_rows_and_padding_is_zero(cpu, dtype, group):
    rng = np.random.default_rng(8)
    parts = [random_matrix(rng, 24, 70, dtype, group) for _ in range(2)]  # 24 rows: a panel and a half each
    a = rng.standard_normal((3, 70)).astype(np.float32)
    both = cpu.pack(parts[0][0], dtype, parts[0][1], group, n_out=64, block=16, stride=32)
    cpu.add(both, parts[1][0], parts[1][1], block=16, stride=32, offset=16)
    got = cpu.matmul(both, a)
    for i, (stored, scales, _) in enumerate(parts):
        alone = cpu.matmul(cpu.pack(stored, dtype, scales, group), a)
        places = [(r // 16) * 32 + 16 * i + r % 16 for r in range(24)]
        assert got[:, places].tobytes() == np.ascontiguousarray(alone[:, :24]).tobytes()
        assert not alone[:, 24:].any()
    assert not got[:, 40:48].any() and not got[:, 56:].any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("dtype", "group"), [k for k in KINDS if k[1] != 128])
def test_a_nan_spoils_its_row_and_no_other(cpu, dtype, group, value):
    """Also with int8 weights, where no integer stands for it: a spoilt row must show, not turn into plausible numbers."""
    if dtype == "f16" and value == np.inf:
        pytest.skip("operands are clamped to float16's range")
    rng = np.random.default_rng(9)
    stored, scales, _ = random_matrix(rng, 32, 200, dtype, group)
    matrix = cpu.pack(stored, dtype, scales, group)
    a = rng.standard_normal((5, 200)).astype(np.float32)
    clean = cpu.matmul(matrix, a)
    for column in (0, 77, 199):
        spoilt = a.copy()
        spoilt[2, column] = value
        got = cpu.matmul(matrix, spoilt)
        assert not np.isfinite(got[2]).any()
        assert np.delete(got, 2, 0).tobytes() == np.delete(clean, 2, 0).tobytes()


def test_rows_of_zeros_give_zeros(cpu):
    rng = np.random.default_rng(10)
    for dtype, group in KINDS:
        stored, scales, _ = random_matrix(rng, 16, 100, dtype, group)
        assert not cpu.matmul(cpu.pack(stored, dtype, scales, group), np.zeros((2, 100), np.float32)).any()


# ---- rows


def test_rms_norm_against_float64(cpu):
    for dim in (*WIDTHS, 1000):
        rng = np.random.default_rng(dim)
        x = (rng.standard_normal((3, dim)) * np.array([[1e-3], [1.0], [1e4]])).astype(np.float32)
        w = rng.standard_normal(dim).astype(np.float32)
        want = w * (x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5))
        np.testing.assert_allclose(cpu.rms_norm(x, w, 1e-5), want, rtol=2e-6)


def test_rms_norm_of_a_row_alone_equals_rows_together_and_keeps_nan(cpu):
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((7, 100)).astype(np.float32), np.ones(100, np.float32)
    together = cpu.rms_norm(x, w, 1e-6)
    assert b"".join(cpu.rms_norm(x[i : i + 1], w, 1e-6).tobytes() for i in range(7)) == together.tobytes()
    x[3, 99] = np.nan
    spoilt = cpu.rms_norm(x, w, 1e-6)
    assert np.isnan(spoilt[3]).all() and np.delete(spoilt, 3, 0).tobytes() == np.delete(together, 3, 0).tobytes()


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {"SILU": silu, "GELU": gelu, "RELU2": lambda x: np.maximum(x, 0) ** 2}


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_against_float64(cpu, act):
    """silu and gelu show the accuracy of exp: a few units in the last place where the result is not tiny."""
    x = np.concatenate([np.linspace(-100, 100, 20001), np.geomspace(1e-30, 1e30, 999), -np.geomspace(1e-30, 80, 999)]).astype(np.float32)
    if act == "RELU2":
        x = x[np.abs(x) < 1e18]
    with np.errstate(over="ignore"):
        want = ACTIVATIONS[act](x.astype(np.float64))
        cancelled = 1e-6 if act == "GELU" else 0  # 1 + tanh near -1 cancels in the formula above, not in the library
        np.testing.assert_allclose(cpu.activation(act, x), want, rtol=2e-6 if act == "GELU" else 5e-7, atol=cancelled + 1e-36)
        up = np.random.default_rng(0).standard_normal(len(x)).astype(np.float32)
        np.testing.assert_allclose(cpu.activation(act, up, x), want * up, rtol=2e-6 if act == "GELU" else 6e-7, atol=4 * cancelled + 1e-35)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_of_any_length_and_of_nan(cpu, act):
    rng = np.random.default_rng(2)
    x, up = rng.standard_normal((2, 70)).astype(np.float32)
    whole, gated = cpu.activation(act, x), cpu.activation(act, up, x)
    for n in (1, 2, 15, 16, 17, 31, 33, 69):
        assert cpu.activation(act, x[:n]).tobytes() == whole[:n].tobytes()
        assert cpu.activation(act, up[:n], x[:n]).tobytes() == gated[:n].tobytes()
    if act != "RELU2":  # max(0, x) has no NaN
        x[5] = np.nan
        spoilt = cpu.activation(act, x)
        assert np.isnan(spoilt[5]) and np.delete(spoilt, 5).tobytes() == np.delete(whole, 5).tobytes()


def test_no_float_mode_is_left_behind(cpu):
    """Regions flush subnormals to zero; the caller's arithmetic does not."""
    cpu.activation("SILU", np.ones(16, np.float32))
    assert np.float32(1e-38) * np.float32(0.01) > 0


# ---- sampling and reading


SETTINGS = [
    {"temperature": 0.0}, {}, {"temperature": 0.5}, {"top_k": 1},
    {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.3}, {"temperature": 1.7, "top_k": 40, "repetition_penalty": 0.8},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: " ".join(f"{k}={v}" for k, v in s.items()) or "plain")
def test_sampling_against_the_reference(cpu, settings):
    decided = 0
    for vocab in (1, 7, 63, 64, 65, 1000, 4097):
        for seed in range(12):
            rng = np.random.default_rng([vocab, seed])
            logits = (3 * rng.standard_normal(vocab)).astype(np.float32)
            history = rng.integers(0, vocab, 9, dtype=np.int32)
            bias = {int(i): 1.5 for i in set(rng.integers(0, vocab, 2).tolist())}
            ids, values = np.array(sorted(bias), np.int32), np.full(len(bias), 1.5, np.float32)
            want = sample(logits, seed, 17, context=history.tolist(), logit_bias=bias, **settings)
            got = cpu.sample(
                logits, seed=seed, position=17, n_bias=len(ids), bias_ids=ids, bias_values=values, n_history=len(history), history=history, **settings
            )
            if want.margin > 1e-4:
                assert got == want.token, (vocab, seed)
                decided += 1
    assert decided > 60


def test_equal_logits_draw_the_lowest_id_first(cpu):
    flat = np.zeros(100, np.float32)
    assert cpu.sample(flat, temperature=0.0) == 0
    assert cpu.sample(flat, top_k=1, seed=3) == 0
    assert {cpu.sample(flat, top_k=3, seed=s) for s in range(60)} == {0, 1, 2}


def test_the_read_probe_measures_a_rate(cpu):
    data, rate = np.ones(1 << 20, np.uint8), ctypes.c_double()
    cpu.check(cpu.lib.tl_probe_read(cpu.handle, data.ctypes.data, data.nbytes, 3, byref(rate), None))
    assert 1e6 < rate.value < 1e13
