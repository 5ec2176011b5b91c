// How a step as one kernel merges where K and V are codes: one CTA of a unit a whole head, as it must be turned back when it is complete
// (docs/kv-modes.md), each of its warps a group of chunks. The functions, and so the bits, are those of attend.cuh and codes.cuh.
#pragma once

#include "step_merge.cuh"

namespace tl {

constexpr int kHeadSpan = kWarps * TL_CHUNK_GROUP;  // chunks that are merged at a time
static_assert(kHeldChunks == 2 * kHeadSpan, "see run_attention");

// Quads of dims, as attention_nbytes takes them, of the most heads that a CTA merges.
inline int merged_head_quads(int n_queries, int head_pad, int n_ranks) { return merged_heads(n_queries, 0, n_ranks) * head_pad / 4; }

#if TL_HOPPER

// Where a CTA keeps a head between spans: (O, m and l; head_pad); in the end O / l is in O's place, turned as it is.
TL_DEVICE float *kept_head(const AttentionMemory &m, int i, int head_pad) { return m.total() + i * 3 * head_pad; }

// A group's state where the warp that merged it leaves it: O, and m and l.
constexpr int kGroupEntry = 31;  // among a warp's m.state(): behind those of chunks
TL_DEVICE AttentionMemory of_warp(AttentionMemory m, int warp) {
  m.warp = warp;
  return m;
}

// Merges a query's chunks begin .. end - 1, of one group. By a warp: lanes are chunks where factors are found, as in merge_span, then words of
// two dims, two of them each.
TL_DEVICE void merge_group(const AttentionMemory &m, const Handover &hand, const uint8_t *query, int head_pad, int chunk_bytes, int begin, int end) {
  constexpr int kGroup = TL_CHUNK_GROUP, kAtOnce = 4;
  const int lane = hand.lane(), first = begin / kGroup * kGroup, place = lane % kGroup, skipped = begin - first, n = end - begin,
            n_words = head_pad / 2;
  const uint64_t flag = state_flag(hand, first);
  const uint8_t *const group = query + (int64_t)(first % kHeldChunks) * chunk_bytes;
  const bool alive = place >= skipped && place < skipped + n;
  const int word[2] = {lane < n_words ? lane * 16 : 0, lane + 32 < n_words ? lane * 16 + 512 : 0};  // some have none of their own
  float4 *const state = m.state();
  uint64_t ml[1];
  Flagged own_word[1];
  const auto ml_at = [&](int) { return group + (int64_t)place * chunk_bytes; };
  ask_words(own_word, alive, ml_at);
  await_words(ml, own_word, alive, flag, ml_at);
  const float own = alive ? low_float(ml[0]) : kMasked;
  float top = own;
#pragma unroll
  for (int d = 1; d < kGroup; d *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, top, d, kGroup);
    if (place >= d) top = fmaxf(top, other);
  }
  const float left = __shfl_up_sync(0xffffffffu, top, 1, kGroup), group_m = __shfl_sync(0xffffffffu, top, kGroup - 1);
  const MergeFactors own_factors = merge_factors(place ? left : kMasked, own);
  if (lane < kGroup) state[lane] = make_float4(alive ? high_float(ml[0]) : 0.0f, own_factors.earlier, own_factors.later, 0.0f);
  __syncwarp();
  float l = 0.0f, o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (int some = 0; some < n; some += kAtOnce) {
    uint64_t data[2 * kAtOnce];
    const uint8_t *const from = group + (int64_t)(skipped + some) * chunk_bytes + 16;
    await_words(data, 2 * min(n - some, kAtOnce), flag, [&](int i) { return from + (i / 2 * chunk_bytes + word[i % 2]); });
#pragma unroll
    for (int c = 0; c < kAtOnce; c++) {
      if (some + c >= n) break;
      const float4 f = state[skipped + some + c];
      l = merge_value(l, f.x, {f.y, f.z});
      o[0] = merge_value(o[0], low_float(data[2 * c]), {f.y, f.z});
      o[1] = merge_value(o[1], high_float(data[2 * c]), {f.y, f.z});
      o[2] = merge_value(o[2], low_float(data[2 * c + 1]), {f.y, f.z});
      o[3] = merge_value(o[3], high_float(data[2 * c + 1]), {f.y, f.z});
    }
  }
  float2 *const to = (float2 *)m.o();
  if (lane < n_words) to[lane] = make_float2(o[0], o[1]);
  if (lane + 32 < n_words) to[lane + 32] = make_float2(o[2], o[3]);
  if (lane == 0) state[kGroupEntry] = make_float4(group_m, l, 0.0f, 0.0f);
}

// The span of all heads that the CTA merges: a warp a group, then a thread a dim of all groups in order. After the last span O / l is in
// kept_head, once the CTA's threads have met.
TL_DEVICE void merge_heads(const AttentionShape &shape, const Unit &u, const MergeShare &share, const AttentionMemory &m, const Handover &hand,
                           int begin, int end, bool is_first, bool is_last) {
  const int head_pad = shape.head_pad, dim = hand.thread, span = begin / kHeadSpan * kHeadSpan, own = span + hand.warp() * TL_CHUNK_GROUP;
#pragma unroll 1
  for (int i = 0; i < share.n_mine; i++) {
    const uint8_t *const query = u.states + (share.first + i * shape.n_ranks) * u.query_bytes;
    if (own < end && own + TL_CHUNK_GROUP > begin)
      merge_group(m, hand, query, head_pad, u.chunk_bytes, max(begin, own), min(end, own + TL_CHUNK_GROUP));
    meet();
    if (dim < head_pad) {
      float *const kept = kept_head(m, i, head_pad);
      Total total = {kMasked, 0.0f, 0.0f};
      if (!is_first) total = {kept[head_pad + dim], kept[2 * head_pad + dim], kept[dim]};
#pragma unroll 1
      for (int group = 0; group < kWarps; group++) {
        const int first = span + group * TL_CHUNK_GROUP;
        if (first >= end || first + TL_CHUNK_GROUP <= begin) continue;
        const AttentionMemory left = of_warp(m, group);
        const float4 ml = left.state()[kGroupEntry];
        if (ml.x == kMasked) continue;
        const MergeFactors f = merge_factors(total.m, ml.x);
        total.l = merge_value(total.l, ml.y, f);
        total.o = merge_value(total.o, ((const float *)left.o())[dim], f);
        total.m = fmaxf(total.m, ml.x);
      }
      if (is_last) {
        kept[dim] = total.l != 0.0f ? total.o * (1.0f / total.l) : 0.0f;
      } else {
        kept[dim] = total.o, kept[head_pad + dim] = total.m, kept[2 * head_pad + dim] = total.l;
      }
    }
    if (!is_last || i + 1 < share.n_mine) meet();
  }
}

// The CTA's finished heads, turned back, to the operand of the next product, after the last one the padding. A warp a head.
TL_DEVICE void hand_heads(const StepAttention &t, const AttentionHead &h, const AttentionShape &shape, const Unit &u, const MergeShare &share,
                          const AttentionMemory &m, const Handover &hand) {
  const int lane = hand.lane(), head_dim = shape.head_dim, q_dim = shape.n_kv_heads * shape.group * head_dim;
  const auto hand_on = [&](int column, uint32_t low, uint32_t high) {
    if (h.words) store_flagged(h.words + operand_word_at(column), (uint64_t)high << 32 | low, hand.flag);
    put_four(four_at(h.out, column), low, high);
  };
#pragma unroll 1
  for (int i = hand.warp(); i < share.n_mine; i += kWarps) {
    const int column = (u.first_head + share.first + i * shape.n_ranks) * head_dim + lane * 4;
    float x[4];
    load_dims(x, kept_head(m, i, shape.head_pad), shape.head_pad, lane);
    turn_head(x, shape.turn, shape.turn_scale, lane);
    if (lane * 4 < head_dim) hand_on(column, pack_pair(h.out_dtype, x[0], x[1]), pack_pair(h.out_dtype, x[2], x[3]));
    if (lane * 4 != head_dim - 4 || column + 4 != q_dim) continue;
#pragma unroll 1
    for (int padding = q_dim; padding < t.attend.out.n_in; padding += 4) hand_on(padding, 0, 0);
  }
}

#endif

}  // namespace tl
