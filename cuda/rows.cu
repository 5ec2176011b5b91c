// Row programs, one CTA a row: what lies between two matrix products, in float32, up to the operand of the next.
#include "rows.cuh"

#include "epilogue.cuh"

namespace tl {
namespace {

constexpr int kFewQuads = 2;                     // of rows of up to 2,048 values, whose kernels leave registers to those beside them

// emit_operand to memory.
template <int kQuads, bool kPlain>
TL_DEVICE void emit_row(const RowsArgs &a, int row, const float4 (&v)[kQuads]) {
  if (!a.operand.data) return;
  if constexpr (!kPlain) {
    emit_operand<kQuads, kPlain>(a.program, row, v, [&](int column, float lo, float hi, int count) {
      if (count == 2)
        store_operand_pair(a.operand, row, column, lo, hi);
      else
        store_operand(a.operand, row, column, lo);
    });
    return;
  }
  const RowProgram &p = a.program;
  const auto store = [&](const float4(&q)[kQuads], int first) {  // whole quads, in little code: it is run once
#pragma unroll
    for (int j = 0; j < kQuads; j++)
      if (quad_index(j) < p.dim) store_operand_quad(a.operand, row, first + quad_index(j), q[j]);
  };
  store(v, 0);
  if (p.tail) {
    float4 t[kQuads];
    load_quads<kQuads, kPlain>(t, p.tail + (int64_t)row * p.tail_stride, p.dim);
    store(t, p.dim);
  }
  const int n_in = p.tail ? 2 * p.dim : p.dim;
  if ((int)threadIdx.x < pad16(n_in) - n_in) store_operand(a.operand, row, n_in + threadIdx.x, 0.0f);
}

template <int kQuads, bool kPlain>
__global__ void __launch_bounds__(kThreads, kQuads == kFewQuads    ? 4
                                            : kQuads == kGemvQuads ? 2
                                                                   : 1) run_rows(const RowsArgs a) {
  float *partial = shared_memory<float>();
  const int row = blockIdx.x;
  let_next_kernel_start();
  touch_arguments(a);
  EarlyNorm<kQuads, kPlain> early;
  early.load(a.program);
  wait_for_previous_kernel();
  float4 v[kQuads];
  run_row_program<kQuads, kPlain>(a.program, row, true, v, partial, early);
  emit_row<kQuads, kPlain>(a, row, v);
}

constexpr int kSumColumns = 2, kSumReads = 24;  // of a thread: columns, and chunks read at a time

// Rows that begin with sums of chunks. The CTAs of a cluster add up a part of the row each, for the first one, which runs the program.
template <int kQuads, bool kPlain>
__global__ void __launch_bounds__(kThreads, kQuads == kFewQuads ? 2 : 1) run_summed_rows(const RowsArgs a) {
  float *partial = shared_memory<float>(), *summed = partial + 2 * kWarps;
  const int n_ctas = cluster_size(), rank = cluster_rank(), row = blockIdx.x / n_ctas, n = a.program.dim;
  let_next_kernel_start();
  touch_arguments(a);
  const int from = a.program.source_row ? a.program.source_row[row] : row;
  EarlyNorm<kQuads, kPlain> early;
  if (rank == 0) early.load(a.program);
#if TL_HOPPER
  cluster_arrive();
#endif
  wait_for_previous_kernel();
  SummedRow<kQuads, kPlain> begun{summed, n};
  if (rank == 0) begun.load(a.program, from);
#if TL_HOPPER
  cluster_wait();  // there is shared memory to send to
#endif
  float *to = const_cast<float *>(of_cluster_rank(summed, 0));
#pragma unroll 1
  for (int i = (rank * kThreads + threadIdx.x) * kSumColumns; i < n; i += n_ctas * kThreads * kSumColumns) {
    float y[kSumColumns];
    add_chunks<kSumReads>(y, a.program.sums, from, i);
    *(float2 *)(to + i) = make_float2(y[0], y[1]);
  }
  cluster_sync();
  if (rank) return;
  float4 v[kQuads];
  run_row_program<kQuads, kPlain>(a.program, row, true, v, partial, early, begun);
  emit_row<kQuads, kPlain>(a, row, v);
}

__global__ void __launch_bounds__(kThreads) copy_rows(const CopyArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const float *from = a.from + (int64_t)a.source_row[blockIdx.x] * a.stride;
  for (int i = threadIdx.x; i < a.dim; i += kThreads) a.to[(int64_t)blockIdx.x * a.dim + i] = from[i];
}

}  // namespace

void launch_rows(const Launcher &launcher, int n_rows, const RowsArgs &args) {
  const int n = args.program.dim;
  const bool few = is_plain(args.program) && n <= 4 * kThreads * kFewQuads;
  if (n > 4 * kThreads * kMaxQuads) throw std::length_error("rows are longer than this build's kernels take");
  if (!has_sums(args.program)) {
    const Shape shape{dim3(n_rows), kThreads, 2 * kWarps * 4, 1};
    if (few) return launcher.launch(run_rows<kFewQuads, true>, shape, args);
    if (is_plain(args.program)) return launcher.launch(run_rows<kGemvQuads, true>, shape, args);
    return launcher.launch(n <= 4 * kThreads * kGemvQuads ? run_rows<kGemvQuads, false> : run_rows<kMaxQuads, false>, shape, args);
  }
  int cluster = 1;
  while (cluster < 4 && cluster * kThreads * kSumColumns < n) cluster *= 2;
  const Shape shape{dim3(n_rows * cluster), kThreads, (2 * kWarps + round_up(n, 4)) * 4, cluster};
  launcher.launch(few ? run_summed_rows<kFewQuads, true> : run_summed_rows<kMaxQuads, false>, shape, args);
}

void launch_copy_rows(const Launcher &launcher, int n, const CopyArgs &args) { launcher.launch(copy_rows, Shape{dim3(n), kThreads, 0, 1}, args); }

}  // namespace tl
