// Row programs: what lies between two matrix products, in float32, up to the operand of the next. One CTA a row; of many rows one warp
// a row, so that all of them are under way at once.
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

// Two values of a row, of which the second may not exist.
template <bool kAligned>
TL_DEVICE float2 load_two(const float *p, int i, int n) {
  if constexpr (kAligned) return *(const float2 *)(p + i);
  return make_float2(p[i], i + 1 < n ? p[i + 1] : 0.0f);
}

// Rows that begin with sums of chunks. The CTAs of a cluster add up a part of the row each, and what is added next, for the first one, which
// runs the program.
template <int kQuads, bool kPlain>
__global__ void __launch_bounds__(kThreads, kQuads == kFewQuads ? 2 : 1) run_summed_rows(const RowsArgs a) {
  const RowProgram &p = a.program;
  float *partial = shared_memory<float>(), *summed = partial + 2 * kWarps;
  const int n_ctas = cluster_size(), rank = cluster_rank(), row = blockIdx.x / n_ctas, n = p.dim;
  let_next_kernel_start();
  touch_arguments(a);
  const int from = p.source_row ? p.source_row[row] : row;
  const bool adds = p.n_ops > 1 && p.op[1].kind == kRowAdd;
  EarlyNorm<kQuads, kPlain> early;
  if (rank == 0) early.load(p);
#if TL_HOPPER
  const shared_t landed = shared_of(summed + round_up(n, 4));
  if (rank == 0 && threadIdx.x == 0) {
    barrier_init(landed, 1);
    barrier_init_done();
    barrier_arrive_expecting(landed, (n + 1) / 2 * 8);
  }
  cluster_arrive();
#endif
  wait_for_previous_kernel();
#if TL_HOPPER
  cluster_wait();  // there are a barrier and shared memory to send to
#endif
#pragma unroll 1
  for (int i = (rank * kThreads + threadIdx.x) * kSumColumns; i < n; i += n_ctas * kThreads * kSumColumns) {
    float y[kSumColumns];
    float2 x = make_float2(0.0f, 0.0f);
    if (adds) x = load_two<kPlain>(p.op[1].p + (int64_t)from * p.op[1].stride, i, n);
    add_chunks<kSumReads>(y, p.sums, from, i);
    const float2 v = adds ? make_float2(y[0] + x.x, y[1] + x.y) : make_float2(y[0], y[1]);
#if TL_HOPPER
    if (n_ctas > 1) {  // what sends needs a cluster
      send8(shared_of(summed + i), v, landed, 0);
      continue;
    }
#endif
    *(float2 *)(summed + i) = v;
  }
  if (rank) return;
#if TL_HOPPER
  if (n_ctas > 1) barrier_wait(landed, 0);
#endif
  if (n_ctas == 1) __syncthreads();
  float4 v[kQuads];
  run_row_program<kQuads, kPlain>(p, row, true, v, partial, early, SummedRow<kQuads, kPlain>{summed, n, adds});
  emit_row<kQuads, kPlain>(a, row, v);
}

// ---- a warp's row. Its lanes have what the threads of a CTA would: lane i's quad kWarps j + w is quad j of thread 32 w + i, so that
// norms have the same tree.

TL_DEVICE int warp_quad_index(int j) { return 4 * (j % kWarps * 32 + lane_id() + kThreads * (j / kWarps)); }

template <int n>
TL_DEVICE void load_warp_quads(float4 (&q)[n], const float *p, int dim) {
#pragma unroll
  for (int j = 0; j < n; j++) q[j] = warp_quad_index(j) < dim ? *(const float4 *)(p + warp_quad_index(j)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

template <int n>
TL_DEVICE void norm_warp_quads(float4 (&v)[n], const float4 (&weight)[n], int dim, float eps) {
  float sum[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    sum[w] = 0.0f;
#pragma unroll
    for (int j = w; j < n; j += kWarps)
      if (warp_quad_index(j) < dim) sum[w] = fmaf(v[j].w, v[j].w, fmaf(v[j].z, v[j].z, fmaf(v[j].y, v[j].y, fmaf(v[j].x, v[j].x, sum[w]))));
    sum[w] = warp_sum(sum[w]);
  }
  const float inverse = inverse_rms(((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7])), dim, eps);
#pragma unroll
  for (int j = 0; j < n; j++)
    v[j] =
        make_float4(v[j].x * inverse * weight[j].x, v[j].y * inverse * weight[j].y, v[j].z * inverse * weight[j].z, v[j].w * inverse * weight[j].w);
}

// Programs that pass fits_gemv, of rows of up to 1,024 * kQuads values, without a tail.
template <int kQuads>
__global__ void __launch_bounds__(kThreads, 1) run_many_rows(const RowsArgs a) {
  constexpr int n = kQuads * kWarps;
  const RowProgram &p = a.program;
  const int row = blockIdx.x * kWarps + warp_id(), dim = p.dim;
  const bool norms_last = p.n_ops && p.op[p.n_ops - 1].kind == kRowNorm;
  float4 v[n], w[n], last[n];
  if (norms_last) load_warp_quads(last, p.op[p.n_ops - 1].p, dim);
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (row >= a.n_rows) return;
  const int from = p.source_row ? p.source_row[row] : row;
#pragma unroll 1
  for (int o = 0; o < p.n_ops - norms_last; o++) {
    const RowOp &op = p.op[o];
    if (op.kind == kRowLoad) {
      load_warp_quads(v, op.p + (int64_t)from * op.stride, dim);
    } else if (op.kind == kRowAdd) {
      load_warp_quads(w, op.p + (int64_t)from * op.stride, dim);
#pragma unroll
      for (int j = 0; j < n; j++) v[j] = make_float4(v[j].x + w[j].x, v[j].y + w[j].y, v[j].z + w[j].z, v[j].w + w[j].w);
    } else if (op.kind == kRowNorm) {
      load_warp_quads(w, op.p, dim);
      norm_warp_quads(v, w, dim, p.eps);
    } else {
      float *to = const_cast<float *>(op.p) + (int64_t)row * op.stride;
#pragma unroll
      for (int j = 0; j < n; j++)
        if (warp_quad_index(j) < dim) *(float4 *)(to + warp_quad_index(j)) = v[j];
    }
  }
  if (norms_last) norm_warp_quads(v, last, dim, p.eps);
  const Operand &to = a.operand;
  if (!to.data) return;
  if (to.dtype != TL_F32 && to.layout == kOperandTiles) {
    uint16_t *first = (uint16_t *)to.data + operand_index(to, row, warp_quad_index(0));
    const int step = 2 * to.n_groups * 512;  // to the values 128 columns further
#pragma unroll
    for (int j = 0; j < n; j++)
      if (warp_quad_index(j) < dim)
        *(uint2 *)(first + j * step) = make_uint2(pack_pair(to.dtype, v[j].x, v[j].y), pack_pair(to.dtype, v[j].z, v[j].w));
  } else {
#pragma unroll
    for (int j = 0; j < n; j++)
      if (warp_quad_index(j) < dim) store_operand_quad(to, row, warp_quad_index(j), v[j]);
  }
  if (lane_id() < pad16(dim) - dim) store_operand(to, row, dim + lane_id(), 0.0f);
}

__global__ void __launch_bounds__(kThreads) copy_rows(const CopyArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const float *from = a.from + (int64_t)a.source_row[blockIdx.x] * a.stride;
  for (int i = threadIdx.x; i < a.dim; i += kThreads) a.to[(int64_t)blockIdx.x * a.dim + i] = from[i];
}

}  // namespace

void launch_rows(const Launcher &launcher, int n_rows, const RowsArgs &args) {
  const RowProgram &p = args.program;
  const bool few = is_plain(p) && p.dim <= 4 * kThreads * kFewQuads;
  if (p.dim > 4 * kThreads * kMaxQuads) throw std::length_error("rows are longer than this build's kernels take");
  if (n_rows > 4 * launcher.context.n_multiprocessors && fits_gemv(p) && !p.tail && p.dim <= 8 * kThreads) {
    RowsArgs many = args;
    many.n_rows = n_rows;
    const Shape shape{dim3((n_rows + kWarps - 1) / kWarps), kThreads, 0, 1};
    return launcher.launch(p.dim <= 4 * kThreads ? run_many_rows<1> : run_many_rows<2>, shape, many);
  }
  if (!has_sums(p)) {
    const Shape shape{dim3(n_rows), kThreads, 2 * kWarps * 4, 1};
    if (few) return launcher.launch(run_rows<kFewQuads, true>, shape, args);
    if (is_plain(p)) return launcher.launch(run_rows<kGemvQuads, true>, shape, args);
    return launcher.launch(p.dim <= 4 * kThreads * kGemvQuads ? run_rows<kGemvQuads, false> : run_rows<kMaxQuads, false>, shape, args);
  }
  int cluster = 1;
  while (cluster < 4 && cluster * kThreads * kSumColumns < p.dim) cluster *= 2;
  const Shape shape{dim3(n_rows * cluster), kThreads, (2 * kWarps + round_up(p.dim, 4)) * 4 + 16, cluster};
  launcher.launch(few ? run_summed_rows<kFewQuads, true> : run_summed_rows<kMaxQuads, false>, shape, args);
}

void launch_copy_rows(const Launcher &launcher, int n, const CopyArgs &args) { launcher.launch(copy_rows, Shape{dim3(n), kThreads, 0, 1}, args); }

}  // namespace tl
