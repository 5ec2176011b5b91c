// Unsigned codes against signed 16-bit operands, summed in int32: quantised keys with a query, quantised values with weights.
//
// A step takes 64 bytes, four codes to each of sixteen lanes, and four operands. Two passes run over the same codes, with one
// word of operands a step and pass: the high bytes and then, 256 times smaller, the low bytes where the processor multiplies
// bytes; even and then odd columns elsewhere. The sum is an integer without rounding, so it is the same on every code path.
#pragma once

#include "kernels.h"
#include "simd.h"

#define TL_UNROLL _Pragma("GCC unroll 16")

namespace tl {
namespace TL_ISA_NS {

constexpr int kOperandMax = 127 * 256;  // what both bytes hold with a sign of their own; 256 codes of 255 times it stay in int32

#if TL_ISA == 3
struct Codes {
  __m512i v;
};
TL_INLINE Codes load_codes(const uint8_t *p) { return {_mm512_loadu_si512(p)}; }
TL_INLINE Codes low_half(Codes c) { return {_mm512_and_si512(c.v, _mm512_set1_epi8(15))}; }
TL_INLINE Codes high_half(Codes c) { return {_mm512_and_si512(_mm512_srli_epi16(c.v, 4), _mm512_set1_epi8(15))}; }
template <int Pass>
TL_INLINE vi dot(vi acc, Codes c, uint32_t word) {
  return {_mm512_dpbusd_epi32(acc.v, c.v, _mm512_set1_epi32((int)word))};
}
TL_INLINE vi between_passes(vi acc) { return {_mm512_slli_epi32(acc.v, 8)}; }
// Sixteen operands as four steps of (first pass, second pass).
TL_INLINE void split_operands(vi x, uint32_t *words) {
  const __m128i low = _mm512_cvtepi32_epi8(x.v), high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(x.v, _mm512_set1_epi32(128)), 8));
  _mm_storeu_si128((__m128i *)words, _mm_unpacklo_epi32(high, low));
  _mm_storeu_si128((__m128i *)(words + 4), _mm_unpackhi_epi32(high, low));
}
#else
#if TL_ISA == 2
struct Codes {
  __m256i a, b;
};
TL_INLINE Codes load_codes(const uint8_t *p) { return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))}; }
TL_INLINE __m256i half_of(__m256i x, int shift) { return _mm256_and_si256(_mm256_srli_epi16(x, shift), _mm256_set1_epi8(15)); }
TL_INLINE Codes low_half(Codes c) { return {half_of(c.a, 0), half_of(c.b, 0)}; }
TL_INLINE Codes high_half(Codes c) { return {half_of(c.a, 4), half_of(c.b, 4)}; }
TL_INLINE __m256i columns_of(__m256i x, int pass) { return _mm256_and_si256(_mm256_srli_epi16(x, 8 * pass), _mm256_set1_epi16(255)); }
template <int Pass>
TL_INLINE vi dot(vi acc, Codes c, uint32_t word) {
  const __m256i w = _mm256_set1_epi32((int)word);
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(columns_of(c.a, Pass), w)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(columns_of(c.b, Pass), w))};
}
#else
struct Codes {
  uint8_t v[64];
};
TL_INLINE Codes load_codes(const uint8_t *p) {
  Codes c;
  __builtin_memcpy(c.v, p, 64);
  return c;
}
TL_INLINE Codes low_half(Codes c) {
  for (int i = 0; i < 64; i++) c.v[i] &= 15;
  return c;
}
TL_INLINE Codes high_half(Codes c) {
  for (int i = 0; i < 64; i++) c.v[i] >>= 4;
  return c;
}
template <int Pass>
TL_INLINE vi dot(vi acc, Codes c, uint32_t word) {
  const int32_t first = (int16_t)(word & 0xffff), second = (int16_t)(word >> 16);
  for (int i = 0; i < 16; i++) acc.v[i] += c.v[4 * i + Pass] * first + c.v[4 * i + 2 + Pass] * second;
  return acc;
}
#endif
TL_INLINE vi between_passes(vi acc) { return acc; }
TL_INLINE void split_operands(vi x, uint32_t *words) {
  int32_t t[kLanes];
  store(t, x);
  for (int i = 0; i < 4; i++)
    for (int pass = 0; pass < 2; pass++) words[2 * i + pass] = (uint32_t)(uint16_t)t[4 * i + pass] | (uint32_t)(uint16_t)t[4 * i + 2 + pass] << 16;
}
#endif

// What sixteen-bit operands stand for: values are operands times the scale.
struct OperandScale {
  float scale, inverse;
};
// Of values whose largest magnitude is `top`; too small a one makes all operands 0, a NaN the scale NaN.
TL_INLINE OperandScale operand_scale(float top) {
  constexpr float kLeast = 7.8886090522101181e-31f;  // 2^-100
  return {top * (1.0f / kOperandMax), top >= kLeast ? (float)kOperandMax / top : 0.0f};
}

// Operands of values; a NaN's is as good as any, since its scale is NaN.
TL_INLINE vi operands_of(vf x, OperandScale s) { return nearest(max(mul(x, set1(s.inverse)), set1((float)-kOperandMax))); }

// A query in its row of q: words, then their scale, then the sum of the operands. It fits, since head_pad is 16 or more.
struct QueryOperands {
  uint32_t *words;
  float *scale;
  int32_t *sum;
};
TL_INLINE QueryOperands query_operands(const float *q, int pad) {
  uint32_t *words = (uint32_t *)q;
  return {words, (float *)(words + pad / 2), (int32_t *)(words + pad / 2 + 1)};
}

}  // namespace TL_ISA_NS
}  // namespace tl
