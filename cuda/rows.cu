// Row programs, one CTA a row: what lies between two matrix products, in float32, up to the operand of the next.
#include "rows.cuh"

#include "epilogue.cuh"

namespace tl {
namespace {

template <int kQuads, bool kPlain>
__global__ void __launch_bounds__(kThreads, kQuads == kGemvQuads ? 4 : 1) run_rows(const RowsArgs a) {
  float *partial = shared_memory<float>();
  const int row = blockIdx.x;
  let_next_kernel_start();
  wait_for_previous_kernel();
  float4 v[kQuads];
  run_row_program<kQuads, kPlain>(a.program, row, true, v, partial, EarlyNorm<kQuads, kPlain>());
  if (!a.operand.data) return;
  emit_operand<kQuads, kPlain>(a.program, row, v, [&](int column, float lo, float hi, int count) {
    if (count == 2)
      store_operand_pair(a.operand, row, column, lo, hi);
    else
      store_operand(a.operand, row, column, lo);
  });
}

__global__ void __launch_bounds__(kThreads) copy_rows(const CopyArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const float *from = a.from + (int64_t)a.source_row[blockIdx.x] * a.stride;
  for (int i = threadIdx.x; i < a.dim; i += kThreads) a.to[(int64_t)blockIdx.x * a.dim + i] = from[i];
}

}  // namespace

void launch_rows(const Launcher &launcher, int n_rows, const RowsArgs &args) {
  const Shape shape{dim3(n_rows), kThreads, 2 * kWarps * 4, 1};
  if (fits_gemv(args.program)) return launcher.launch(run_rows<kGemvQuads, true>, shape, args);
  if (args.program.dim <= 4 * kThreads * kGemvQuads) return launcher.launch(run_rows<kGemvQuads, false>, shape, args);
  if (args.program.dim > 4 * kThreads * kMaxQuads) throw std::length_error("rows are longer than this build's kernels take");
  launcher.launch(run_rows<kMaxQuads, false>, shape, args);
}

void launch_copy_rows(const Launcher &launcher, int n, const CopyArgs &args) { launcher.launch(copy_rows, Shape{dim3(n), kThreads, 0, 1}, args); }

}  // namespace tl
