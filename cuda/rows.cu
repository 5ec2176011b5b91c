// Row programs: what lies between two matrix products, in float32, up to the operand of the next. One CTA a row; of many rows one warp
// a row, so that all of them are under way at once.
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
  if (n_rows > 4 * launcher.context.n_multiprocessors && fits_gemv(p) && !p.tail && p.dim <= 8 * kThreads) {
    RowsArgs many = args;
    many.n_rows = n_rows;
    const Shape shape{dim3((n_rows + kWarps - 1) / kWarps), kThreads, 0, 1};
    return launcher.launch(p.dim <= 4 * kThreads ? run_many_rows<1> : run_many_rows<2>, shape, many);
  }
  const Shape shape{dim3(n_rows), kThreads, 2 * kWarps * 4, 1};
  if (fits_gemv(p)) return launcher.launch(run_rows<kGemvQuads, true>, shape, args);
  if (p.dim <= 4 * kThreads * kGemvQuads) return launcher.launch(run_rows<kGemvQuads, false>, shape, args);
  if (p.dim > 4 * kThreads * kMaxQuads) throw std::length_error("rows are longer than this build's kernels take");
  launcher.launch(run_rows<kMaxQuads, false>, shape, args);
}

void launch_copy_rows(const Launcher &launcher, int n, const CopyArgs &args) { launcher.launch(copy_rows, Shape{dim3(n), kThreads, 0, 1}, args); }

}  // namespace tl
