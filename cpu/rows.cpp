// Operations on one row: RMSNorm, activations, RoPE, the head's scale and softcap, the seeded initial state.
#include "philox.h"
#include "rows.h"

namespace tl {
namespace TL_ISA_NS {

// y = weight * x / sqrt(mean(x^2) + eps); four running sums, then one tree.
void rms_norm(int n, float eps, const float *x, const float *weight, float *y) {
  vf sum[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; j++) {
      const vf v = load(x + i + j * kLanes);
      sum[j] = fma(v, v, sum[j]);
    }
  for (int j = 0; i < n; i += kLanes, j++) {
    const vf v = load_part(x + i, n - i);
    sum[j] = fma(v, v, sum[j]);
  }
  const float mean = hsum(add(add(sum[0], sum[1]), add(sum[2], sum[3]))) / (float)n;
  const vf inverse = set1(1.0f / __builtin_sqrtf(mean + eps));
  for (i = 0; i < n; i += kLanes) store_part(y + i, mul(mul(load_part(x + i, n - i), inverse), load_part(weight + i, n - i)), n - i);
}

void add_rows(int n, const float *a, const float *b, float *y) {
  for (int i = 0; i < n; i += kLanes) store_part(y + i, add(load_part(a + i, n - i), load_part(b + i, n - i)), n - i);
}

// x / (1 + e^-x)
TL_INLINE vf silu(vf x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// The tanh form: x / (1 + e^(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
TL_INLINE vf gelu(vf x) {
  const vf u = mul(x, fma(mul(x, x), set1(-2.0f * 0.7978845608f * 0.044715f), set1(-2.0f * 0.7978845608f)));
  return div(x, add(set1(1.0f), exp(u)));
}

TL_INLINE vf activate(int act, vf x) {
  if (act == TL_ACT_SILU) return silu(x);
  if (act == TL_ACT_GELU) return gelu(x);
  const vf p = max(zero(), x);
  return mul(p, p);
}

void activation(int act, int n, const float *gate, const float *up, float *y) {
  for (int i = 0; i < n; i += kLanes) {
    const vf u = load_part(up + i, n - i);
    store_part(y + i, gate ? mul(activate(act, load_part(gate + i, n - i)), u) : activate(act, u), n - i);
  }
}

// The same over one row of a tile: panels of sixteen, alternately of gate and of up where gated.
void activate_panels(int act, int gated, int n_panels, const float *tile, float *y) {
  if (!gated) return activation(act, n_panels * kLanes, nullptr, tile, y);
  for (int p = 0; p < n_panels; p += 2) store(y + p / 2 * kLanes, mul(activate(act, load(tile + p * kLanes)), load(tile + (p + 1) * kLanes)));
}

// Turns pairs (i, i + rotary_dim / 2), or neighbours (2 i, 2 i + 1), by the angle of their cosine and sine.
void rope(int head_dim, int rotary_dim, int interleaved, const float *cos, const float *sin, float *head) {
  (void)head_dim;
  const int half = rotary_dim / 2;
  if (interleaved) {
    for (int i = 0; i < half; i++) {
      const float a = head[2 * i], b = head[2 * i + 1];
      head[2 * i] = fma_scalar(a, cos[i], -(b * sin[i]));
      head[2 * i + 1] = fma_scalar(b, cos[i], a * sin[i]);
    }
    return;
  }
  for (int i = 0; i < half; i += kLanes) {
    const int n = half - i;
    const vf a = load_part(head + i, n), b = load_part(head + half + i, n);
    const vf c = load_part(cos + i, n), s = load_part(sin + i, n);
    store_part(head + i, fma(a, c, sub(zero(), mul(b, s))), n);
    store_part(head + half + i, fma(b, c, mul(a, s)), n);
  }
}

// x = cap * tanh(x * scale / cap), or x * scale without a cap; tanh u = 1 - 2 / (e^(2 u) + 1).
void scale_softcap(int n, float scale, float cap, float *x) {
  if (scale == 1.0f && cap == 0.0f) return;
  for (int i = 0; i < n; i += kLanes) {
    vf v = mul(load_part(x + i, n - i), set1(scale));
    if (cap != 0.0f) {
      const vf e = exp(mul(v, set1(2.0f / cap)));
      v = mul(set1(cap), sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f)))));
    }
    store_part(x + i, v, n - i);
  }
}

void noise(int n, uint64_t seed, int position, float std, float *x) {
  for (int i = 0; i < n; i += 4) {
    uint32_t word[4];
    philox4x32((uint32_t)(i / 4), (uint32_t)position, kPhiloxState, 0, seed, word);
    for (int j = 0; j < 4 && i + j < n; j++) x[i + j] = std * truncated_normal(unit_interval(word[j]));
  }
}

uint64_t read(const void *data, uint64_t nbytes) {
  const float *p = (const float *)data;
  vf s[4] = {zero(), zero(), zero(), zero()};
  for (uint64_t i = 0; i + 64 <= nbytes / 4; i += 64)
    for (int j = 0; j < 4; j++) s[j] = max(s[j], load(p + i + j * kLanes));
  return float_to_bits(hmax(max(max(s[0], s[1]), max(s[2], s[3]))));
}

}  // namespace TL_ISA_NS
}  // namespace tl
