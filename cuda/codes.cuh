// Heads as codes (docs/kv-modes.md): the turn, what int8 and int4 store of K and V, and the 16-bit operands that meet codes. A warp has
// a head: lane i its kDims dims from kDims i on, 8 or 4. What is exact or rounded once is so wherever it is computed, in float32.
#pragma once

#include "math.cuh"

namespace tl {

constexpr int kOperandMax = 127 * 256;               // what both bytes hold with a sign of their own
constexpr float kLeastScale = 7.8886090522101181e-31f;  // 2^-100: a smaller scale makes all codes 0

// K and V as codes; of V kValueBits each.
template <int kBits>
struct Codes {
  static constexpr bool kQuantised = true;
  static constexpr int kValueBits = kBits, kDtype = kBits == 8 ? TL_INT8 : TL_INT4;
  static constexpr int kUnitDims = kBits == 8 ? 16 : TL_KV_GROUP;  // of V, whose bytes lie together
};

// Of floats that are not negative, whose bits are in their order; no number is above all.
TL_DEVICE float warp_largest(float x) { return bits_float(warp_maximum(float_bits(x))); }

// The lane's dims of a head in shared memory, zeros behind its end.
template <int kDims>
TL_DEVICE void load_dims(float (&x)[kDims], const float *head, int head_pad, int lane) {
  const int dim = lane * kDims;
#pragma unroll
  for (int i = 0; i < kDims; i += 4) {
    const float4 four = dim < head_pad ? *(const float4 *)(head + dim + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}

// The head times the Hadamard matrix over sqrt(block), in blocks of so many dims: stages of sums and differences, then one product.
template <int kDims>
TL_DEVICE void turn_head(float (&x)[kDims], int block, float scale, int lane) {
#pragma unroll
  for (int half = 1; half < kDims; half *= 2) {
    if (half >= block) break;
#pragma unroll
    for (int i = 0; i < kDims; i++) {
      if (i & half) continue;
      const float a = x[i], b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
  }
#pragma unroll
  for (int half = kDims; half < 32 * kDims; half *= 2) {
    if (half >= block) break;
    const float sign = lane & half / kDims ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kDims; i++) x[i] = fmaf(x[i], sign, __shfl_xor_sync(0xffffffffu, x[i], half / kDims));
  }
#pragma unroll
  for (int i = 0; i < kDims; i++) x[i] = x[i] * scale;
}

// ---- operands: values are 16-bit integers times a scale

struct OperandScale {
  float scale, inverse;
};
// Of values whose largest magnitude is `top`; too small a one makes all operands 0, a NaN or an infinity the scale no number.
TL_DEVICE OperandScale operand_scale(float top) {
  return {top * (1.0f / kOperandMax) + top * 0.0f, top >= kLeastScale ? (float)kOperandMax / top : 0.0f};
}

TL_DEVICE uint32_t pack_bytes(int a, int b, int c, int d) {
  return (uint32_t)(a & 255) | (uint32_t)(b & 255) << 8 | (uint32_t)(c & 255) << 16 | (uint32_t)(d & 255) << 24;
}

// Four operands: 256 times the high byte and the low byte, both signed.
struct FourOperands {
  uint32_t high, low;
};
// The nearest integers, ties to even: what a float at 1.5 2^23 rounds to. With 128 more the second byte is the high one, and the first one
// the low one but for its highest bit. Of what is no number any: its scale is none.
TL_DEVICE FourOperands four_operands(float a, float b, float c, float d, OperandScale s) {
  constexpr float kOnes = 12582912.0f + 128.0f;
  const uint32_t o[4] = {float_bits(a * s.inverse + kOnes), float_bits(b * s.inverse + kOnes), float_bits(c * s.inverse + kOnes),
                         float_bits(d * s.inverse + kOnes)};
  return {select_bytes(select_bytes(o[0], o[1], 0x51), select_bytes(o[2], o[3], 0x51), 0x5410),
          select_bytes(select_bytes(o[0], o[1], 0x40), select_bytes(o[2], o[3], 0x40), 0x5410) ^ 0x80808080u};
}

// The largest magnitude of a head.
template <int kDims>
TL_DEVICE float largest_of_head(const float (&x)[kDims]) {
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < kDims; i++) top = max_nan(top, fabsf(x[i]));
  return warp_largest(top);
}

// The lane's dims of a turned head of q as operands.
template <int kDims>
struct QueryCodes {
  uint32_t high[kDims / 4], low[kDims / 4];
  float scale;
};

template <int kDims>
TL_DEVICE QueryCodes<kDims> query_codes(const float (&x)[kDims]) {
  const OperandScale s = operand_scale(largest_of_head(x));
  QueryCodes<kDims> q;
#pragma unroll
  for (int i = 0; i < kDims / 4; i++) {
    const FourOperands o = four_operands(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3], s);
    q.high[i] = o.high;
    q.low[i] = o.low;
  }
  q.scale = s.scale;
  return q;
}

// ---- codes: of the lane's dims, four bytes a word, and the bfloat16 scale, above it a zero

template <int kDims>
struct HeadCodes {
  uint32_t byte[kDims / 4], scale;
};

TL_DEVICE float code_inverse(float scale) { return scale >= kLeastScale ? 1.0f / scale : 0.0f; }

template <int kDims>
TL_DEVICE HeadCodes<kDims> codes_int8(const float (&x)[kDims]) {
  const float top = largest_of_head(x);
  const uint32_t scale = Bf16::pack(top * (1.0f / 127.0f) + top * 0.0f, 0.0f);  // an infinity gives NaN too
  const float inverse = code_inverse(Bf16::unpack(scale).x);
  HeadCodes<kDims> codes;
#pragma unroll
  for (int i = 0; i < kDims / 4; i++) {
    int c[4];
#pragma unroll
    for (int j = 0; j < 4; j++) c[j] = nearest(fminf(127.0f, fmaxf(-127.0f, x[4 * i + j] * inverse)));
    codes.byte[i] = pack_bytes(c[0], c[1], c[2], c[3]);
  }
  codes.scale = scale;
  return codes;
}

// A group is the dims of some lanes. The codes of a group's first half have those of its second half above them.
template <int kDims>
TL_DEVICE HeadCodes<kDims> codes_int4(const float (&x)[kDims], int head_dim, int lane) {
  constexpr int kLanes = TL_KV_GROUP / kDims;
  const int n = head_dim - lane * kDims;
  float low = bits_float(0x7f800000u), high = bits_float(0xff800000u);
#pragma unroll
  for (int i = 0; i < kDims; i++)
    if (i < n) low = min_nan(low, x[i]), high = max_nan(high, x[i]);
#pragma unroll
  for (int w = 1; w < kLanes; w *= 2) {
    low = min_nan(low, __shfl_xor_sync(0xffffffffu, low, w));
    high = max_nan(high, __shfl_xor_sync(0xffffffffu, high, w));
  }
  const uint32_t zero = Bf16::pack(low, 0.0f);
  const float z = Bf16::unpack(zero).x;
  const uint32_t scale = Bf16::pack((high - z) * (1.0f / 15.0f) + (low * 0.0f + high * 0.0f), 0.0f);
  const float inverse = code_inverse(Bf16::unpack(scale).x);
  HeadCodes<kDims> codes;
#pragma unroll
  for (int i = 0; i < kDims / 4; i++) {
    int c[4];
#pragma unroll
    for (int j = 0; j < 4; j++) c[j] = 4 * i + j < n ? nearest(fminf(15.0f, fmaxf(0.0f, (x[4 * i + j] - z) * inverse))) : 0;
    const uint32_t four = pack_bytes(c[0], c[1], c[2], c[3]);
    codes.byte[i] = four | __shfl_xor_sync(0xffffffffu, four, kLanes / 2) << 4;
  }
  codes.scale = scale | zero << 16;
  return codes;
}

// What a lane keeps of a row's codes: eight bytes, then the scale.
TL_DEVICE uint4 kept_codes(const HeadCodes<8> &codes) { return make_uint4(codes.byte[0], codes.byte[1], codes.scale, 0); }

TL_DEVICE void store_key_codes(uint8_t *keys, int head_pad, int slot, uint4 codes) {
  *(uint2 *)(keys + k_code_at(slot, lane_id() * 8)) = make_uint2(codes.x, codes.y);
  if (lane_id() == 0) ((uint16_t *)(keys + k_scale_at(head_pad)))[slot] = (uint16_t)codes.z;
}

TL_DEVICE void store_value_codes(int dtype, uint8_t *values, int head_pad, int slot, uint4 codes) {
  const int lane = lane_id(), group = dtype == TL_INT4 ? lane / 4 : 0, at = group * TL_PAGE_POSITIONS + slot;
  if (lane == 0 || (dtype == TL_INT4 && lane % 4 == 0)) {
    ((uint16_t *)(values + v_scale_at(dtype, head_pad)))[at] = (uint16_t)codes.z;
    if (dtype == TL_INT4) ((uint16_t *)(values + v_zero_at(dtype, head_pad)))[at] = (uint16_t)(codes.z >> 16);
  }
  if (dtype == TL_INT4 && lane & 2) return;
  uint8_t *to = values + v_code_row(dtype, lane * 8) * TL_PAGE_POSITIONS + key_place(slot);
#pragma unroll
  for (int i = 0; i < 8; i++) to[i * TL_PAGE_POSITIONS] = (uint8_t)((i < 4 ? codes.x : codes.y) >> i % 4 * 8);
}

// To a page's keys, or its values, of one KV head; by the lanes that have dims. No two slots share a byte.
template <class Kv>
TL_DEVICE void store_codes(uint8_t *page, int head_pad, int slot, uint4 codes, bool values) {
  if (values)
    store_value_codes(Kv::kDtype, page, head_pad, slot, codes);
  else
    store_key_codes(page, head_pad, slot, codes);
}

}  // namespace tl
