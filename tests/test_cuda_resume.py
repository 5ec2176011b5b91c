"""Hidden rows in a CUDA device's memory. That every depth gives a fresh run's bits is test_resume.py's."""

import sys

import emulated_cuda
import pytest
import test_native_contract
from contract import load
from models import CONFIGS, random_tokens
from runtime import backends, open_model

import tinyloop_py as tl
from tinyloop_py.native import library_path

pytestmark = pytest.mark.skipif("cuda" not in backends(), reason="no CUDA device, and TINYLOOP_TEST_BACKENDS does not name cuda-emulated")
GREEDY = {"temperature": 0.0, "stop_tokens": ()}
PROMPT = random_tokens(CONFIGS["huginn"], 20)


class AllocationFault:
    """Fails the n-th allocation of device or pinned memory; counts them."""

    def __init__(self, emulated, monkeypatch, nth):
        self.emulated, self.monkeypatch, self.nth, self.taken = emulated, monkeypatch, nth, 0

    def asked(self, answer):
        self.taken += 1
        return (emulated_cuda.Status.outOfMemory, None) if self.taken == self.nth else answer()

    def __enter__(self):
        runtime, driver = sys.modules["cuda.bindings.runtime"], sys.modules["cuda.bindings.driver"]
        for name in ("cudaMalloc", "cudaHostAlloc"):
            self.monkeypatch.setattr(runtime, name, lambda nbytes, *_: self.asked(lambda: self.emulated.allocate(nbytes)))
        self.monkeypatch.setattr(driver, "cuMemCreate", lambda nbytes, *_: self.asked(lambda: self.emulated.create(nbytes)))
        return self

    def __exit__(self, kind, error, trace):
        self.monkeypatch.undo()


def test_rows_go_on_at_a_further_loop(emulated):
    test_native_contract.test_rows_go_on_at_a_further_loop(load(library_path("cuda")))


@pytest.mark.parametrize("action", ["build", "extend"])
def test_out_of_memory_at_any_allocation_loses_nothing(emulated, monkeypatch, action):
    """Hidden rows, pages, and what the first batch of its kind takes."""
    with open_model("cuda", "huginn", "bf16", max_seq_len=64) as model:
        want = {loops: model.generate(PROMPT, 2, loops, **GREEDY) for loops in (1, 2)}
    for nth in range(1, 40):
        with open_model("cuda", "huginn", "bf16", max_seq_len=64) as model:
            handle = None if action == "build" else model.build_resume_handle(PROMPT, 1)
            held = model.kv_nbytes
            with AllocationFault(emulated, monkeypatch, nth) as fault:
                try:
                    made = model.build_resume_handle(PROMPT, 1) if handle is None else handle.extend(2)
                except tl.OutOfMemoryError as error:
                    assert str(error).startswith("out of memory") and fault.taken == nth
                    assert model.kv_nbytes == held and model._engine.plan.store.reserved_nbytes == 0
                    made = None
                else:
                    assert fault.taken < nth
            handle = handle or made or model.build_resume_handle(PROMPT, 1)
            for loops in want:
                assert model.resume_generate(handle, loops, 2, **GREEDY) == want[loops]
        if fault.taken < nth:
            break
    assert nth > 1
