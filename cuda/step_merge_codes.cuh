// How a step as one kernel merges where K and V are codes: one CTA of a unit a whole head, as it must be turned back when it is complete
// (docs/kv-modes.md). The functions, and so the bits, are those of attend.cuh and codes.cuh.
#pragma once

#include "step_merge.cuh"

namespace tl {

// Dims of a head that a warp merges, and words of them: a lane has one, for a quarter of a span's chunks.
constexpr int kWarpDims = kStepHeadPad / kWarps, kWarpWords = kWarpDims / 2;
static_assert(4 * kWarpWords == 32 && kSpanChunks == 32 && 2 * TL_CHUNK_GROUP == kSpanChunks, "a span is a warp's lanes, and two groups");

// Queries of a unit that one of its CTAs merges: every n_ranks-th, from `rank` on. Quads of dims, as attention_nbytes takes them, of the most.
TL_BOTH int merged_heads(int n_queries, int rank, int n_ranks) { return (n_queries - rank + n_ranks - 1) / n_ranks; }
inline int merged_head_quads(int n_queries, int head_pad, int n_ranks) { return merged_heads(n_queries, 0, n_ranks) * head_pad / 4; }

#if TL_HOPPER

// What a lane has of a head so far, and where it is kept between spans; and the finished head, turned as it is.
struct HeadTotal {
  float m, l, o[2];
};
TL_DEVICE float4 *kept_total(const AttentionMemory &m, int i, int head_pad) { return (float4 *)((uint8_t *)m.total() + i * 12 * head_pad); }
TL_DEVICE float *turned_head(const AttentionMemory &m, int i, int head_pad) {
  return (float *)((uint8_t *)m.total() + i * 12 * head_pad + 8 * head_pad);
}

// Merges the span's chunks begin .. end - 1 of a warp's dims of a query into its total. Lanes are chunks where factors are found, as in
// merge_span; then lane 8 q + i has word i of the dims for the eight chunks of quarter q. The groups go on side by side, each from its first
// quarter to its second.
TL_DEVICE void merge_head_span(HeadTotal &total, const AttentionMemory &m, const Handover &hand, const uint8_t *query, int word, int chunk_bytes,
                               int begin, int end) {
  constexpr int kGroup = TL_CHUNK_GROUP, kQuarter = kSpanChunks / 4;
  const int lane = hand.lane(), first = begin / kSpanChunks * kSpanChunks, quarter = lane / kWarpWords;
  const uint64_t flag = state_flag(hand, first);
  const uint8_t *const span = query + (int64_t)(first % kHeldChunks) * chunk_bytes;
  const bool alive = first + lane >= begin && first + lane < end;
  const int skipped = min(max(begin - first - quarter * kQuarter, 0), kQuarter), place = quarter * kQuarter + skipped;
  const int n = max(min(end - first - quarter * kQuarter, kQuarter) - skipped, 0);
  float4 *const state = m.state();
  uint64_t ml[1], data[kQuarter];
  Flagged own_word[1];
  const auto ml_at = [&](int) { return span + (int64_t)lane * chunk_bytes; };
  const auto word_at = [&](int i) { return span + (int64_t)(place + i) * chunk_bytes + (1 + word) * 16; };
  ask_words(own_word, alive, ml_at);
  await_words(data, n, flag, word_at);
  await_words(ml, own_word, alive, flag, ml_at);
  const float own = alive ? low_float(ml[0]) : kMasked;
  float top = own;
#pragma unroll
  for (int d = 1; d < kGroup; d *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, top, d, kGroup);
    if (lane % kGroup >= d) top = fmaxf(top, other);
  }
  const float left = __shfl_up_sync(0xffffffffu, top, 1, kGroup);
  const MergeFactors own_factors = merge_factors(lane % kGroup ? left : kMasked, own);
  state[lane] = make_float4(alive ? high_float(ml[0]) : 0.0f, own_factors.earlier, own_factors.later, 0.0f);
  __syncwarp();
  float l = 0.0f, o[2] = {0.0f, 0.0f};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const bool mine = quarter % 2 == half;
    if (half) {
      const float earlier[3] = {__shfl_up_sync(0xffffffffu, l, kWarpWords), __shfl_up_sync(0xffffffffu, o[0], kWarpWords),
                                __shfl_up_sync(0xffffffffu, o[1], kWarpWords)};
      if (mine) l = earlier[0], o[0] = earlier[1], o[1] = earlier[2];
    }
    if (half && end - first <= kQuarter) break;
#pragma unroll
    for (int i = 0; i < kQuarter; i++) {
      const float4 f = state[min(place + i, kSpanChunks - 1)];
      if (i >= n || !mine) continue;
      l = merge_value(l, f.x, {f.y, f.z});
      o[0] = merge_value(o[0], low_float(data[i]), {f.y, f.z});
      o[1] = merge_value(o[1], high_float(data[i]), {f.y, f.z});
    }
  }
#pragma unroll
  for (int group = 0; group < kSpanChunks; group += kGroup) {
    const int from = group / kQuarter * kWarpWords + kWarpWords + lane % kWarpWords;
    const float group_m = __shfl_sync(0xffffffffu, top, group + kGroup - 1), group_l = __shfl_sync(0xffffffffu, l, from);
    const float group_o[2] = {__shfl_sync(0xffffffffu, o[0], from), __shfl_sync(0xffffffffu, o[1], from)};
    if (first + group >= end || first + group + kGroup <= begin || group_m == kMasked) continue;
    const MergeFactors f = merge_factors(total.m, group_m);
    total.l = merge_value(total.l, group_l, f);
    total.o[0] = merge_value(total.o[0], group_o[0], f);
    total.o[1] = merge_value(total.o[1], group_o[1], f);
    total.m = fmaxf(total.m, group_m);
  }
  __syncwarp();
}

// The span of all heads that the CTA merges; after the last one O / l is in turned_head.
TL_DEVICE void merge_heads(const AttentionShape &shape, const Unit &u, const MergeShare &share, const AttentionMemory &m, const Handover &hand,
                           int begin, int end, bool is_first, bool is_last) {
  const int head_pad = shape.head_pad, lane = hand.lane(), word = hand.warp() * kWarpWords + lane % kWarpWords;
  if (hand.warp() * kWarpDims >= head_pad) return;
#pragma unroll 1
  for (int i = 0; i < share.n_mine; i++) {
    float4 *const kept = kept_total(m, i, head_pad) + word;
    HeadTotal total = {kMasked, 0.0f, {0.0f, 0.0f}};
    if (!is_first) total = {kept->x, kept->y, {kept->z, kept->w}};
    merge_head_span(total, m, hand, u.states + (share.first + i * shape.n_ranks) * u.query_bytes, word, u.chunk_bytes, begin, end);
    if (lane >= kWarpWords) continue;
    if (!is_last) {
      *kept = make_float4(total.m, total.l, total.o[0], total.o[1]);
      continue;
    }
    const float inverse = 1.0f / total.l;
    ((float2 *)turned_head(m, i, head_pad))[word] =
        total.l != 0.0f ? make_float2(total.o[0] * inverse, total.o[1] * inverse) : make_float2(0.0f, 0.0f);
  }
}

// The CTA's finished heads, turned back, to the operand of the next product, after the last one the padding. A warp a head.
TL_DEVICE void hand_heads(const StepAttention &t, const AttentionHead &h, const AttentionShape &shape, const Unit &u, const MergeShare &share,
                          const AttentionMemory &m, const Handover &hand) {
  const int lane = hand.lane(), head_dim = shape.head_dim, q_dim = shape.n_kv_heads * shape.group * head_dim;
  const auto hand_on = [&](int column, uint32_t low, uint32_t high) {
    if (h.words) store_flagged(h.words + column * 4, (uint64_t)high << 32 | low, hand.flag);
    put_four(four_at(h.out, column), low, high);
  };
#pragma unroll 1
  for (int i = hand.warp(); i < share.n_mine; i += kWarps) {
    const int column = (u.first_head + share.first + i * shape.n_ranks) * head_dim + lane * 4;
    float x[4];
    load_dims(x, turned_head(m, i, shape.head_pad), shape.head_pad, lane);
    turn_head(x, shape.turn, shape.turn_scale, lane);
    if (lane * 4 < head_dim) hand_on(column, pack_pair(h.out_dtype, x[0], x[1]), pack_pair(h.out_dtype, x[2], x[3]));
    if (lane * 4 != head_dim - 4 || column + 4 != q_dim) continue;
#pragma unroll 1
    for (int padding = q_dim; padding < t.attend.out.n_in; padding += 4) hand_on(padding, 0, 0);
  }
}

#endif

}  // namespace tl
