// Attention of one chunk of 64 quantised keys: as attention.cpp, with the products over codes in integers.
//
// With key = scale * code per token, a score is scale * (codes . q). With value = scale * code + zero per token and group of
// dimensions, the output of a group is (P scale) . codes + P . zero. The query and, per group, P scale are 16-bit operands with a
// scale; the sum of P uses P itself. A code of 8 bits carries 128 more, which the integers take away again.
#include "code_dot.h"
#include "kv_layout.h"
#include "rows.h"

namespace tl {
namespace TL_ISA_NS {

constexpr int kBias = -128;  // of codes of 8 bits

// The attention weights of one query as operands, per group of dimensions.
struct Weights {
  uint32_t words[kMaxKvGroups][TL_KEY_CHUNK / 2];
  float scale[kMaxKvGroups], zero[kMaxKvGroups];
  int32_t sum[kMaxKvGroups];
};

// Brings the blocks that come next near, one line of each a step over this chunk's keys.
struct Prefetch {
  const void *const *next;
  int line, n_lines;
  __attribute__((always_inline)) inline void step() {
    if (line >= n_lines) return;
    TL_UNROLL for (int p = 0; p < 4; p++) __builtin_prefetch((const char *)next[p] + line * 64);
    line++;
  }
};

// acc += keys of NP pages . NQ queries.
template <int Pass, int NQ, int NP>
TL_INLINE void dot_keys(const uint8_t *const *page, int n_steps, const uint32_t *const *words, Prefetch &near, vi acc[NQ][NP]) {
  for (int i = 0; i < n_steps; i++) {
    near.step();
    TL_UNROLL for (int p = 0; p < NP; p++) {
      const Codes codes = load_codes(page[p] + i * 64);
      TL_UNROLL for (int j = 0; j < NQ; j++) acc[j][p] = dot<Pass>(acc[j][p], codes, words[j][2 * i + Pass]);
    }
  }
}

// Scores of NQ queries against NP pages.
template <int NQ, int NP>
static void scores(const AttendChunk *c, const KvLayout &a, int first_query, int first_page, float s[][TL_KEY_CHUNK]) {
  vi acc[NQ][NP];
  const uint8_t *page[NP];
  const uint32_t *words[NQ];
  TL_UNROLL for (int j = 0; j < NQ; j++) {
    words[j] = query_operands(c->q[first_query + j], a.pad).words;
    TL_UNROLL for (int p = 0; p < NP; p++) acc[j][p] = set1_int(0);
  }
  TL_UNROLL for (int p = 0; p < NP; p++) page[p] = (const uint8_t *)c->block[first_page + p];
  Prefetch near{c->next, 0, first_query == 0 && c->next[0] ? (int)(a.nbytes / 64) : 0};
  dot_keys<0, NQ, NP>(page, a.pad / 4, words, near, acc);
  TL_UNROLL for (int j = 0; j < NQ; j++) TL_UNROLL for (int p = 0; p < NP; p++) acc[j][p] = between_passes(acc[j][p]);
  dot_keys<1, NQ, NP>(page, a.pad / 4, words, near, acc);
  while (near.line < near.n_lines) near.step();
  TL_UNROLL for (int j = 0; j < NQ; j++) {
    const QueryOperands q = query_operands(c->q[first_query + j], a.pad);
    const vf scale = set1(*q.scale * c->scale);
    TL_UNROLL for (int p = 0; p < NP; p++) {
      const vf product = to_float(add(acc[j][p], set1_int(kBias * *q.sum)));
      store(s[j] + (first_page + p) * kLanes, mul(mul(product, load_bf16((const uint16_t *)(page[p] + a.k_scale))), scale));
    }
  }
}

// P of one query from its scores, masked, as operands; m and l go to the state.
template <int Bits>
static void soften(const AttendChunk *c, const KvLayout &a, int query, const float *s, Weights &w) {
  constexpr float kMasked = -3.0e38f;
  const int lo = c->lo[query], hi = c->hi[query];
  vf x[4], top = set1(kMasked);
  for (int p = 0; p < 4; p++) {
    x[p] = keep_range(load(s + p * kLanes), lo - p * kLanes, hi - p * kLanes, kMasked);
    top = max(top, x[p]);
  }
  const float m = hmax(top);
  for (int p = 0; p < 4; p++) x[p] = keep_range(exp(sub(x[p], set1(m))), lo - p * kLanes, hi - p * kLanes, 0.0f);
  c->state[query][0] = m;
  c->state[query][1] = hsum(add(add(x[0], x[1]), add(x[2], x[3])));
  for (int g = 0; g < a.n_groups; g++) {
    vf y[4], zeros[4], bad = zero();
    top = zero();
    for (int p = 0; p < 4; p++) {
      const uint8_t *block = (const uint8_t *)c->block[p];
      const int at = g * kLanes, begin = lo - p * kLanes, end = hi - p * kLanes;
      y[p] = zeros[p] = zero();
      if (begin >= kLanes || end <= 0) continue;
      y[p] = keep_range(mul(x[p], load_bf16((const uint16_t *)(block + a.v_scale) + at)), begin, end, 0.0f);
      if (Bits == 4) zeros[p] = keep_range(mul(x[p], load_bf16((const uint16_t *)(block + a.v_zero) + at)), begin, end, 0.0f);
      top = max(top, y[p]);
      bad = fma(y[p], zero(), bad);
    }
    const OperandScale scale = operand_scale(hmax(top) + hsum(bad));
    vi sum = set1_int(0);
    for (int p = 0; p < 4; p++) {
      const vi operands = operands_of(y[p], scale);
      split_operands(operands, w.words[g] + p * kLanes / 2);
      if (Bits == 8) sum = add(sum, operands);
    }
    w.scale[g] = scale.scale;
    if (Bits == 8) w.sum[g] = hsum(sum);
    if (Bits == 4) w.zero[g] = hsum(add(add(zeros[0], zeros[1]), add(zeros[2], zeros[3])));
  }
}

// acc += weights of NQ queries . NV vectors of one page's values.
template <int Bits, int Pass, int NQ, int NV>
TL_INLINE void dot_values(const uint8_t *codes, int hop, const uint32_t *const *words, vi acc[NQ][NV]) {
  TL_UNROLL for (int i = 0; i < 4; i++) TL_UNROLL for (int v = 0; v < NV; v += 8 / Bits) {
    const Codes raw = load_codes(codes + i * hop + v * 8 * Bits);
    const Codes first = Bits == 4 ? low_half(raw) : raw;
    TL_UNROLL for (int j = 0; j < NQ; j++) acc[j][v] = dot<Pass>(acc[j][v], first, words[j][2 * i + Pass]);
    if (Bits == 8) continue;
    const Codes second = high_half(raw);
    TL_UNROLL for (int j = 0; j < NQ; j++) acc[j][v + 1] = dot<Pass>(acc[j][v + 1], second, words[j][2 * i + Pass]);
  }
}

template <int Bits, int Pass, int NQ, int NV>
TL_INLINE void dot_value_pages(const AttendChunk *c, const KvLayout &a, int page_begin, int page_end, int d, int g, const Weights *w,
                               vi acc[NQ][NV]) {
  const int hop = Bits == 4 ? (a.pad + 31) / 32 * 64 : a.pad * 4, at = d * 4 * Bits / 8;
  for (int p = page_begin; p < page_end; p++) {
    const uint32_t *words[NQ];
    TL_UNROLL for (int j = 0; j < NQ; j++) words[j] = w[j].words[g] + p * kLanes / 2;
    dot_values<Bits, Pass, NQ, NV>((const uint8_t *)c->block[p] + a.v + at, hop, words, acc);
  }
}

// o of NQ queries over NV vectors of dimensions from d on, all of one group.
template <int Bits, int NQ, int NV>
static void weigh(const AttendChunk *c, const KvLayout &a, int first, int page_begin, int page_end, int d, const Weights *w) {
  const int g = d / a.v_group;
  vi acc[NQ][NV];
  TL_UNROLL for (int j = 0; j < NQ; j++) TL_UNROLL for (int v = 0; v < NV; v++) acc[j][v] = set1_int(0);
  dot_value_pages<Bits, 0, NQ, NV>(c, a, page_begin, page_end, d, g, w, acc);
  TL_UNROLL for (int j = 0; j < NQ; j++) TL_UNROLL for (int v = 0; v < NV; v++) acc[j][v] = between_passes(acc[j][v]);
  dot_value_pages<Bits, 1, NQ, NV>(c, a, page_begin, page_end, d, g, w, acc);
  TL_UNROLL for (int j = 0; j < NQ; j++) TL_UNROLL for (int v = 0; v < NV; v++) {
    if (d + v * kLanes >= a.pad) continue;  // the half pair at the end of int4
    const vf scale = set1(w[j].scale[g]);
    float *o = c->state[first + j] + kStateHead + d + v * kLanes;
    if (Bits == 8)
      store(o, mul(to_float(add(acc[j][v], set1_int(kBias * w[j].sum[g]))), scale));
    else
      store(o, fma(to_float(acc[j][v]), scale, set1(w[j].zero[g])));
  }
}

template <int Bits, int NQ>
static void attend(const AttendChunk *c, const KvLayout &a, int first) {
  int lo = TL_KEY_CHUNK, hi = 0;
  for (int i = first; i < first + NQ; i++) {
    lo = c->lo[i] < lo ? c->lo[i] : lo;
    hi = c->hi[i] > hi ? c->hi[i] : hi;
  }
  alignas(64) float s[NQ][TL_KEY_CHUNK] = {};
  Weights w[NQ];
  const int page_begin = lo / TL_PAGE_POSITIONS, page_end = (hi + TL_PAGE_POSITIONS - 1) / TL_PAGE_POSITIONS;
  if (page_begin == 0 && page_end == 4)
    scores<NQ, 4>(c, a, first, 0, s);
  else
    for (int p = page_begin; p < page_end; p++) scores<NQ, 1>(c, a, first, p, s);
  for (int i = 0; i < NQ; i++) soften<Bits>(c, a, first + i, s[i], w[i]);
  int d = 0;
  if (Bits == 8)
    for (; d + 64 <= a.pad; d += 64) weigh<8, NQ, 4>(c, a, first, page_begin, page_end, d, w);
  constexpr int kStep = Bits == 8 ? 1 : 2;
  for (; d < a.pad; d += kStep * kLanes) weigh<Bits, NQ, kStep>(c, a, first, page_begin, page_end, d, w);
}

template <int Bits>
static void attend_all(const AttendChunk *c) {
  const KvLayout a = kv_layout(c->kv_dtype, c->head_dim);
#if TL_ISA == 3
  switch (c->n_queries) {
    case 6: return attend<Bits, 6>(c, a, 0);
    case 5: return attend<Bits, 5>(c, a, 0);
    case 4: return attend<Bits, 4>(c, a, 0);
    case 3: return attend<Bits, 3>(c, a, 0);
    case 2: return attend<Bits, 2>(c, a, 0);
    default: return attend<Bits, 1>(c, a, 0);
  }
#else
  for (int i = 0; i < c->n_queries; i++) attend<Bits, 1>(c, a, i);
#endif
}

void attend_codes(const AttendChunk *c) { c->kv_dtype == TL_INT8 ? attend_all<8>(c) : attend_all<4>(c); }

}  // namespace TL_ISA_NS
}  // namespace tl
