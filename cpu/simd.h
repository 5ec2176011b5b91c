// Sixteen float lanes, one implementation per code path (TL_ISA); the operations that fix the bits of a result.
//
// Only inline functions in a namespace per path and no standard library: a function shared with another translation
// unit could be emitted with this path's instructions and then be picked by the linker for all of them.
#pragma once

#include <stdint.h>

#if TL_ISA == 3
#define TL_ISA_NS avx512
#elif TL_ISA == 2
#define TL_ISA_NS avx2
#else
#define TL_ISA_NS generic
#endif

#if TL_ISA >= 2
#include <immintrin.h>
#endif

#define TL_INLINE static inline __attribute__((always_inline))

namespace tl {
namespace TL_ISA_NS {

constexpr int kLanes = 16;

TL_INLINE float bits_to_float(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
TL_INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}

}  // namespace TL_ISA_NS
}  // namespace tl

#if TL_ISA == 3
#include "simd_avx512.h"
#elif TL_ISA == 2
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif

namespace tl {
namespace TL_ISA_NS {

TL_INLINE vf zero() { return set1(0.0f); }

// The first n (1..16) lanes of p, the others zero.
TL_INLINE vf load_part(const float *p, int n) {
  if (n >= kLanes) return load(p);
  float t[kLanes] = {};
  for (int i = 0; i < n; i++) t[i] = p[i];
  return load(t);
}
TL_INLINE void store_part(float *p, vf v, int n) {
  if (n >= kLanes) return store(p, v);
  float t[kLanes];
  store(t, v);
  for (int i = 0; i < n; i++) p[i] = t[i];
}

// e^x by range reduction and a degree-6 polynomial, relative error below 2e-7; 0 below -87.3, finite above 88.3.
TL_INLINE vf exp(vf x) {
  const vf low = set1(-87.336544f), high = set1(88.376262f);
  const vf clamped = min(high, max(low, x));  // this operand order keeps a NaN
  const vf n = round(mul(clamped, set1(1.44269504f)));
  vf r = fma(n, set1(-0.693145752f), clamped);
  r = fma(n, set1(-1.42860677e-6f), r);
  vf p = set1(1.38888889e-3f);
  p = fma(p, r, set1(8.33333333e-3f));
  p = fma(p, r, set1(4.16666667e-2f));
  p = fma(p, r, set1(1.66666667e-1f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return zero_where_less(x, low, scale_by_power(p, n));
}

// Round to the nearest float16 and back, clamped to its finite range.
TL_INLINE vf clamp_f16(vf v) { return min(set1(65504.0f), max(set1(-65504.0f), v)); }

}  // namespace TL_ISA_NS
}  // namespace tl
