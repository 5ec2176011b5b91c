// Quantised K and V of one token, as they are written, and the query as their operand.
//
// int8, and K of int4: scale = max|x| / 127 of the head, code = nearest(x / scale) within +-127. V of int4: per group of
// TL_KV_GROUP dimensions, zero = min x, scale = (max x - zero) / 15, code = nearest((x - zero) / scale) within 0..15. Scales
// and zeros are rounded to bfloat16 before they are used. The query: scale = max|q| / kOperandMax of the head.
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

struct CodeScale {
  uint16_t scale, zero;  // bfloat16
};

// Codes of n <= 32 values. `bad` becomes NaN with a NaN or an infinity among them, and so does the scale.
static CodeScale quantise_int4(int n, const float *x, uint8_t *codes) {
  vf v[2], low = set1(x[0]), high = low, bad = zero();
  for (int i = 0; i * kLanes < n; i++) {
    v[i] = keep_range(load_part(x + i * kLanes, n - i * kLanes), 0, n - i * kLanes, x[0]);
    low = min(low, v[i]);
    high = max(high, v[i]);
    bad = add(bad, mul(v[i], zero()));
  }
  const float bottom = -hmax(sub(zero(), low)), top = hmax(high);
  const uint16_t z = to_bf16(bottom), s = to_bf16((top - from_bf16(z)) * (1.0f / 15.0f) + hsum(bad));
  const float scale = from_bf16(s), inverse = scale >= kLeastScale ? 1.0f / scale : 0.0f;
  for (int i = 0; i * kLanes < n; i++) {
    int32_t t[kLanes];
    const vf code = mul(sub(v[i], set1(from_bf16(z))), set1(inverse));
    store(t, nearest(min(set1(15.0f), max(code, zero()))));
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
  const uint16_t s = to_bf16(hmax(top) * (1.0f / 127.0f) + hsum(bad));
  const float scale = from_bf16(s), inverse = scale >= kLeastScale ? 1.0f / scale : 0.0f;
  for (int i = 0; i < n; i += kLanes) {
    int32_t t[kLanes];
    store(t, nearest(min(set1(127.0f), max(mul(load_part(x + i, n - i), set1(inverse)), set1(-127.0f)))));
    for (int j = 0; j < kLanes && i + j < n; j++) codes[i + j] = (uint8_t)(t[j] + 128);
  }
  return {s, 0};
}

void store_k_codes(int kv_dtype, int head_dim, const float *k, uint8_t *block, int slot) {
  uint8_t codes[256];
  const CodeScale s = quantise_int8(head_dim, k, codes);
  for (int d = 0; d < head_dim; d++) block[(d / 4 * TL_PAGE_POSITIONS + slot) * 4 + d % 4] = codes[d];
  ((uint16_t *)(block + kv_layout(kv_dtype, head_dim).k_scale))[slot] = s.scale;
}

static void store_v_int4(int head_dim, const float *v, const KvLayout &a, uint8_t *block, int slot) {
  uint8_t codes[256 + 32] = {}, *at = block + a.v + slot % 4;
  const int n_pairs = (head_dim + 31) / 32;
  for (int g = 0; g < a.n_groups; g++) {
    const int first = g * a.v_group, n = head_dim - first < a.v_group ? head_dim - first : a.v_group;
    const CodeScale s = quantise_int4(n, v + first, codes + first);
    ((uint16_t *)(block + a.v_scale))[g * TL_PAGE_POSITIONS + slot] = s.scale;
    ((uint16_t *)(block + a.v_zero))[g * TL_PAGE_POSITIONS + slot] = s.zero;
  }
  for (int d = 0; d < head_dim; d += 32)
    for (int j = 0; j < 16; j++) at[((slot / 4 * n_pairs + d / 32) * 16 + j) * 4] = (uint8_t)(codes[d + j] | codes[d + 16 + j] << 4);
}

void store_v_codes(int kv_dtype, int head_dim, const float *v, uint8_t *block, int slot) {
  const KvLayout a = kv_layout(kv_dtype, head_dim);
  if (kv_dtype == TL_INT4) return store_v_int4(head_dim, v, a, block, slot);
  uint8_t codes[256], *at = block + a.v + slot % 4;
  const CodeScale s = quantise_int8(head_dim, v, codes);
  for (int d = 0; d < head_dim; d++) at[(slot / 4 * a.pad + d) * 4] = codes[d];
  ((uint16_t *)(block + a.v_scale))[slot] = s.scale;
}

// A query's head becomes the operand of its dot products, in place.
void operand_q(int head_dim, float *q) {
  const int pad = pad16(head_dim);
  vf x[256 / kLanes], top = zero(), bad = zero();
  for (int i = 0; i * kLanes < pad; i++) {
    x[i] = keep_range(load(q + i * kLanes), 0, head_dim - i * kLanes, 0.0f);
    top = max(top, abs(x[i]));
    bad = add(bad, mul(x[i], zero()));
  }
  const OperandScale s = operand_scale(hmax(top) + hsum(bad));
  const QueryOperands out = query_operands(q, pad);
  vi sum = set1_int(0);
  for (int i = 0; i * kLanes < pad; i++) {
    const vi operands = operands_of(x[i], s);
    split_operands(operands, out.words + i * kLanes / 2);
    sum = add(sum, operands);
  }
  *out.scale = s.scale;
  *out.sum = hsum(sum);
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
