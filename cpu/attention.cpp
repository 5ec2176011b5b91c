// Attention of one chunk of 64 keys at absolute positions, and the merge of chunks.
//
// Keys lie in lanes for q . k (a page stores K as (head_dim, 16)), values' dimensions lie in lanes for P V. A chunk has
// one maximum over its unmasked keys; P = exp(s - max) is rounded to the KV type, and both its sum and P V use the
// rounded P. Queries in flight only share the loads: each one's chain of operations is its own.
#include "kv_layout.h"
#include "rows.h"

#define TL_UNROLL _Pragma("GCC unroll 16")

namespace tl {
namespace TL_ISA_NS {

struct KvF32 {
  using T = float;
  TL_INLINE vf load(const T *p) { return TL_ISA_NS::load(p); }
  TL_INLINE vf round(vf v) { return v; }
  TL_INLINE int store(T *p, vf v, int) {
    TL_ISA_NS::store(p, v);
    return 0;
  }
};

struct KvBf16 {
  using T = uint16_t;
  TL_INLINE vf load(const T *p) { return load_bf16(p); }
  TL_INLINE vf round(vf v) {
    T t[kLanes];
    store_bf16(t, v);
    return load_bf16(t);
  }
  TL_INLINE int store(T *p, vf v, int) {
    store_bf16(p, v);
    return 0;
  }
};

struct KvF16 {
  using T = uint16_t;
  TL_INLINE vf load(const T *p) { return load_f16(p); }
  TL_INLINE vf round(vf v) {
    T t[kLanes];
    store_f16(t, clamp_f16(v));
    return load_f16(t);
  }
  TL_INLINE int store(T *p, vf v, int n) {
    store_f16(p, clamp_f16(v));
    return __builtin_popcount(mask_ge(abs(v), set1(65519.996f)) & ((1u << n) - 1u));  // below that the nearest is 65504
  }
};

// ---- writing

template <class Kv>
static int write_k(int head_dim, const float *k, typename Kv::T *page, int slot) {
  int clamped = 0;
  for (int d = 0; d < head_dim; d += kLanes) {
    typename Kv::T t[kLanes];
    const int n = head_dim - d < kLanes ? head_dim - d : kLanes;
    clamped += Kv::store(t, load_part(k + d, n), n);
    for (int i = 0; i < n; i++) page[(d + i) * TL_PAGE_POSITIONS + slot] = t[i];
  }
  return clamped;
}

template <class Kv>
static int write_v(int head_dim, const float *v, typename Kv::T *page, int slot) {
  int clamped = 0;
  typename Kv::T *row = page + slot * pad16(head_dim);
  for (int d = 0; d < head_dim; d += kLanes) {
    const int n = head_dim - d < kLanes ? head_dim - d : kLanes;
    clamped += Kv::store(row + d, load_part(v + d, n), n);
  }
  return clamped;
}

template <class Kv>
static void round_all(int n, float *q) {
  for (int i = 0; i < n; i += kLanes) store(q + i, Kv::round(load(q + i)));
}

#define TL_BY_KV_TYPE(dtype, call_f32, call_bf16, call_f16) (dtype) == TL_F32 ? (call_f32) : (dtype) == TL_BF16 ? (call_bf16) : (call_f16)

int store_k(int kv_dtype, int head_dim, const float *k, void *page, int slot) {
  if (is_quantised(kv_dtype)) return store_k_codes(kv_dtype, head_dim, k, (uint8_t *)page, slot), 0;
  return TL_BY_KV_TYPE(kv_dtype, write_k<KvF32>(head_dim, k, (float *)page, slot), write_k<KvBf16>(head_dim, k, (uint16_t *)page, slot),
                       write_k<KvF16>(head_dim, k, (uint16_t *)page, slot));
}

int store_v(int kv_dtype, int head_dim, const float *v, void *block, int slot) {
  if (is_quantised(kv_dtype)) return store_v_codes(kv_dtype, head_dim, v, (uint8_t *)block, slot), 0;
  uint8_t *page = (uint8_t *)block + kv_layout(kv_dtype, head_dim).v;
  return TL_BY_KV_TYPE(kv_dtype, write_v<KvF32>(head_dim, v, (float *)page, slot), write_v<KvBf16>(head_dim, v, (uint16_t *)page, slot),
                       write_v<KvF16>(head_dim, v, (uint16_t *)page, slot));
}

void prepare_q(int kv_dtype, int head_dim, float *q) {
  if (is_quantised(kv_dtype)) return operand_q(head_dim, q);
  TL_BY_KV_TYPE(kv_dtype, (void)0, round_all<KvBf16>(pad16(head_dim), q), round_all<KvF16>(pad16(head_dim), q));
}

// ---- one chunk

// One line of every page that comes next, per line of this chunk's: a page's part is short, and the hardware starts anew on each.
template <class Kv>
TL_INLINE void prefetch_next(const AttendChunk *c, int d) {
  const int hop = TL_PAGE_POSITIONS * (int)sizeof(typename Kv::T), at = d * hop, values = c->head_dim * hop;
  if (at % 64) return;
  TL_UNROLL for (int p = 0; p < 4; p++) {
    __builtin_prefetch((const char *)c->next[p] + at);
    __builtin_prefetch((const char *)c->next[p] + values + at);
  }
}

// Scores of NQ queries against NP pages, one chain over head_dim each.
template <class Kv, int NQ, int NP>
static void scores(const AttendChunk *c, int first_query, int first_page, float s[][TL_KEY_CHUNK]) {
  vf acc[NQ][NP];
  TL_UNROLL for (int i = 0; i < NQ; i++) TL_UNROLL for (int p = 0; p < NP; p++) acc[i][p] = zero();
  const typename Kv::T *page[NP];
  TL_UNROLL for (int p = 0; p < NP; p++) page[p] = (const typename Kv::T *)c->block[first_page + p];
  const float *const *q = c->q + first_query;
  const bool prefetch = first_query == 0 && c->next[0];
  for (int d = 0; d < c->head_dim; d++) {
    if (prefetch) prefetch_next<Kv>(c, d);
    vf k[NP];
    TL_UNROLL for (int p = 0; p < NP; p++) k[p] = Kv::load(page[p] + d * TL_PAGE_POSITIONS);
    TL_UNROLL for (int i = 0; i < NQ; i++) {
      const vf b = set1(q[i][d]);
      TL_UNROLL for (int p = 0; p < NP; p++) acc[i][p] = fma(b, k[p], acc[i][p]);
    }
  }
  TL_UNROLL for (int i = 0; i < NQ; i++) TL_UNROLL for (int p = 0; p < NP; p++)
      store(s[i] + (first_page + p) * kLanes, mul(acc[i][p], set1(c->scale)));
}

// P of one query from its scores, masked; returns m and l through the state.
template <class Kv>
static void soften(float s[TL_KEY_CHUNK], int lo, int hi, float *state) {
  constexpr float kMasked = -3.0e38f;
  vf x[4], top = set1(kMasked);
  for (int p = 0; p < 4; p++) {
    x[p] = keep_range(load(s + p * kLanes), lo - p * kLanes, hi - p * kLanes, kMasked);
    top = max(top, x[p]);
  }
  const float m = hmax(top);
  for (int p = 0; p < 4; p++) {
    x[p] = Kv::round(keep_range(exp(sub(x[p], set1(m))), lo - p * kLanes, hi - p * kLanes, 0.0f));
    store(s + p * kLanes, x[p]);
  }
  state[0] = m;
  state[1] = hsum(add(add(x[0], x[1]), add(x[2], x[3])));
}

// o of NQ queries over NV vectors of dimensions from d on: one chain over the keys each.
template <class Kv, int NQ, int NV>
static void weigh(const AttendChunk *c, int first_query, int lo, int hi, float p[][TL_KEY_CHUNK], int d) {
  vf acc[NQ][NV];
  TL_UNROLL for (int i = 0; i < NQ; i++) TL_UNROLL for (int j = 0; j < NV; j++) acc[i][j] = zero();
  const int stride = pad16(c->head_dim), values = c->head_dim * TL_PAGE_POSITIONS + d;
  for (int key = lo; key < hi; key++) {
    const typename Kv::T *row = (const typename Kv::T *)c->block[key / TL_PAGE_POSITIONS] + values + key % TL_PAGE_POSITIONS * stride;
    vf v[NV];
    TL_UNROLL for (int j = 0; j < NV; j++) v[j] = Kv::load(row + j * kLanes);
    TL_UNROLL for (int i = 0; i < NQ; i++) {
      const vf b = set1(p[i][key]);
      TL_UNROLL for (int j = 0; j < NV; j++) acc[i][j] = fma(b, v[j], acc[i][j]);
    }
  }
  TL_UNROLL for (int i = 0; i < NQ; i++) TL_UNROLL for (int j = 0; j < NV; j++)
      store(c->state[first_query + i] + kStateHead + d + j * kLanes, acc[i][j]);
}

template <class Kv, int NQ>
static void attend(const AttendChunk *c, int first) {
  int lo = TL_KEY_CHUNK, hi = 0;
  for (int i = first; i < first + NQ; i++) {
    lo = c->lo[i] < lo ? c->lo[i] : lo;
    hi = c->hi[i] > hi ? c->hi[i] : hi;
  }
  alignas(64) float s[NQ][TL_KEY_CHUNK];
  for (int i = 0; i < NQ; i++)
    for (int k = 0; k < TL_KEY_CHUNK; k += kLanes) store(s[i] + k, zero());
  const int page_begin = lo / TL_PAGE_POSITIONS, page_end = (hi + TL_PAGE_POSITIONS - 1) / TL_PAGE_POSITIONS;
  if (page_begin == 0 && page_end == 4)
    scores<Kv, NQ, 4>(c, first, 0, s);
  else
    for (int p = page_begin; p < page_end; p++) scores<Kv, NQ, 1>(c, first, p, s);
  for (int i = 0; i < NQ; i++) soften<Kv>(s[i], c->lo[first + i], c->hi[first + i], c->state[first + i]);
  const int width = pad16(c->head_dim);
  int d = 0;
  for (; d + 64 <= width; d += 64) weigh<Kv, NQ, 4>(c, first, lo, hi, s, d);
  for (; d < width; d += kLanes) weigh<Kv, NQ, 1>(c, first, lo, hi, s, d);
}

// Queries in tiles that keep NQ * 4 accumulators in registers.
template <class Kv>
static void attend_all(const AttendChunk *c) {
#if TL_ISA == 3
  switch (c->n_queries) {
    case 6: return attend<Kv, 6>(c, 0);
    case 5: return attend<Kv, 5>(c, 0);
    case 4: return attend<Kv, 4>(c, 0);
    case 3: return attend<Kv, 3>(c, 0);
    case 2: return attend<Kv, 2>(c, 0);
    default: return attend<Kv, 1>(c, 0);
  }
#else
  for (int i = 0; i < c->n_queries; i++) attend<Kv, 1>(c, i);
#endif
}

void attend_chunk(const AttendChunk *c) {
  if (is_quantised(c->kv_dtype)) return attend_codes(c);
  TL_BY_KV_TYPE(c->kv_dtype, attend_all<KvF32>(c), attend_all<KvBf16>(c), attend_all<KvF16>(c));
}

// ---- merging

// (m, l, o) of earlier keys absorbs that of later ones, both relative to the larger maximum.
void merge_state(int head_dim_pad, const float *later, float *state) {
  const float m = later[0] > state[0] ? later[0] : state[0];
  alignas(64) float factor[kLanes];
  store(factor, exp(sub(set1(state[0]), set1(m))));
  const float a = factor[0];
  store(factor, exp(sub(set1(later[0]), set1(m))));
  const float b = factor[0];
  state[0] = m;
  state[1] = fma_scalar(later[1], b, state[1] * a);
  float *o = state + kStateHead;
  for (int d = 0; d < head_dim_pad; d += kLanes) store(o + d, fma(load(later + kStateHead + d), set1(b), mul(load(o + d), set1(a))));
}

void finish_state(int head_dim, const float *state, float *o) {
  const vf inverse = set1(1.0f / state[1]);
  for (int d = 0; d < head_dim; d += kLanes) store_part(o + d, mul(load(state + kStateHead + d), inverse), head_dim - d);
}

}  // namespace TL_ISA_NS
}  // namespace tl
