#!/usr/bin/env bash
# All that is proven and measured on a GPU, in one go: bench/run_gpu.sh [STEP ...], steps: build check exact suite sanitize bench workloads.
#
#   build     Cython modules and both libraries, in place
#   check     python -m tinyloop_py, and the kernels once on small shapes
#   exact     the bitwise matrix and the comparison with the reference on CUDA, first
#   suite     the whole suite with the CUDA backend required
#   sanitize  compute-sanitizer on the small shapes: memcheck, initcheck, racecheck
#   bench     bench_cuda.py, PyTorch in the same run, kept as bench/results/cuda-<name of the GPU>.json;
#             then with a step as separate kernels
#   workloads server, shared prefixes, batches, what a newcomer waits for, KV modes, resume handles, files and calls with a model of ouro-1.4b's shape, each kept as
#             bench/results/cuda-<its name>.json; WORKLOADS names some of them
#
# On 16 cores that is two calls of ten minutes: `build check exact sanitize`, then `bench workloads suite`.
# PYTHON names the interpreter; it needs cython, setuptools, numpy, cuda-python, pytest, hypothesis, safetensors, tokenizers and torch; with
# pytest-xdist tests run on as many cores as there are, up to 12. The server's workload needs what the extra [serve] brings.
# LOGS is where full outputs go (default build/gpu-logs). Each step has its own time limit: LIMIT seconds, default 300.
# Leaves the GPU's settings as they are. Exits non-zero where a step failed, after running the others.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-300} LOGS=${LOGS:-build/gpu-logs}
mkdir -p "$LOGS"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} TINYLOOP_CUDA=on TINYLOOP_TEST_BACKENDS=cuda PYTHONUNBUFFERED=1
FAILED=()
CORES=$(nproc)
PYTEST=("$PYTHON" -m pytest -q -p no:cacheprovider)
"$PYTHON" -c 'import xdist' 2> /dev/null && PYTEST+=(-n $((CORES < 12 ? CORES : 12)))

step() { # NAME COMMAND...: runs it into a log, prints the end of that
  local name=$1 began=$SECONDS status
  shift
  timeout "$LIMIT" "$@" > "$LOGS/$name.log" 2>&1
  status=$?
  tail -n "${TAIL:-4}" "$LOGS/$name.log"
  echo "==== $name: status $status after $((SECONDS - began)) s"
  [ $status = 0 ] || FAILED+=("$name")
  return $status
}

step_build() {
  # Only this GPU's target: the others are compiled by .ci/run.
  local arch
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 | tr -d .)
  [ "$arch" = 90 ] && arch=90a
  export TINYLOOP_CUDA_ARCHS=${TINYLOOP_CUDA_ARCHS:-$arch}
  TAIL=2 step build "$PYTHON" setup.py build_ext --inplace
}

step_check() {
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw --format=csv,noheader
  TAIL=30 step check-diagnosis "$PYTHON" -m tinyloop_py
  step check-small "$PYTHON" bench/cuda_small.py
}

step_exact() {
  step exact "${PYTEST[@]}" -x tests/test_cuda.py tests/test_cuda_step.py tests/test_cuda_batch.py tests/test_cuda_resume.py tests/test_exactness.py tests/test_backend_reference.py \
    tests/test_window_memory.py tests/test_kv_codes.py
}

step_suite() {
  TAIL=12 step suite "${PYTEST[@]}"
}

step_sanitize() {
  local tool options small
  for tool in memcheck initcheck racecheck; do
    options=(--tool "$tool" --error-exitcode 9) small=(bench/cuda_small.py)
    # cuda-python asks the driver for functions that it may lack; those answers are no faults.
    [ "$tool" = memcheck ] && options+=(--report-api-errors no)
    [ "$tool" = racecheck ] && small+=(--quick)
    TINYLOOP_CUDA_STEP=0 TINYLOOP_CUDA_SERIAL=1 TAIL=12 step "sanitize-$tool" compute-sanitizer "${options[@]}" "$PYTHON" "${small[@]}"
    TAIL=12 step "sanitize-$tool-step" compute-sanitizer "${options[@]}" "$PYTHON" "${small[@]}"
  done
}

step_bench() {
  local name
  name=$(nvidia-smi --query-gpu=name --format=csv,noheader -i 0 | tr 'A-Z ' 'a-z-')
  TAIL=30 step bench "$PYTHON" bench/bench_cuda.py --keep "cuda-$name" ${BENCH_OPTIONS:-}
  TINYLOOP_CUDA_STEP=0 TAIL=30 step bench-kernels "$PYTHON" bench/bench_cuda.py --no-torch --keep "cuda-$name-kernels" ${BENCH_OPTIONS:-}
}

workload() { # NAME OPTION...: a benchmark on the model
  local name=$1
  shift
  case " ${WORKLOADS:-server prefix batch turns kv-modes kv-held resume persistence calls} " in
    *" $name "*) TAIL=24 step "$name" "$PYTHON" "bench/bench_${name//-/_}.py" --model "$MODEL" --device cuda --keep "cuda-$name" "$@" ;;
  esac
}

step_workloads() {
  local folder=/dev/shm
  [ "$(df --output=avail -B1G $folder 2> /dev/null | tail -n 1)" -ge 5 ] 2> /dev/null || folder=$LOGS
  MODEL=$folder/ouro-1.4b.tinyloop
  TAIL=1 step model "$PYTHON" bench/random_models.py ouro-1.4b "$MODEL" || return
  workload server --only shared --max-running 32 --prefill-rows 1024 --requests 32 --rounds 2
  workload prefix --rounds 2
  workload batch --tokens 32 --rounds 2
  workload turns
  workload kv-modes --modes fp16,bf16,int8,int4,h --contexts 256,1024,4096,16384 --rounds 3
  workload resume --rounds 5
  workload kv-held --tokens 1024,4096 --rounds 3
  workload persistence --prefixes 2 --rounds 2 --folder $folder
  workload calls --pairs 50
  rm -f "$MODEL"
}

command -v nvidia-smi > /dev/null || { echo "no nvidia-smi: this script is for a machine with an NVIDIA GPU"; exit 2; }
for what in ${*:-build check exact sanitize bench workloads suite}; do
  case $what in
    build | check | exact | suite | sanitize | bench | workloads) "step_$what" ;;
    *) echo "unknown step $what: build check exact suite sanitize bench workloads"; exit 2 ;;
  esac
  [ "$what" = build ] && [ ${#FAILED[@]} -gt 0 ] && break
done
cp bench/results/cuda-*.json "$LOGS/" 2> /dev/null
[ ${#FAILED[@]} = 0 ] && echo "all steps passed" || { echo "FAILED: ${FAILED[*]}"; exit 1; }
