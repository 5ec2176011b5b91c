// Quantised K and V of one token, as they are written, and the query as their operand.
//
// int8: per head, scale = max|x| / 127 and code = nearest(x / scale) within +-127. int4: per group of TL_KV_GROUP dimensions,
// zero = min x, scale = (max x - zero) / 15, code = nearest((x - zero) / scale) within 0..15. Scales and zeros are rounded to
// bfloat16 before they are used. The query: per head, scale = max|q| / kOperandMax.
#include "code_dot.h"
#include "kv_layout.h"
#include "rows.h"

namespace tl {
namespace TL_ISA_NS {

constexpr float kLeastScale = 7.8886090522101181e-31f;  // 2^-100: a smaller scale makes all codes 0

static uint16_t to_bf16(float x) {
  uint16_t t[kLanes];
  store_bf16(t, set1(x));
  return t[0];
}
static float from_bf16(uint16_t h) { return bits_to_float((uint32_t)h << 16); }

// NaN where one of the lanes is NaN or infinite, else 0.
TL_INLINE float spoilt(vf x) { return hsum(mul(x, zero())); }

struct CodeScale {
  uint16_t scale, zero;  // bfloat16
};

// Codes of n <= 32 values.
static CodeScale quantise_int4(int n, const float *x, uint8_t *codes) {
  vf v[2], low = set1(x[0]), high = low, bad = zero();
  for (int i = 0; i * kLanes < n; i++) {
    v[i] = keep_range(load_part(x + i * kLanes, n - i * kLanes), 0, n - i * kLanes, x[0]);
    low = min(low, v[i]);
    high = max(high, v[i]);
    bad = add(bad, mul(v[i], zero()));
  }
  const float bottom = -hmax(sub(zero(), low)), top = hmax(high);
  const uint16_t z = to_bf16(bottom), s = to_bf16((top - from_bf16(z)) * (1.0f / 15.0f) + spoilt(bad));
  const float scale = from_bf16(s), inverse = scale >= kLeastScale ? 1.0f / scale : 0.0f;
  for (int i = 0; i * kLanes < n; i++) {
    int32_t t[kLanes];
    const vf code = mul(sub(v[i], set1(from_bf16(z))), set1(inverse));
    store(t, nearest(min(set1(15.0f), max(zero(), code))));
    for (int j = 0; j < kLanes && i * kLanes + j < n; j++) codes[i * kLanes + j] = (uint8_t)(t[j] & 15);
  }
  return {s, z};
}

// Codes plus 128 of n values.
static CodeScale quantise_int8(int n, const float *x, uint8_t *codes) {
  vf top = zero(), bad = zero();
  for (int i = 0; i < n; i += kLanes) {
    const vf v = load_part(x + i, n - i);
    top = max(top, abs(v));
    bad = add(bad, mul(v, zero()));
  }
  const uint16_t s = to_bf16(hmax(top) * (1.0f / 127.0f) + spoilt(bad));
  const float scale = from_bf16(s), inverse = scale >= kLeastScale ? 1.0f / scale : 0.0f;
  for (int i = 0; i < n; i += kLanes) {
    int32_t t[kLanes];
    store(t, nearest(min(set1(127.0f), max(set1(-127.0f), mul(load_part(x + i, n - i), set1(inverse))))));
    for (int j = 0; j < kLanes && i + j < n; j++) codes[i + j] = (uint8_t)(t[j] + 128);
  }
  return {s, 0};
}

// Codes of a head, a scale and a zero for each of its groups.
static void quantise(int kv_dtype, int head_dim, const KvLayout &a, const float *x, uint8_t *codes, CodeScale *scales) {
  for (int g = 0; g < a.n_groups; g++) {
    const int first = g * a.group, n = head_dim - first < a.group ? head_dim - first : a.group;
    scales[g] = kv_dtype == TL_INT4 ? quantise_int4(n, x + first, codes + first) : quantise_int8(n, x + first, codes + first);
  }
}

static void store_scales(const KvLayout &a, const CodeScale *scales, uint16_t *scale, uint16_t *zero, int slot) {
  for (int g = 0; g < a.n_groups; g++) {
    scale[g * TL_PAGE_POSITIONS + slot] = scales[g].scale;
    if (a.v_zero != a.k_zero) zero[g * TL_PAGE_POSITIONS + slot] = scales[g].zero;
  }
}

void store_k_codes(int kv_dtype, int head_dim, const float *k, uint8_t *block, int slot) {
  const KvLayout a = kv_layout(kv_dtype, head_dim);
  uint8_t codes[256] = {};
  CodeScale scales[kMaxKvGroups];
  quantise(kv_dtype, head_dim, a, k, codes, scales);
  if (kv_dtype == TL_INT4) {
    for (int d = 0; d < a.pad; d += 8)
      for (int j = 0; j < 4; j++) block[(d / 8 * TL_PAGE_POSITIONS + slot) * 4 + j] = codes[d + j] | codes[d + 4 + j] << 4;
  } else {
    for (int d = 0; d < head_dim; d++) block[(d / 4 * TL_PAGE_POSITIONS + slot) * 4 + d % 4] = codes[d];
  }
  store_scales(a, scales, (uint16_t *)(block + a.k_scale), (uint16_t *)(block + a.k_zero), slot);
}

void store_v_codes(int kv_dtype, int head_dim, const float *v, uint8_t *block, int slot) {
  const KvLayout a = kv_layout(kv_dtype, head_dim);
  uint8_t codes[256 + 32] = {}, *at = block + a.v + slot % 4;
  CodeScale scales[kMaxKvGroups];
  quantise(kv_dtype, head_dim, a, v, codes, scales);
  if (kv_dtype == TL_INT4) {
    const int n_pairs = (head_dim + 31) / 32;
    for (int d = 0; d < head_dim; d += 32)
      for (int j = 0; j < 16; j++) at[((slot / 4 * n_pairs + d / 32) * 16 + j) * 4] = codes[d + j] | codes[d + 16 + j] << 4;
  } else {
    for (int d = 0; d < head_dim; d++) at[(slot / 4 * a.pad + d) * 4] = codes[d];
  }
  store_scales(a, scales, (uint16_t *)(block + a.v_scale), (uint16_t *)(block + a.v_zero), slot);
}

// A query's head becomes the operand of its dot products, in place.
void operand_q(int kv_dtype, int head_dim, float *q) {
  const KvLayout a = kv_layout(kv_dtype, head_dim);
  vf x[256 / kLanes], top = zero(), bad = zero();
  for (int i = 0; i * kLanes < a.pad; i++) {
    x[i] = keep_range(load(q + i * kLanes), 0, head_dim - i * kLanes, 0.0f);
    top = max(top, abs(x[i]));
    bad = add(bad, mul(x[i], zero()));
  }
  const OperandScale s = operand_scale(hmax(top) + spoilt(bad));
  const QueryOperands out = query_operands(q, a.pad);
  int32_t sum[kMaxKvGroups] = {};
  for (int i = 0; i * kLanes < a.pad; i++) {
    const vi operands = nearest(mul(x[i], set1(s.inverse)));
    split_operands(operands, out.words + i * kLanes / 2);
    sum[a.n_groups == 1 ? 0 : i * kLanes / a.group] += hsum(operands);
  }
  *out.scale = s.scale;
  for (int g = 0; g < a.n_groups; g++) out.sum[g] = sum[g];
}

// x = H x / sqrt(block) for every `block` values, H the Hadamard matrix in natural order: one stage of sums and differences
// for each power of two, from 1 on. It is its own inverse.
void rotate(int n, int block, float *x) {
  const float scale = 1.0f / __builtin_sqrtf((float)block);
  for (int half = 1; half < block; half *= 2)
    for (int i = 0; i < n; i += 2 * half)
      for (int j = i; j < i + half; j++) {
        const float a = x[j], b = x[j + half];
        x[j] = a + b;
        x[j + half] = a - b;
      }
  for (int i = 0; i < n; i++) x[i] *= scale;
}

}  // namespace TL_ISA_NS
}  // namespace tl
