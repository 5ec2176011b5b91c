// Plain C++ for every other machine; the compiler vectorises the loops (NEON on aarch64).
#pragma once

namespace tl {
namespace TL_ISA_NS {

struct vf {
  float v[16];
};

#define TL_LANES(expr)                        \
  vf r;                                       \
  for (int i = 0; i < 16; i++) r.v[i] = expr; \
  return r

// Without a fused instruction, fmaf is a slow library call: multiply and add, rounded twice, are this path's numbers.
TL_INLINE float fma_scalar(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

TL_INLINE vf set1(float x) { TL_LANES(x); }
TL_INLINE vf load(const float *p) { TL_LANES(p[i]); }
TL_INLINE void store(float *p, vf a) {
  for (int i = 0; i < 16; i++) p[i] = a.v[i];
}
TL_INLINE vf add(vf a, vf b) { TL_LANES(a.v[i] + b.v[i]); }
TL_INLINE vf sub(vf a, vf b) { TL_LANES(a.v[i] - b.v[i]); }
TL_INLINE vf mul(vf a, vf b) { TL_LANES(a.v[i] * b.v[i]); }
TL_INLINE vf div(vf a, vf b) { TL_LANES(a.v[i] / b.v[i]); }
TL_INLINE vf min(vf a, vf b) { TL_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
TL_INLINE vf max(vf a, vf b) { TL_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
TL_INLINE vf fma(vf a, vf b, vf c) { TL_LANES(fma_scalar(a.v[i], b.v[i], c.v[i])); }
TL_INLINE vf abs(vf a) { TL_LANES(__builtin_fabsf(a.v[i])); }
TL_INLINE float round_even(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to the nearest even integer
  return __builtin_fabsf(x) < 4194304.0f ? (x + magic) - magic : x;
}
TL_INLINE vf round(vf a) { TL_LANES(round_even(a.v[i])); }
TL_INLINE vf scale_by_power(vf p, vf n) { TL_LANES(bits_to_float(float_to_bits(p.v[i]) + ((uint32_t)(int32_t)n.v[i] << 23))); }
TL_INLINE vf zero_where_less(vf x, vf bound, vf y) { TL_LANES(x.v[i] < bound.v[i] ? 0.0f : y.v[i]); }
TL_INLINE vf keep_range(vf a, int lo, int hi, float fill) { TL_LANES(i >= lo && i < hi ? a.v[i] : fill); }
TL_INLINE uint32_t mask_ge(vf a, vf b) {
  uint32_t m = 0;
  for (int i = 0; i < 16; i++) m |= (uint32_t)(a.v[i] >= b.v[i]) << i;
  return m;
}

// One fixed tree: lanes i and i + 8, then + 4, + 2, + 1.
TL_INLINE float hsum(vf a) {
  for (int w = 8; w; w /= 2)
    for (int i = 0; i < w; i++) a.v[i] = a.v[i] + a.v[i + w];
  return a.v[0];
}
TL_INLINE float hmax(vf a) {
  for (int w = 8; w; w /= 2)
    for (int i = 0; i < w; i++) a.v[i] = a.v[i] > a.v[i + w] ? a.v[i] : a.v[i + w];
  return a.v[0];
}

TL_INLINE float bf16_to_float(uint16_t h) { return bits_to_float((uint32_t)h << 16); }
TL_INLINE uint16_t float_to_bf16(float f) {
  const uint32_t u = float_to_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
TL_INLINE float f16_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest < 0x400u) return bits_to_float(sign | float_to_bits((float)rest * 5.9604644775390625e-08f));  // subnormal: units of 2^-24
  return bits_to_float(sign | ((rest << 13) + 0x38000000u));
}
TL_INLINE uint16_t float_to_f16(float f) {
  const uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
  if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (rest < 0x38800000u) {  // subnormal: adding 0.5 rounds at its unit, 2^-24
    const float t = bits_to_float(rest) + 0.5f;
    return (uint16_t)(sign | (float_to_bits(t) - 0x3f000000u));
  }
  return (uint16_t)(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}

TL_INLINE vf load_bf16(const uint16_t *p) { TL_LANES(bf16_to_float(p[i])); }
TL_INLINE vf load_f16(const uint16_t *p) { TL_LANES(f16_to_float(p[i])); }
TL_INLINE void store_bf16(uint16_t *p, vf a) {
  for (int i = 0; i < 16; i++) p[i] = float_to_bf16(a.v[i]);
}
TL_INLINE void store_f16(uint16_t *p, vf a) {
  for (int i = 0; i < 16; i++) p[i] = float_to_f16(a.v[i]);
}
// Nearest integers as int8; |a| <= 127.
TL_INLINE void store_i8(int8_t *p, vf a) {
  for (int i = 0; i < 16; i++) p[i] = (int8_t)round_even(a.v[i]);
}
TL_INLINE vf load_i8(const int8_t *p) { TL_LANES((float)p[i]); }

#undef TL_LANES

// Sixteen integers.
struct vi {
  int32_t v[16];
};
#define TL_LANES(expr)                        \
  vi r;                                       \
  for (int i = 0; i < 16; i++) r.v[i] = expr; \
  return r
TL_INLINE vi set1_int(int32_t x) { TL_LANES(x); }
TL_INLINE void store(int32_t *p, vi a) {
  for (int i = 0; i < 16; i++) p[i] = a.v[i];
}
TL_INLINE vi add(vi a, vi b) { TL_LANES(a.v[i] + b.v[i]); }
TL_INLINE vi nearest(vf a) { TL_LANES((int32_t)round_even(a.v[i])); }
#undef TL_LANES
TL_INLINE vf to_float(vi a) {
  vf r;
  for (int i = 0; i < 16; i++) r.v[i] = (float)a.v[i];
  return r;
}
TL_INLINE int32_t hsum(vi a) {
  int32_t sum = 0;
  for (int i = 0; i < 16; i++) sum += a.v[i];
  return sum;
}

// Flush-to-zero for a region, where the machine has such a mode.
TL_INLINE uint32_t enter_float_mode() {
#if defined(__SSE2__)
  const uint32_t old = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr((old & ~0x6000u) | 0x8040u);
  return old;
#elif defined(__aarch64__)
  uint64_t old;
  __asm__ volatile("mrs %0, fpcr" : "=r"(old));
  const uint64_t mode = (old & ~(uint64_t)0xc00000) | (1u << 24);
  __asm__ volatile("msr fpcr, %0" : : "r"(mode));
  return (uint32_t)old;
#else
  return 0;
#endif
}
TL_INLINE void leave_float_mode(uint32_t old) {
#if defined(__SSE2__)
  __builtin_ia32_ldmxcsr(old);
#elif defined(__aarch64__)
  const uint64_t mode = old;
  __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#else
  (void)old;
#endif
}

}  // namespace TL_ISA_NS
}  // namespace tl
