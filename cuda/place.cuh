// From a raw head of q, k or v to where attention reads it: RMSNorm, RoPE, one rounding to the KV type, or its codes. One warp a head,
// float32 until the rounding. In a kernel of its own (place.cu), and at the head of the split attention (one row).
#pragma once

#include "codes.cuh"
#include "launch.h"
#include "sums.cuh"

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
  ChunkSums sums;         // or what they are the sums of, where no norm goes over several heads
  int32_t n_heads, n_kv_heads, head_dim;
  int32_t first_head;     // heads before it are not there: q, where K and V are rebuilt
  int32_t qk_norm;        // TL_QK_NORM_*
  float eps;
  const float *q_norm, *k_norm;
  int32_t rotary_dim, interleaved;  // rotary_dim 0: no rope
  const float *cos, *sin;           // (max_pos, rotary_dim / 2)
  void *q;                          // out: (n_rows, n_heads) times query_nbytes()
  int32_t turn;                     // block of dims in which quantised types turn heads, and 1 / sqrt of that
  float turn_scale;
  unsigned long long *n_clamped;    // or NULL
};

TL_DEVICE int page_of(const Rows &r, int seq, int pos) { return r.page_table[seq][(int64_t)r.stage * r.table_stride + pos / TL_PAGE_POSITIONS]; }

// A lane owns pairs of a head's values: pair i is what RoPE turns together for i < rotary_dim / 2, and two neighbours behind.
constexpr int kLanePairs = kMaxHeadDim / 64;

struct Pairs {
  float a[kLanePairs], b[kLanePairs];
};

struct PairIndex {
  int a, b;
};

TL_DEVICE PairIndex pair_index(const PlaceArgs &p, int i) {
  if (p.interleaved || i >= p.rotary_dim / 2) return {2 * i, 2 * i + 1};
  return {i, i + p.rotary_dim / 2};
}

// A pair of values, turned.
TL_DEVICE float2 turn_pair(float a, float b, float cos, float sin) { return make_float2(fmaf(a, cos, -(b * sin)), fmaf(b, cos, a * sin)); }

// Cosines and sines of this lane's pairs at a position; (1, 0) behind those that turn.
TL_DEVICE void load_angles(Pairs &angle, const PlaceArgs &p, int pos) {
  const int half = p.rotary_dim / 2;
#pragma unroll
  for (int j = 0; j < kLanePairs; j++) {
    const int i = lane_id() + 32 * j;
    angle.a[j] = i < half ? p.cos[(int64_t)pos * half + i] : 1.0f;
    angle.b[j] = i < half ? p.sin[(int64_t)pos * half + i] : 0.0f;
  }
}

// Reads one head of head_pad values from `from`, norms and turns it; `v` is the warp's kMaxHeadDim floats, complete for
// all lanes on return. full_inverse: 1 / rms over all heads of q or k, for TL_QK_NORM_FULL.
TL_DEVICE void finish_head(const PlaceArgs &p, const float *from, int head, const Pairs &angle, float full_inverse, float *v) {
  const int n_pairs = p.kv.head_pad / 2, lane = lane_id(), n_qk = p.n_heads + p.n_kv_heads;
  Pairs x;
#pragma unroll
  for (int j = 0; j < kLanePairs; j++) {
    const int i = lane + 32 * j;
    const PairIndex at = pair_index(p, i);
    x.a[j] = i < n_pairs ? from[at.a] : 0.0f;
    x.b[j] = i < n_pairs ? from[at.b] : 0.0f;
  }
  const bool is_q = head < p.n_heads;
  if (p.qk_norm != TL_QK_NORM_NONE && head < n_qk) {
    const float *weight = is_q ? p.q_norm : p.k_norm;
    float inverse = full_inverse;
    if (p.qk_norm == TL_QK_NORM_FULL) {
      weight += (is_q ? head : head - p.n_heads) * p.head_dim;
    } else {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kLanePairs; j++) sum = fmaf(x.b[j], x.b[j], fmaf(x.a[j], x.a[j], sum));  // the padding is zero
      inverse = inverse_rms(warp_sum(sum), p.head_dim, p.eps);
    }
#pragma unroll
    for (int j = 0; j < kLanePairs; j++) {
      const PairIndex at = pair_index(p, lane + 32 * j);
      if (2 * (lane + 32 * j) >= p.head_dim) break;
      x.a[j] = x.a[j] * inverse * weight[at.a];
      x.b[j] = x.b[j] * inverse * weight[at.b];
    }
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kLanePairs; j++) {
    const int i = lane + 32 * j;
    if (i >= n_pairs) break;
    const PairIndex at = pair_index(p, i);
    const bool turns = head < n_qk && i < p.rotary_dim / 2;
    const float2 turned = turn_pair(x.a[j], x.b[j], angle.a[j], angle.b[j]);
    v[at.a] = turns ? turned.x : x.a[j];
    v[at.b] = turns ? turned.y : x.b[j];
  }
  __syncwarp();
}

// Where a head of a row comes from.
TL_DEVICE const float *raw_head(const PlaceArgs &p, int row, int head) {
  return p.qkv + ((int64_t)row * (p.n_heads + 2 * p.n_kv_heads) + head) * p.kv.head_pad;
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
  if (n && a.n_clamped) atomicAdd(a.n_clamped, (unsigned long long)n);
}

// Hands eight finished dims of a head on: q to its buffer, k and v to the page, which is below 0 where the row does nothing.
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

void launch_place(const Launcher &launcher, const PlaceArgs &args);

}  // namespace tl
