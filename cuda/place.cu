// q, k and v of several rows from the product's outputs to the q buffer and the KV pages; see place.cuh. One CTA a row.
#include "place.cuh"

namespace tl {
namespace {

// 1 / rms over all heads of q or of k of a row (TL_QK_NORM_FULL).
TL_DEVICE float inverse_of_all(const PlaceArgs &a, int row, int first_head, int n_heads, float *partial) {
  const float *from = a.qkv + ((int64_t)row * (a.n_heads + 2 * a.n_kv_heads) + first_head) * a.kv.head_pad;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < n_heads * a.head_dim; i += kThreads) {
    const float x = load_fresh(from + i / a.head_dim * a.kv.head_pad + i % a.head_dim);
    sum = fmaf(x, x, sum);
  }
  return inverse_rms(block_sum(sum, partial), n_heads * a.head_dim, a.eps);
}

TL_DEVICE void store_eight(const PlaceArgs &a, int row, int head, int dim, const float *v, int page, int slot) {
  const int n_qk = a.n_heads + a.n_kv_heads, head_pad = a.kv.head_pad;
  if (head >= a.n_heads && page < 0) return;
  uint8_t *to = head < a.n_heads ? (uint8_t *)a.q + ((int64_t)row * a.n_heads + head) * head_pad * kv_element_nbytes(a.kv.dtype)
                : head < n_qk    ? k_of(a.kv, page, head - a.n_heads)
                                 : v_of(a.kv, page, head - n_qk);
  if (a.kv.dtype == TL_F32) {
    float *p = (float *)to + (head < a.n_heads ? 0 : slot * head_pad) + dim;
#pragma unroll
    for (int i = 0; i < 8; i++) p[i] = v[i];
    return;
  }
  const int at = head < a.n_heads ? dim : head < n_qk ? k_index(slot, dim) : v_index(slot, dim);
  *(uint4 *)((uint16_t *)to + at) = round_eight(a.kv.dtype, v);
  if (head >= a.n_heads) count_clamped(a, v);
}

__global__ void __launch_bounds__(kThreads) place(const PlaceArgs a) {
  float *shared = shared_memory<float>(), *v = shared + warp_id() * kMaxHeadDim, *partial = shared + kWarps * kMaxHeadDim;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = blockIdx.x, pos = a.rows.pos[row];
  const int page = pos < 0 ? -1 : page_of(a.rows, a.rows.seq[row], pos);
  float inverse_q = 0.0f, inverse_k = 0.0f;
  if (a.qk_norm == TL_QK_NORM_FULL) {
    inverse_q = inverse_of_all(a, row, 0, a.n_heads, partial);
    inverse_k = inverse_of_all(a, row, a.n_heads, a.n_kv_heads, partial + kWarps);
  }
  for (int head = warp_id(); head < a.n_heads + 2 * a.n_kv_heads; head += kWarps) {
    finish_head(a, row, head, max(pos, 0), head < a.n_heads ? inverse_q : inverse_k, v);
    const int dim = lane_id() * 8;
    if (dim < a.kv.head_pad) store_eight(a, row, head, dim, v + dim, page, pos % TL_PAGE_POSITIONS);
  }
}

}  // namespace

void launch_place(const Launcher &launcher, const PlaceArgs &args) {
  launcher.launch(place, Shape{dim3(args.rows.n_rows), kThreads, (kWarps * kMaxHeadDim + 2 * kWarps) * 4, 1}, args);
}

}  // namespace tl
