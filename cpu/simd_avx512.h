// AVX-512 (F, BW, DQ, VL, VNNI, BF16): sixteen lanes in one register.
#pragma once

namespace tl {
namespace TL_ISA_NS {

struct vf {
  __m512 v;
};

TL_INLINE vf set1(float x) { return {_mm512_set1_ps(x)}; }
TL_INLINE vf load(const float *p) { return {_mm512_loadu_ps(p)}; }
TL_INLINE void store(float *p, vf a) { _mm512_storeu_ps(p, a.v); }
TL_INLINE vf add(vf a, vf b) { return {_mm512_add_ps(a.v, b.v)}; }
TL_INLINE vf sub(vf a, vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
TL_INLINE vf mul(vf a, vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
TL_INLINE vf div(vf a, vf b) { return {_mm512_div_ps(a.v, b.v)}; }
TL_INLINE vf min(vf a, vf b) { return {_mm512_min_ps(a.v, b.v)}; }
TL_INLINE vf max(vf a, vf b) { return {_mm512_max_ps(a.v, b.v)}; }
TL_INLINE vf fma(vf a, vf b, vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TL_INLINE float fma_scalar(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
TL_INLINE vf abs(vf a) { return {_mm512_abs_ps(a.v)}; }
TL_INLINE vf round(vf a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
TL_INLINE vf scale_by_power(vf p, vf n) {
  const __m512i e = _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), e))};
}
TL_INLINE vf zero_where_less(vf x, vf bound, vf y) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_NLT_UQ), y.v)}; }
// Lanes lo <= i < hi of a, the others fill.
TL_INLINE vf keep_range(vf a, int lo, int hi, float fill) {
  const uint32_t below_hi = hi >= 16 ? 0xffffu : hi <= 0 ? 0u : (1u << hi) - 1u;
  const uint32_t below_lo = lo >= 16 ? 0xffffu : lo <= 0 ? 0u : (1u << lo) - 1u;
  return {_mm512_mask_mov_ps(_mm512_set1_ps(fill), (__mmask16)(below_hi & ~below_lo), a.v)};
}
TL_INLINE uint32_t mask_ge(vf a, vf b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }

// One fixed tree: lanes i and i + 8, then + 4, + 2, + 1.
TL_INLINE float hsum(vf a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
TL_INLINE float hmax(vf a) { return _mm512_reduce_max_ps(a.v); }

TL_INLINE vf load_bf16(const uint16_t *p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16))};
}
TL_INLINE vf load_f16(const uint16_t *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))}; }
TL_INLINE void store_bf16(uint16_t *p, vf a) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a.v)); }
TL_INLINE void store_f16(uint16_t *p, vf a) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Nearest integers as int8; |a| <= 127.
TL_INLINE void store_i8(int8_t *p, vf a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v))); }
TL_INLINE vf load_i8(const int8_t *p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)))}; }

// Sixteen integers.
struct vi {
  __m512i v;
};
TL_INLINE vi set1_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
TL_INLINE void store(int32_t *p, vi a) { _mm512_storeu_si512(p, a.v); }
TL_INLINE vi add(vi a, vi b) { return {_mm512_add_epi32(a.v, b.v)}; }
TL_INLINE vf to_float(vi a) { return {_mm512_cvtepi32_ps(a.v)}; }
TL_INLINE vi nearest(vf a) { return {_mm512_cvtps_epi32(a.v)}; }
TL_INLINE int32_t hsum(vi a) { return _mm512_reduce_add_epi32(a.v); }

// Flush-to-zero and denormals-are-zero for a region.
TL_INLINE uint32_t enter_float_mode() {
  const uint32_t old = _mm_getcsr();
  _mm_setcsr((old & ~0x6000u) | 0x8040u);
  return old;
}
TL_INLINE void leave_float_mode(uint32_t old) { _mm_setcsr(old); }

}  // namespace TL_ISA_NS
}  // namespace tl
