// AVX2, FMA and F16C: sixteen lanes in two registers.
#pragma once

namespace tl {
namespace TL_ISA_NS {

struct vf {
  __m256 a, b;
};

TL_INLINE vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TL_INLINE vf load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TL_INLINE void store(float *p, vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
TL_INLINE vf add(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
TL_INLINE vf sub(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
TL_INLINE vf mul(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
TL_INLINE vf div(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
TL_INLINE vf min(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
TL_INLINE vf max(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
TL_INLINE vf fma(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
TL_INLINE float fma_scalar(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
TL_INLINE vf abs(vf x) {
  const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
TL_INLINE vf round(vf x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
TL_INLINE __m256 scale_half(__m256 p, __m256 n) {
  const __m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), e));
}
TL_INLINE vf scale_by_power(vf p, vf n) { return {scale_half(p.a, n.a), scale_half(p.b, n.b)}; }
TL_INLINE vf zero_where_less(vf x, vf bound, vf y) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, bound.a, _CMP_NLT_UQ), y.a), _mm256_and_ps(_mm256_cmp_ps(x.b, bound.b, _CMP_NLT_UQ), y.b)};
}
TL_INLINE __m256 keep_half(__m256 x, int lo, int hi, int first, float fill) {
  const __m256i i = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
  const __m256i in = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), i), _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), i));
  return _mm256_blendv_ps(_mm256_set1_ps(fill), x, _mm256_castsi256_ps(in));
}
TL_INLINE vf keep_range(vf x, int lo, int hi, float fill) { return {keep_half(x.a, lo, hi, 0, fill), keep_half(x.b, lo, hi, 8, fill)}; }
TL_INLINE uint32_t mask_ge(vf x, vf y) {
  return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)) | (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)) << 8;
}

// One fixed tree: lanes i and i + 8, then + 4, + 2, + 1.
TL_INLINE float hsum(vf x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
TL_INLINE float hmax(vf x) {
  const __m256 h = _mm256_max_ps(x.a, x.b);
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}

TL_INLINE __m256 widen_bf16(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
TL_INLINE vf load_bf16(const uint16_t *p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
TL_INLINE vf load_f16(const uint16_t *p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
TL_INLINE __m128i narrow_bf16(__m256 x) {  // nearest even; NaN stays NaN
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i s = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
}
TL_INLINE void store_bf16(uint16_t *p, vf x) {
  _mm_storeu_si128((__m128i *)p, narrow_bf16(x.a));
  _mm_storeu_si128((__m128i *)(p + 8), narrow_bf16(x.b));
}
TL_INLINE void store_f16(uint16_t *p, vf x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, mode));
  _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.b, mode));
}
// Nearest integers as int8; |x| <= 127.
TL_INLINE void store_i8(int8_t *p, vf x) {
  const __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xd8);
  _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
TL_INLINE vf load_i8(const int8_t *p) {
  const __m128i b = _mm_loadu_si128((const __m128i *)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(b, 8)))};
}

// Sixteen integers.
struct vi {
  __m256i a, b;
};
TL_INLINE vi set1_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
TL_INLINE void store(int32_t *p, vi x) {
  _mm256_storeu_si256((__m256i *)p, x.a);
  _mm256_storeu_si256((__m256i *)(p + 8), x.b);
}
TL_INLINE vi add(vi x, vi y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
TL_INLINE vf to_float(vi x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
TL_INLINE vi nearest(vf x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
TL_INLINE int32_t hsum(vi x) {
  alignas(32) int32_t t[8];
  _mm256_store_si256((__m256i *)t, _mm256_add_epi32(x.a, x.b));
  return t[0] + t[1] + t[2] + t[3] + t[4] + t[5] + t[6] + t[7];
}

// Flush-to-zero and denormals-are-zero for a region.
TL_INLINE uint32_t enter_float_mode() {
  const uint32_t old = _mm_getcsr();
  _mm_setcsr((old & ~0x6000u) | 0x8040u);
  return old;
}
TL_INLINE void leave_float_mode(uint32_t old) { _mm_setcsr(old); }

}  // namespace TL_ISA_NS
}  // namespace tl
