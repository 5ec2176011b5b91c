// Row programs, one CTA a row: what lies between two matrix products, in float32, up to the operand of the next.
#include "rows.cuh"

#include "epilogue.cuh"

namespace tl {
namespace {

__global__ void __launch_bounds__(kThreads) run_rows(const RowsArgs a) {
  float *v = shared_memory<float>();
  let_next_kernel_start();
  EarlyWeights early;
  early.load(a.program);
  wait_for_previous_kernel();
  const int row = blockIdx.x;
  run_row_program(a.program, row, true, v, early);
  if (a.operand.data)
    emit_operand(a.program, row, v, [&](int column, float lo, float hi) { store_operand_pair(a.operand, row, column, lo, hi); });
}

__global__ void __launch_bounds__(kThreads) copy_rows(const CopyArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const float *from = a.from + (int64_t)load_fresh(a.source_row + blockIdx.x) * a.stride;
  for (int i = threadIdx.x; i < a.dim; i += kThreads) a.to[(int64_t)blockIdx.x * a.dim + i] = load_fresh(from + i);
}

}  // namespace

void launch_rows(const Launcher &launcher, int n_rows, const RowsArgs &args) {
  launcher.launch(run_rows, Shape{dim3(n_rows), kThreads, row_program_floats(args.program.dim) * 4, 1}, args);
}

void launch_copy_rows(const Launcher &launcher, int n, const CopyArgs &args) {
  launcher.launch(copy_rows, Shape{dim3(n), kThreads, 0, 1}, args);
}

}  // namespace tl
