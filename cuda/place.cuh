// From a raw head of q, k or v to where attention reads it: RMSNorm, RoPE, one rounding to the KV type. One warp a head,
// float32 until the rounding. In a kernel of its own (place.cu), and at the head of the split attention (one row).
#pragma once

#include "launch.h"
#include "math.cuh"

namespace tl {

constexpr int kMaxHeadDim = 256;

struct Rows {  // where a batch's rows are
  const int32_t *pos;                // (n_rows,), below 0: the row does nothing
  const int32_t *seq;                // (n_rows,)
  const int32_t *const *page_table;  // per sequence (n_stages, table_stride)
  int32_t n_rows, stage, table_stride;
};

struct PlaceArgs {
  Rows rows;
  KvLayer kv;
  const float *qkv;       // (n_rows, n_heads + 2 n_kv_heads, head_pad): the product's outputs
  int32_t n_heads, n_kv_heads, head_dim;
  int32_t qk_norm;        // TL_QK_NORM_*
  float eps;
  const float *q_norm, *k_norm;
  int32_t rotary_dim, interleaved;  // rotary_dim 0: no rope
  const float *cos, *sin;           // (max_pos, rotary_dim / 2)
  void *q;                          // out: (n_rows, n_heads, head_pad) of the KV type
  unsigned long long *n_clamped;
};

TL_DEVICE int page_of(const Rows &r, int seq, int pos) {
  return r.page_table[seq][(int64_t)r.stage * r.table_stride + pos / TL_PAGE_POSITIONS];
}

// Reads, norms and turns one head; `v` is the warp's kMaxHeadDim floats, complete for all lanes on return.
// full_inverse: 1 / rms over all heads of q or k, for TL_QK_NORM_FULL.
TL_DEVICE void finish_head(const PlaceArgs &a, int row, int head, int pos, float full_inverse, float *v) {
  const int head_pad = a.kv.head_pad, lane = lane_id(), n_qk = a.n_heads + a.n_kv_heads;
  const float *from = a.qkv + ((int64_t)row * (n_qk + a.n_kv_heads) + head) * head_pad;
  float x[kMaxHeadDim / 32];
#pragma unroll
  for (int i = 0; i < kMaxHeadDim / 32; i++) x[i] = lane + 32 * i < head_pad ? load_fresh(from + lane + 32 * i) : 0.0f;
  const bool is_q = head < a.n_heads;
  if (a.qk_norm != TL_QK_NORM_NONE && head < n_qk) {
    const float *weight = is_q ? a.q_norm : a.k_norm;
    float inverse = full_inverse;
    if (a.qk_norm == TL_QK_NORM_FULL) {
      weight += (is_q ? head : head - a.n_heads) * a.head_dim;
    } else {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kMaxHeadDim / 32; i++) sum = fmaf(x[i], x[i], sum);  // the padding is zero
      inverse = inverse_rms(warp_sum(sum), a.head_dim, a.eps);
    }
#pragma unroll
    for (int i = 0; i < kMaxHeadDim / 32; i++)
      if (lane + 32 * i < a.head_dim) x[i] = x[i] * inverse * weight[lane + 32 * i];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kMaxHeadDim / 32; i++)
    if (lane + 32 * i < head_pad) v[lane + 32 * i] = x[i];
  __syncwarp();
  if (!a.rotary_dim || head >= n_qk) return;
  const int half = a.rotary_dim / 2;
  for (int i = lane; i < half; i += 32) {
    float *first = v + (a.interleaved ? 2 * i : i), *second = v + (a.interleaved ? 2 * i + 1 : half + i);
    const float c = a.cos[(int64_t)pos * half + i], s = a.sin[(int64_t)pos * half + i], x0 = *first, x1 = *second;
    *first = fmaf(x0, c, -(x1 * s));
    *second = fmaf(x1, c, x0 * s);
  }
  __syncwarp();
}

// Eight values, rounded to a 16-bit KV type.
TL_DEVICE uint4 round_eight(int dtype, const float *v) {
  return make_uint4(pack_pair(dtype, v[0], v[1]), pack_pair(dtype, v[2], v[3]), pack_pair(dtype, v[4], v[5]), pack_pair(dtype, v[6], v[7]));
}

TL_DEVICE void count_clamped(const PlaceArgs &a, const float *v) {
  if (a.kv.dtype != TL_F16) return;
  int n = 0;
#pragma unroll
  for (int i = 0; i < 8; i += 2) n += F16::n_clamped(v[i], v[i + 1]);
  if (n) atomicAdd(a.n_clamped, (unsigned long long)n);
}

void launch_place(const Launcher &launcher, const PlaceArgs &args);

}  // namespace tl
