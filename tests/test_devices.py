"""`device="auto"` where CUDA cannot even be asked: without its library, without cuda-python. tests/test_cuda.py has the driver's answers."""

import sys
import warnings

import pytest
from runtime import open_model

from tinyloop_py import cuda_device, devices
from tinyloop_py.native import library_path


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine whose NVIDIA driver has left its file."""
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(cuda_device, "DRIVER_FILES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices._say_once.cache_clear()


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """An installation without nvcc."""
    monkeypatch.setenv("TINYLOOP_CUDA_LIBRARY", str(tmp_path / "absent.so"))
    return r"absent\.so is missing"


@pytest.fixture
def no_bindings(monkeypatch):
    """An installation without cuda-python; the CPU's library, which has the same exports, stands for CUDA's."""
    monkeypatch.setenv("TINYLOOP_CUDA_LIBRARY", str(library_path("cpu")))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    return "cuda-python does not import.*pip install cuda-python"


@pytest.fixture(params=["no_library", "no_bindings"])
def reason(request):
    """What CUDA lacks."""
    return request.getfixturevalue(request.param)


def device_in_silence(device="auto"):
    """The device that a model takes when a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_model(device) as model:
            return model.device


def test_a_gpu_that_cannot_be_asked_is_told_once(gpu, reason):
    with pytest.warns(RuntimeWarning, match=f"device='auto' takes the CPU.*{reason}") as told, open_model("auto") as model:
        assert model.device == "cpu" and model.generate([1], 2, stop_tokens=())
    assert len(told) == 1
    assert device_in_silence() == "cpu"


def test_cuda_by_name_says_what_it_lacks(gpu, reason):
    with pytest.raises(RuntimeError, match=reason):
        open_model("cuda")


def test_the_cpu_by_name_says_nothing(gpu, reason):
    assert device_in_silence("cpu") == "cpu"


def test_where_no_gpu_is_nothing_is_said(gpu, reason, monkeypatch):
    monkeypatch.setattr(cuda_device, "DRIVER_FILES", ("/nowhere/nvidiactl",))
    assert device_in_silence() == "cpu"


@pytest.mark.parametrize("visible", ["", "-1", " -1,0"])
def test_of_a_gpu_that_is_hidden_nothing_is_said(gpu, reason, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_in_silence() == "cpu"
