// Number types, activations and the fixed reduction trees. Everything accumulates in float32; nothing is contracted
// (-fmad=false): where a multiply-add is fused, the code says fmaf.
#pragma once

#include "layout.cuh"

namespace tl {

// ---- 16-bit types: a pair lives in a word, the first value in its low half

struct Bf16 {
  static constexpr bool kQuantised = false;
  static constexpr int kDtype = TL_BF16;
  TL_DEVICE uint32_t pack(float lo, float hi) { return pack_bf16(lo, hi); }
  TL_DEVICE float2 unpack(uint32_t u) { return make_float2(bits_float(u << 16), bits_float(u & 0xffff0000u)); }
  TL_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_bf16(d, a, b0, b1); }
  TL_DEVICE int n_clamped(float, float) { return 0; }
};

struct F16 {
  static constexpr bool kQuantised = false;
  static constexpr int kDtype = TL_F16;
  TL_DEVICE float clamp(float x) { return fminf(65504.0f, fmaxf(-65504.0f, x)); }
  TL_DEVICE uint32_t pack(float lo, float hi) { return pack_f16(clamp(lo), clamp(hi)); }
  TL_DEVICE float2 unpack(uint32_t u) { return unpack_f16(u); }
  TL_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { mma_f16(d, a, b0, b1); }
  // Values that became the largest one only by clamping: below 65519.996 the nearest is 65504.
  TL_DEVICE int n_clamped(float lo, float hi) { return (fabsf(lo) >= 65519.996f) + (fabsf(hi) >= 65519.996f); }
};

TL_DEVICE uint32_t pack_pair(int dtype, float lo, float hi) { return dtype == TL_BF16 ? Bf16::pack(lo, hi) : F16::pack(lo, hi); }
TL_DEVICE float unpack_one(int dtype, uint16_t u) { return dtype == TL_BF16 ? Bf16::unpack(u).x : F16::unpack(u).x; }

// ---- functions

TL_DEVICE float exp_fast(float x) { return exp2_fast(x * 1.44269504f); }

// x / (1 + e^-x)
TL_DEVICE float silu(float x) { return x * reciprocal(1.0f + exp_fast(-x)); }

// The tanh form: x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
TL_DEVICE float gelu(float x) {
  const float u = x * fmaf(x * x, -2.0f * 0.7978845608f * 0.044715f, -2.0f * 0.7978845608f);
  return x * reciprocal(1.0f + exp_fast(u));
}

TL_DEVICE float activate(int act, float x) {
  if (act == TL_ACT_SILU) return silu(x);
  if (act == TL_ACT_GELU) return gelu(x);
  const float p = fmaxf(0.0f, x);
  return p * p;
}

// x = cap * tanh(x * scale / cap), or x * scale without a cap; tanh u = 1 - 2 / (e^(2 u) + 1).
TL_DEVICE float scale_softcap(float x, float scale, float cap) {
  if (scale != 1.0f) x = x * scale;
  if (cap == 0.0f) return x;
  const float u = fminf(80.0f, x * (2.0f / cap));
  return cap * (1.0f - 2.0f / (exp_fast(u) + 1.0f));
}

// ---- trees: lanes 16, 8, 4, 2 and 1 apart, then the warps' sums in a balanced tree

TL_DEVICE float warp_sum(float x) {
  for (int w = 16; w; w /= 2) x = x + __shfl_xor_sync(0xffffffffu, x, w);
  return x;
}

// Sum over kThreads threads, the same for each; `partial` is kWarps shared floats. Holds one barrier, `meet` of them all, and a
// second call may follow at once with other partials.
template <class Meet>
TL_DEVICE float block_sum(float x, float *partial, const Meet &meet) {
  x = warp_sum(x);
  if (lane_id() == 0) partial[warp_id()] = x;
  meet();
  return ((partial[0] + partial[1]) + (partial[2] + partial[3])) + ((partial[4] + partial[5]) + (partial[6] + partial[7]));
}

TL_DEVICE float block_sum(float x, float *partial) {
  return block_sum(x, partial, [] { __syncthreads(); });
}

// 1 / sqrt(mean of squares + eps), two units in the last place
TL_DEVICE float inverse_rms(float sum_of_squares, int n, float eps) { return rsqrtf(sum_of_squares * reciprocal((float)n) + eps); }

}  // namespace tl
