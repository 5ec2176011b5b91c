"""A quick part of the suite on the CUDA backend where no GPU is: its kernels on the emulator, in a process of its own.

All of it: TINYLOOP_TEST_BACKENDS=cuda-emulated (docs/cuda.md).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runtime import BACKENDS_VARIABLE, EMULATED, backends

TESTS = (
    "test_cuda.py::test_steps_that_run_ahead_draw_what_single_steps_draw[greedy]",
    "test_cuda.py::test_what_a_handler_raises_in_the_device_s_code_is_no_failure_of_a_hit",
    "test_cuda.py::test_a_warm_request_allocates_nothing_and_makes_no_graph",
    "test_cuda.py::test_an_output_that_is_kept_is_the_prefix_of_its_tokens",
    "test_cuda.py::test_closing_gives_everything_back",
    "test_cuda.py::test_out_of_memory_says_what_was_asked_and_loses_nothing",
    "test_cuda.py::test_where_no_gpu_is_auto_is_the_cpu_and_says_nothing",
    "test_cuda.py::test_a_driver_that_cannot_be_used_is_named_and_auto_takes_the_cpu",
    "test_cuda.py::test_a_driver_that_is_not_there_is_named",
    "test_cuda.py::test_a_device_that_is_not_there_is_named",
    "test_cuda.py::test_auto_is_the_first_device",
    "test_cuda.py::test_an_error_that_sticks_says_so",
    "test_cuda.py::test_prompts_give_the_same_bits_however_they_run[qwen2-bf16-None-bf16]",
    "test_cuda.py::test_prompts_give_the_same_bits_however_they_run[ouro-f16-None-fp16]",
    "test_cuda_step.py::test_a_step_as_one_kernel_has_the_same_bits[ouro-f16-fp16-4-0]",
    "test_cuda_step.py::test_a_step_as_one_kernel_waits_for_nobody_who_went_on[idle-fp16]",
    "test_cuda_step.py::test_a_step_as_one_kernel_waits_for_nobody_who_went_on[idle-int8]",
    "test_cuda_step.py::test_a_step_as_one_kernel_waits_for_nobody_who_went_on[padded rows-fp16]",
    "test_cuda_step.py::test_a_step_as_one_kernel_waits_for_nobody_who_went_on[padded rows-int4]",
    "test_cuda_batch.py::test_a_warm_batch_allocates_nothing_and_launches_one_graph_a_step",
    "test_cuda_batch.py::test_one_that_comes_to_others_begins_with_them_when_what_was_ahead_is_taken",
    "test_cuda_batch.py::test_one_that_lacks_a_page_fails_alone[2]",
    "test_cuda_batch.py::test_a_failed_launch_fails_the_step_and_leaves_all_as_they_were",
    "test_cuda_batch.py::test_beams_and_logits_repeat_a_graph_for_each_number_of_rows",
    "test_cuda_resume.py::test_rows_go_on_at_a_further_loop",
    "test_resume.py::test_prompts_around_pages[shipped-cuda-17]",
    "test_resume.py::test_prompts_around_pages[huginn-cuda-17]",
    "test_cuda.py::test_prompts_give_the_same_bits_however_they_run[shipped-bf16-None-int8]",
    "test_cuda.py::test_prompts_give_the_same_bits_however_they_run[qwen2-f16-None-int4]",
    "test_cuda.py::test_many_rows_attend_with_the_bits_of_few[int8-16-8]",
    "test_cuda.py::test_some_rows_attend_with_the_bits_of_one[bf16-64-0]",
    "test_kv_codes.py::test_the_first_layer_holds_the_codes_of_the_definition[cuda-int8-80]",
    "test_kv_codes.py::test_the_first_layer_holds_the_codes_of_the_definition[cuda-int4-80]",
    "test_kv_codes.py::test_one_layer_rounds_where_the_reference_does[cuda-8-1-int8]",
    "test_kv_codes.py::test_one_layer_rounds_where_the_reference_does[cuda-80-2-int4]",
    "test_cuda.py::test_h_mode_rebuilds_the_bits_of_fp16[huginn-int8-64]",
    "test_persistence.py::test_operands_of_h_mode_come_back[cuda-ouro-int8-20]",
    "test_backend_reference.py::test_fp32_logits_of_every_config[cuda-loop_bare]",
    "test_persistence.py::test_a_cache_comes_back_with_its_bits[cuda-shipped-bf16]",
    "test_persistence.py::test_a_cache_comes_back_with_its_bits[cuda-huginn-int4]",
)


@pytest.mark.skipif("cuda" in backends(), reason="the whole suite runs on CUDA")
def test_a_part_of_the_suite_passes_on_emulated_kernels():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent, env={**os.environ, BACKENDS_VARIABLE: EMULATED}
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout.splitlines()[-1], run.stdout
