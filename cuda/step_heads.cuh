// The row's heads in an attention of a step as one kernel: from the words of the product before to the tile of queries, and to K and V.
#pragma once

#include "step_merge.cuh"

namespace tl {

#if TL_HOPPER

constexpr int kStepPairs = kStepHeadPad / 64;  // of a lane

TL_DEVICE uint4 round_quads(int dtype, const float4 &a, const float4 &b) {
  return make_uint4(pack_pair(dtype, a.x, a.y), pack_pair(dtype, a.z, a.w), pack_pair(dtype, b.x, b.y), pack_pair(dtype, b.z, b.w));
}

// A warp's head of the row: its words, asked for before all else.
struct HeadWords {
  int head;  // among all of q, k and v
  int part;  // below 0: q, 0: k, 1: v
  const uint8_t *words;  // of the row, or NULL: it is in memory alone
  int first, count;      // this lane's first one, and how many are its
  Flagged word[kStepPairs];
  TL_DEVICE_MEMBER const uint8_t *at(int j) const { return words + row_word_at(first + 32 * j); }
};
TL_DEVICE void ask_head(HeadWords &h, const AttentionHead &t, const AttentionShape &shape, const Unit &u, const Handover &hand, int index,
                        bool exists) {
  const int n_pairs = shape.head_pad / 2, lane = hand.lane();
  h.part = index - u.n_queries;
  h.head = h.part < 0 ? u.first_head + index : shape.n_kv_heads * shape.group + h.part * shape.n_kv_heads + u.kv_head;
  h.words = t.qkv.words;
  h.first = h.head * n_pairs + lane;
  h.count = h.words && exists ? (lane < n_pairs) + (lane + 32 < n_pairs) : 0;
  static_assert(kStepPairs == 2, "the words of two pairs");
  ask_words(h.word, h.count, [&](int j) { return h.at(j); });
}

// Which of a unit's heads is a warp's first one. The last warps begin: the others have key chunks to look for.
TL_DEVICE int first_head(const Handover &hand) { return kWarps - 1 - hand.warp(); }

// Of codes, in step_attend_codes.cuh.
template <class Kv>
TL_DEVICE void place_codes(const AttentionShape &shape, const AttentionMemory &m, const float *v, int lane, int i, int part, uint8_t *page, int slot);

// The heads of the row: q to the tile; where this CTA has the row's own chunk also k and v, kept beside the page they go to. The numbers are
// finish_head's; all that a lane needs besides the head's words is in registers before they come.
template <class Kv>
TL_DEVICE void place_heads(const StepAttention &t, const AttentionHead &a, const AttentionShape &shape, const Unit &u, const AttentionMemory &m,
                           const Handover &hand, HeadWords &h, int page, int slot, int n_heads) {
  const PlaceArgs &p = t.attend.place;
  const int head_pad = shape.head_pad, lane = hand.lane(), n_pairs = head_pad / 2, half = a.rotary_dim / 2, head_dim = shape.head_dim;
  const uint64_t flag = hand.flag - a.qkv.back;
  float *raw = m.raw(), *v = m.head();
#pragma unroll 1
  for (int i = first_head(hand); i < n_heads;) {
    const int part = h.part;
    const float *norm = part > 0 || a.qk_norm == TL_QK_NORM_NONE ? nullptr : part ? p.q_norm : p.k_norm;
    PairIndex at[kStepPairs];
    float2 angle[kStepPairs], weight[kStepPairs], x[kStepPairs];
    bool exists[kStepPairs], turns[kStepPairs];
#pragma unroll
    for (int j = 0; j < kStepPairs; j++) {
      const int pair = lane + 32 * j;
      exists[j] = pair < n_pairs;
      turns[j] = part < 1 && pair < half;
      at[j] = a.interleaved || pair >= half ? PairIndex{2 * pair, 2 * pair + 1} : PairIndex{pair, pair + half};
      angle[j] = turns[j] ? m.angle()[pair] : make_float2(1.0f, 0.0f);
      weight[j] = norm && 2 * pair < head_dim ? make_float2(norm[at[j].a], norm[at[j].b]) : make_float2(1.0f, 1.0f);
    }
    const int dim = lane * 8;
    uint8_t *const to = part < 0 ? nullptr : part ? v_of(p.kv, page, u.kv_head) : k_of(p.kv, page, u.kv_head);
    if (h.words) {
      uint64_t word[kStepPairs];
      await_words(word, h.word, h.count, flag, [&](int j) { return h.at(j); });
#pragma unroll
      for (int j = 0; j < kStepPairs; j++)
        if (exists[j]) ((float2 *)raw)[lane + 32 * j] = make_float2(low_float(word[j]), high_float(word[j]));
    } else {
#pragma unroll
      for (int j = 0; j < kStepPairs; j++)
        if (exists[j]) ((float2 *)raw)[lane + 32 * j] = ((const float2 *)raw_head(p, 0, h.head))[lane + 32 * j];
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kStepPairs; j++) x[j] = exists[j] ? make_float2(raw[at[j].a], raw[at[j].b]) : make_float2(0.0f, 0.0f);
    if (norm) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kStepPairs; j++) sum = fmaf(x[j].y, x[j].y, fmaf(x[j].x, x[j].x, sum));  // the padding is zero
      const float inverse = inverse_rms(warp_sum(sum), head_dim, a.eps);
#pragma unroll
      for (int j = 0; j < kStepPairs; j++) x[j] = make_float2(x[j].x * inverse * weight[j].x, x[j].y * inverse * weight[j].y);
    }
#pragma unroll
    for (int j = 0; j < kStepPairs; j++) {
      const float2 turned = turn_pair(x[j].x, x[j].y, angle[j].x, angle[j].y);
      if (exists[j]) v[at[j].a] = turns[j] ? turned.x : x[j].x, v[at[j].b] = turns[j] ? turned.y : x[j].y;
    }
    __syncwarp();
    if constexpr (Kv::kQuantised) {
      place_codes<Kv>(shape, m, v, lane, i, part, u.stores ? to : nullptr, slot);
    } else if (dim < head_pad) {
      const float4 low = *(const float4 *)(v + dim), high = *(const float4 *)(v + dim + 4);
      const uint4 rounded = round_quads(Kv::kDtype, low, high);
      if (part < 0) {
        *(uint4 *)((uint16_t *)m.q() + k_index(i, dim)) = rounded;
      } else {
        m.new_kv(part)[lane] = rounded;
        if (u.stores) {
          *(uint4 *)((uint16_t *)to + (part ? v_index(slot, dim) : k_index(slot, dim))) = rounded;
          count_clamped(p, v + dim);
        }
      }
    }
    i += kWarps;
    if (i >= n_heads) break;
    ask_head(h, a, shape, u, hand, i, true);
    __syncwarp();
  }
}

// The row's own keys and values into the copy of its page. By one warp.
TL_DEVICE void insert_own(shared_t k, shared_t v, const AttentionMemory &m, int lane, int head_pad, int slot) {
  const int dim = lane * 8;
  if (dim < head_pad) {
    store_shared16(k + k_index(slot, dim) * 2, m.new_kv(0)[lane]);
    store_shared16(v + v_index(slot, dim) * 2, m.new_kv(1)[lane]);
  }
  __syncwarp();
}

#endif

}  // namespace tl
