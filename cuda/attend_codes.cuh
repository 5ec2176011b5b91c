// Attention on codes (docs/kv-modes.md): q and P are 16-bit operands whose products with codes are exact in int32, by tensor cores on
// their high and low bytes. Maxima, sums and merging are those of attend.cuh, in float32. P of a masked key is -0.
#pragma once

#include "attend.cuh"

namespace tl {

using PageScores = float[2][4];  // of the warp's queries against a page, as score_pages leaves them

TL_DEVICE int whole(int high, int low) { return 256 * high + low; }

// This lane's four keys of a page have their scales, or zeros, in two words.
struct FourScales {
  float v[4];
};
TL_DEVICE FourScales four_scales(const uint8_t *group) {
  const uint32_t *words = (const uint32_t *)group + lane_id() % 4;
  const float2 a = Bf16::unpack(words[0]), b = Bf16::unpack(words[4]);
  return {{a.x, a.y, b.x, b.y}};
}

// Scores of the warp's queries against the 16 keys of a page, in units of log2(e). q_high and q_low: this lane's addresses in the first
// blocks of the tile's bytes; scale: of this lane's two queries, with the softmax's in it.
TL_DEVICE void score_codes(PageScores &s, shared_t q_high, shared_t q_low, const uint8_t *keys, int head_pad, const float (&scale)[2]) {
  const shared_t k_page = shared_of(keys) + lane_id() * 16;
  int high[2][4], low[2][4];
#pragma unroll
  for (int i = 0; i < 8; i++) high[i / 4][i % 4] = low[i / 4][i % 4] = 0;
#pragma unroll 2
  for (int b = 0; b < code_pad(head_pad) / kCodeBlock; b++) {
    uint32_t h[4], l[4], k[4];
    ldmatrix4(k, k_page + b * 512);
    ldmatrix4(h, q_high + b * 512);
    ldmatrix4(l, q_low + b * 512);
    mma_s8(high[0], h, k[0], k[2]);
    mma_s8(high[1], h, k[1], k[3]);
    mma_s8(low[0], l, k[0], k[2]);
    mma_s8(low[1], l, k[1], k[3]);
  }
  const FourScales key = four_scales(keys + k_scale_at(head_pad));
#pragma unroll
  for (int i = 0; i < 8; i++) s[i / 4][i % 4] = ((float)whole(high[i / 4][i % 4], low[i / 4][i % 4]) * key.v[i / 4 * 2 + i % 2]) * scale[i % 4 / 2];
}

// P in place of a page's scores.
TL_DEVICE void soften_codes(PageScores &s, const float (&m)[2]) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float &x = s[i / 4][i % 4];
    x = x == kMasked ? -0.0f : exp2_fast(x - m[i % 4 / 2]);
  }
}

TL_DEVICE float of_read_key(float p, float x) { return float_bits(p) == 0x80000000u ? 0.0f : p * x; }

// Sum over the chunk of a row half's values, laid out as scores are: the tree of sum_of_p.
TL_DEVICE float sum_of_chunk(const PageScores (&x)[kPagesOfChunk], int h) {
  float w[kPagesOfChunk];
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) w[j] = (x[j][0][2 * h] + x[j][0][2 * h + 1]) + (x[j][1][2 * h] + x[j][1][2 * h + 1]);
  float sum = (w[0] + w[1]) + (w[2] + w[3]);
  sum = sum + __shfl_xor_sync(0xffffffffu, sum, 1);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

// The operands that P makes with the scales of a group of V's dims: left operands for two pages each. Zero is P times the zeros.
struct WeightOperands {
  uint32_t high[kPagesOfChunk / 2][4], low[kPagesOfChunk / 2][4];
  float scale[2], zero[2];
};

// values: a chunk's pages in shared memory, page_bytes apart.
template <class Kv>
TL_DEVICE void weigh_group(WeightOperands &w, const PageScores (&p)[kPagesOfChunk], const uint8_t *values, int page_bytes, int head_pad, int group) {
  PageScores y[kPagesOfChunk];
  if (Kv::kValueBits == 4) {
#pragma unroll
    for (int j = 0; j < kPagesOfChunk; j++) {
      const FourScales zero = four_scales(values + j * page_bytes + v_zero_at(Kv::kDtype, head_pad) + group * kScaleBytes);
#pragma unroll
      for (int i = 0; i < 8; i++) y[j][i / 4][i % 4] = of_read_key(p[j][i / 4][i % 4], zero.v[i / 4 * 2 + i % 2]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) w.zero[h] = sum_of_chunk(y, h);
  }
  float top[2] = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    const FourScales scale = four_scales(values + j * page_bytes + v_scale_at(Kv::kDtype, head_pad) + group * kScaleBytes);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float &x = y[j][i / 4][i % 4];
      x = of_read_key(p[j][i / 4][i % 4], scale.v[i / 4 * 2 + i % 2]);
      top[i % 4 / 2] = max_nan(top[i % 4 / 2], fabsf(x));
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float &t = top[h];
    t = max_nan(t, __shfl_xor_sync(0xffffffffu, t, 1));
    t = max_nan(t, __shfl_xor_sync(0xffffffffu, t, 2));
    const OperandScale s = operand_scale(t);
    w.scale[h] = s.scale;
#pragma unroll
    for (int j = 0; j < kPagesOfChunk; j++) {
      const FourOperands o = four_operands(y[j][0][2 * h], y[j][0][2 * h + 1], y[j][1][2 * h], y[j][1][2 * h + 1], s);
      w.high[j / 2][j % 2 * 2 + h] = o.high;
      w.low[j / 2][j % 2 * 2 + h] = o.low;
    }
  }
}

// O of sixteen dims from zero, as weigh_block gives it: codes[i] is what ldmatrix brings of pages 2 i and 2 i + 1.
template <class Kv>
TL_DEVICE void weigh_codes(float (&o)[2][4], const WeightOperands &w, const uint32_t (&codes)[kPagesOfChunk / 2][4]) {
  int high[2][4], low[2][4];
#pragma unroll
  for (int i = 0; i < 8; i++) high[i / 4][i % 4] = low[i / 4][i % 4] = 0;
#pragma unroll
  for (int j = 0; j < kPagesOfChunk / 2; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      mma_s8(high[i], w.high[j], codes[j][2 * i], codes[j][2 * i + 1]);
      mma_s8(low[i], w.low[j], codes[j][2 * i], codes[j][2 * i + 1]);
    }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float product = (float)whole(high[i / 4][i % 4], low[i / 4][i % 4]), scale = w.scale[i % 4 / 2];
    o[i / 4][i % 4] = Kv::kValueBits == 4 ? fmaf(product, scale, w.zero[i % 4 / 2]) : product * scale;
  }
}

// O of a unit's dims over the chunk: put(block of sixteen dims, o). A unit is a row of bytes of each page, sixteen dims of int8 or a
// group of int4; w: of the only group, of int8.
template <class Kv, class Put>
TL_DEVICE void weigh_unit(WeightOperands &w, const PageScores (&p)[kPagesOfChunk], const uint8_t *values, int page_bytes, int head_pad, int unit,
                          Put put) {
  const shared_t own = shared_of(values) + lane_id() / 8 % 2 * page_bytes + lane_id() / 16 * 128 + lane_id() % 8 * 16;  // page, dims, row
  uint32_t codes[kPagesOfChunk / 2][4];
  float o[2][4];
#pragma unroll
  for (int j = 0; j < kPagesOfChunk / 2; j++) ldmatrix4(codes[j], own + 2 * j * page_bytes + unit * 256);
  if constexpr (Kv::kValueBits == 8) {
    weigh_codes<Kv>(o, w, codes);
    put(unit, o);
  } else {
    weigh_group<Kv>(w, p, values, page_bytes, head_pad, unit);
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
      if (unit * 32 + upper * 16 >= head_pad) break;
      uint32_t half[kPagesOfChunk / 2][4];
#pragma unroll
      for (int i = 0; i < kPagesOfChunk * 2; i++) half[i / 4][i % 4] = codes[i / 4][i % 4] >> 4 * upper & 0x0f0f0f0fu;
      weigh_codes<Kv>(o, w, half);
      put(unit * 2 + upper, o);
    }
  }
}

}  // namespace tl
