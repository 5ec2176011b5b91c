/* Counter-based noise that every backend draws with the same bits: Philox4x32-10 (Salmon et al., "Parallel random
 * numbers: as easy as 1, 2, 3", SC 2011) and the two distributions that tinyloop takes from it. */
#ifndef TINYLOOP_PHILOX_H
#define TINYLOOP_PHILOX_H

#include <stdint.h>

#if defined(__CUDACC__)
#define TL_SHARED static __host__ __device__ __forceinline__
#else
#define TL_SHARED static inline __attribute__((always_inline))
#endif

enum { kPhiloxState = 0x746c6e69, kPhiloxGumbel = 0x746c676d }; /* counter word 2: what the noise is for */

TL_SHARED void philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key, uint32_t out[4]) {
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
    const uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)p1;
    c3 = (uint32_t)p0;
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

/* (word / 2^9 + 1/2) / 2^23: exact in float32, inside (0, 1). */
TL_SHARED float unit_interval(uint32_t word) { return ((float)(word >> 9) + 0.5f) * 1.1920928955078125e-07f; }

TL_SHARED float tl_float_of(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}

/* Natural logarithm of a positive normal float (the Cephes polynomial), in plain multiplications and additions. */
TL_SHARED float tl_log(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  int e = (int)(u >> 23) - 126;
  float m = tl_float_of((u & 0x007fffffu) | 0x3f000000u); /* [0.5, 1) */
  const int low = m < 0.707106781f; /* no branch, so that a loop over this vectorises */
  e -= low;
  m = (low ? m + m : m) - 1.0f;
  const float z = m * m;
  float p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  float y = p * m * z;
  y = y + (float)e * -2.12194440e-4f;
  y = y - 0.5f * z;
  return (m + y) + (float)e * 0.693359375f;
}

/* Gumbel noise of a draw, by (seed, position of the drawn token, token id). */
TL_SHARED float gumbel_noise(uint64_t seed, int32_t position, int32_t token) {
  uint32_t word[4];
  philox4x32((uint32_t)token / 4u, (uint32_t)position, kPhiloxGumbel, 0, seed, word);
  return -tl_log(-tl_log(unit_interval(word[token % 4])));
}

/* Standard normal truncated at 3 sigma, from u in (0, 1): Acklam's rational approximation of the inverse distribution. */
TL_SHARED float truncated_normal(float u) {
  const float p = 0.00134989803163f + u * 0.99730020393674f;
  const float tail = p < 0.5f ? p : 1.0f - p;
  if (tail < 0.02425f) {
    const float q = __builtin_sqrtf(-2.0f * tl_log(tail));
    const float num = ((((-7.784894002430293e-03f * q - 3.223964580411365e-01f) * q - 2.400758277161838e+00f) * q -
                        2.549732539343734e+00f) * q + 4.374664141464968e+00f) * q + 2.938163982698783e+00f;
    const float den = (((7.784695709041462e-03f * q + 3.224671290700398e-01f) * q + 2.445134137142996e+00f) * q +
                       3.754408661907416e+00f) * q + 1.0f;
    return p < 0.5f ? num / den : -(num / den);
  }
  const float q = p - 0.5f, r = q * q;
  const float num = (((((-3.969683028665376e+01f * r + 2.209460984245205e+02f) * r - 2.759285104469687e+02f) * r +
                       1.383577518672690e+02f) * r - 3.066479806614716e+01f) * r + 2.506628277459239e+00f) * q;
  const float den = ((((-5.447609879822406e+01f * r + 1.615858368580409e+02f) * r - 1.556989798598866e+02f) * r +
                      6.680131188771972e+01f) * r - 1.328068155288572e+01f) * r + 1.0f;
  return num / den;
}

#endif /* TINYLOOP_PHILOX_H */
