"""`python -m tinyloop_py`: the start of a bug report, which must come whatever is broken."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tinyloop_py import diagnosis
from tinyloop_py.native import library_path, require_library

COMMAND = [sys.executable, "-m", "tinyloop_py"]
PLACE = {"env": {**os.environ, "PYTHONPATH": str(Path(diagnosis.__file__).parent.parent)}, "cwd": tempfile.gettempdir(), "timeout": 120}


def run(*arguments, **variables):
    """Standard output of the diagnosis in a process of its own, which must succeed and say nothing on stderr."""
    place = {**PLACE, "env": {**PLACE["env"], **{k: str(v) for k, v in variables.items()}}}
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, **place)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_text_and_json_say_the_same():
    report = json.loads(run("--json"))
    text = run()
    assert report["libraries"]["cpu"] == {"path": str(library_path("cpu")), "nbytes": library_path("cpu").stat().st_size, "state": "loads"}
    assert report["backends"]["cpu"]["threads"] >= 1 and report["backends"]["cpu"]["numerics_id"] in text
    assert report["packages"]["numpy"] in text and report["python"] in text
    assert str(report["build"]["compiler"]) in text and "nvcc searched" in text
    assert list(report) == [
        "packages", "package_folder", "python", "platform", "processor", "build", "libraries", "backends", "cuda_python", "demo_model", "environment"
    ]  # fmt: skip


def test_why_a_backend_is_not_there_is_said(tmp_path):
    report = json.loads(run("--json", TINYLOOP_CUDA_LIBRARY=tmp_path / "absent.so"))
    assert report["libraries"]["cuda"]["state"] == "missing"
    assert "absent.so is missing" in report["backends"]["cuda"]
    assert f"TINYLOOP_CUDA_LIBRARY is '{tmp_path / 'absent.so'}'" in report["backends"]["cuda"]


def test_a_variable_that_names_no_library_is_named(monkeypatch, tmp_path):
    for backend in ("cpu", "cuda"):
        monkeypatch.setenv(f"TINYLOOP_{backend.upper()}_LIBRARY", str(tmp_path / "absent.so"))
        with pytest.raises(RuntimeError, match=rf"TINYLOOP_{backend.upper()}_LIBRARY is '{tmp_path}/absent.so', which is no file"):
            require_library(backend)
    monkeypatch.delenv("TINYLOOP_CPU_LIBRARY")
    monkeypatch.setattr("tinyloop_py.native.library_folder", lambda: tmp_path)
    with pytest.raises(RuntimeError, match=r"libtinyloop_cpu\.so is missing from .*reinstall"):
        require_library("cpu")


def test_a_broken_library_is_reported(tmp_path):
    (tmp_path / "broken.so").write_text("no library")
    report = json.loads(run("--json", TINYLOOP_CPU_LIBRARY=tmp_path / "broken.so"))
    assert "broken.so does not load" in report["libraries"]["cpu"]["state"]
    assert "broken.so does not load" in report["backends"]["cpu"]


def test_variables_that_matter_are_shown_as_they_are():
    text = run(TINYLOOP_CPU_ISA="generic", TINYLOOP_ANYTHING="x y", CUDA_VISIBLE_DEVICES="1", SECRET_TOKEN="hidden")
    assert "  TINYLOOP_CPU_ISA: generic" in text and "  TINYLOOP_ANYTHING: x y" in text and "  CUDA_VISIBLE_DEVICES: 1" in text
    assert "cpu generic" in text and "hidden" not in text


def test_a_bad_variable_does_not_stop_it():
    assert "TINYLOOP_CPU_ISA is 'mmx'" in run(TINYLOOP_CPU_ISA="mmx")


@pytest.mark.parametrize("name", ["_processor", "_build_info", "_library", "_backend", "_cuda_devices", "_demo_model"])
def test_nothing_that_fails_stops_it(monkeypatch, name):
    def fail(*arguments):
        raise OSError("of no use\nhere")

    monkeypatch.setattr(diagnosis, name, fail)
    report = diagnosis.diagnose({})
    assert "OSError: of no use here" in diagnosis.as_text(report)
    json.dumps(report)


def test_devices_are_listed_one_by_one():
    text = diagnosis.as_text(
        {"cuda_python": {"runtime": 12080, "devices": [{"name": "A", "sm": "90"}, {"name": "B", "sm": "80"}]}, "none": {}, "list": []}
    )
    assert text.splitlines() == [
        "cuda python", "  runtime: 12080", "  devices 0", "    name: A", "    sm: 90", "  devices 1", "    name: B", "    sm: 80",
        "none: none", "list: none",
    ]  # fmt: skip


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([*COMMAND, "--json"], stdout=write, stderr=subprocess.PIPE, text=True, check=False, **PLACE)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
