/* Counter-based noise that every backend draws with the same bits: Philox4x32-10 (Salmon et al., "Parallel random
 * numbers: as easy as 1, 2, 3", SC 2011) and the two distributions that tinyloop takes from it. */
#ifndef TINYLOOP_PHILOX_H
#define TINYLOOP_PHILOX_H

#include <stdint.h>

#include "tl_shared.h"

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

/* Standard normal truncated at 3 sigma, from u in (0, 1): sqrt(2) erfinv(x) with Giles' single-precision polynomials
 * ("Approximating the erfinv function", 2011); error below 3e-6. */
TL_SHARED float truncated_normal(float u) {
  const float x = (2.0f * u - 1.0f) * 0.99730020393674f;
  float w = -tl_log((1.0f - x) * (1.0f + x));
  float p;
  if (w < 5.0f) {
    w = w - 2.5f;
    p = 2.81022636e-08f;
    p = p * w + 3.43273939e-07f;
    p = p * w - 3.5233877e-06f;
    p = p * w - 4.39150654e-06f;
    p = p * w + 0.00021858087f;
    p = p * w - 0.00125372503f;
    p = p * w - 0.00417768164f;
    p = p * w + 0.246640727f;
    p = p * w + 1.50140941f;
  } else {
    w = __builtin_sqrtf(w) - 3.0f;
    p = -0.000200214257f;
    p = p * w + 0.000100950558f;
    p = p * w + 0.00134934322f;
    p = p * w - 0.00367342844f;
    p = p * w + 0.00573950773f;
    p = p * w - 0.0076224613f;
    p = p * w + 0.00943887047f;
    p = p * w + 1.00167406f;
    p = p * w + 2.83297682f;
  }
  return 1.41421356f * p * x;
}

#endif /* TINYLOOP_PHILOX_H */
