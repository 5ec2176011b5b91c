// Attention in a step as one kernel: who works for which queries, and how the CTAs of a unit, or the first few, merge its key chunks' states in
// order, each for some of the dims. The functions, and so the bits, are those of attend.cuh.
#pragma once

#include "step_product.cuh"

namespace tl {

constexpr int kTeamsOfCta = 4, kWarpsOfTeam = kWarps / kTeamsOfCta, kPagesOfWarp = kPagesOfChunk / kWarpsOfTeam;
constexpr int kStepHeadPad = 128;  // most that a head is padded to: its page is a slot, and the ring holds the chunks of all teams
static_assert(kWarpsOfTeam == kArrivals && 4 * kStepHeadPad * TL_PAGE_POSITIONS <= kSlotBytes, "slots are a team's");
static_assert(32 % TL_CHUNK_GROUP == 0, "a group's chunks are lanes of a warp");

// Shared memory of attention: where its parts lie, for heads of any size. Some of it is for one task alone and has others' place: what is used
// before the CTA's threads meet, when no one reads the operand of the product before any more, and what is used behind that, when no one
// finishes that product's sums.
struct AttentionMemory {
  static constexpr int kZeros = kTileQueries * kStepHeadPad * 2, kNew = kZeros + kSlotBytes / 2, kAngle = kNew + 4 * kStepHeadPad,
                       kPlan = kAngle + kStepHeadPad * 4, kTotal = kPlan + 64;
  static constexpr int kHead = kWarps * kStepHeadPad * 4, kBeforeBytes = 2 * kHead;
  static constexpr int kTop = kTeamsOfCta * kPagesOfChunk * 512, kO = kTop + kTeamsOfCta * kWarpsOfTeam * kTileQueries * 4,
                       kState = kO + kWarps * 512, kBehindBytes = kState + kWarps * 512;
  uint8_t *base, *before, *behind;
  int warp;
  TL_DEVICE_MEMBER uint8_t *q() const { return base; }               // tile of kTileQueries
  TL_DEVICE_MEMBER uint8_t *zeros() const { return base + kZeros; }  // stand for keys and values that are not read
  TL_DEVICE_MEMBER uint4 *new_kv(int part) const { return (uint4 *)(base + kNew) + part * (kStepHeadPad / 8); }
  TL_DEVICE_MEMBER float2 *angle() const { return (float2 *)(base + kAngle); }  // (rotary_dim / 2,): cosine and sine at the row's position
  TL_DEVICE_MEMBER uint8_t *plan() const { return base + kPlan; }
  TL_DEVICE_MEMBER float *total() const { return (float *)(base + kTotal); }  // (dims of the CTA, 3): m, l and O of the groups that are closed
  TL_DEVICE_MEMBER float *raw() const { return (float *)before + warp * kStepHeadPad; }             // a head, by each warp
  TL_DEVICE_MEMBER float *head() const { return (float *)(before + kHead) + warp * kStepHeadPad; }  // the same, finished
  TL_DEVICE_MEMBER uint4 *p() const { return (uint4 *)behind + warp / kWarpsOfTeam * kPagesOfChunk * 32; }  // of the team
  TL_DEVICE_MEMBER float *top() const { return (float *)(behind + kTop) + warp / kWarpsOfTeam * kWarpsOfTeam * kTileQueries; }
  TL_DEVICE_MEMBER float4 *o() const { return (float4 *)(behind + kO) + warp * 32; }  // of a quad of dims, a chunk each, by each warp
  TL_DEVICE_MEMBER float4 *state() const { return (float4 *)(behind + kState) + warp * 32; }  // l, and the factors of what is there and of the chunk
};

// Of codes, queries of a unit that one of its CTAs merges: every n_ranks-th, from `rank` on (step_merge_codes.cuh).
TL_BOTH int merged_heads(int n_queries, int rank, int n_ranks) { return (n_queries - rank + n_ranks - 1) / n_ranks; }

inline int attention_nbytes(const AttentionShape &shape) { return AttentionMemory::kTotal + 12 * shape.n_quads * 4; }

// Queries of a unit at most: of codes a tile has each one's high and low bytes.
template <class Kv>
TL_BOTH constexpr int unit_queries() {
  return Kv::kQuantised ? kTileQueries / 2 : kTileQueries;
}

// Words of a query's state: m and l, then O two dims a word.
TL_BOTH int state_words(int head_pad) { return 1 + head_pad / 2; }
// Of the states that all units hand over, of kHeldChunks.
inline uint64_t states_nbytes(int n_heads, int head_pad) { return (uint64_t)n_heads * kHeldChunks * state_words(head_pad) * 16; }

#if TL_HOPPER

// Which queries a CTA works for, and where their states lie: (kHeldChunks, n_queries, state_words).
struct Unit {
  int kv_head, first_head, n_queries, rank, chunk_bytes, query_bytes;
  bool stores;  // the row's k and v
  uint8_t *states;
};

template <class Kv>
TL_DEVICE Unit unit_of(const AttentionShape &shape, int unit, int rank, uint8_t *states) {
  const int sub = unit < shape.n_kv_heads ? 0 : unit / shape.n_kv_heads, first = sub * unit_queries<Kv>();
  Unit u;
  u.kv_head = unit - sub * shape.n_kv_heads;
  u.first_head = u.kv_head * shape.group + first;
  u.n_queries = min(shape.group - first, unit_queries<Kv>());
  u.rank = rank;
  u.stores = sub == 0;
  u.query_bytes = state_words(shape.head_pad) * 16;
  u.chunk_bytes = u.n_queries * u.query_bytes;
  u.states = states + (int64_t)u.first_head * kHeldChunks * u.query_bytes;
  return u;
}

// The flag of a chunk's state: words are used again within a task, for the chunk kHeldChunks on.
TL_DEVICE uint64_t state_flag(const Handover &hand, int chunk) { return hand.flag | (uint64_t)(chunk / kHeldChunks) << kFlagBits; }

// What a CTA merges of a unit: quads of its dims, from `first` on.
struct MergeShare {
  int n_mine, first;
};
template <class Kv>
TL_DEVICE MergeShare merge_share(const AttentionShape &shape, const Unit &u) {
  if (Kv::kQuantised) return {merged_heads(u.n_queries, u.rank, shape.n_ranks), u.rank};
  const int n_quads = u.n_queries * (shape.head_dim / 4), each = (n_quads + shape.n_mergers - 1) / shape.n_mergers, first = u.rank * each;
  return {min(each, n_quads - first), first};
}

// All that a CTA works out for its first unit before a step begins; kept in shared memory.
struct alignas(16) AttentionPlan {
  Unit unit;
  MergeShare share;
};
static_assert(sizeof(AttentionPlan) <= AttentionMemory::kTotal - AttentionMemory::kPlan, "a plan fits");
template <class Kv>
TL_DEVICE AttentionPlan plan_attention(const AttentionShape &shape, int unit, int rank, uint8_t *states) {
  AttentionPlan plan;
  plan.unit = unit_of<Kv>(shape, unit, rank, states);
  plan.share = merge_share<Kv>(shape, plan.unit);
  return plan;
}

// A quad of dims that a warp merges: where its words lie in a chunk's state, and which columns of attention's output it is.
struct Quad {
  const uint8_t *ml, *o;
  int column;
  bool last;  // of the row
};
TL_DEVICE Quad quad_of(const AttentionShape &shape, const Unit &u, int quad) {
  const int query = quotient(quad, shape.dims_inverse), dim = quad * 4 - query * shape.head_dim, head = u.first_head + query;
  const uint8_t *ml = u.states + query * u.query_bytes;
  return {ml, ml + (1 + dim / 2) * 16, head * shape.head_dim + dim, head == shape.n_kv_heads * shape.group - 1 && dim == shape.head_dim - 4};
}

// One dim's state, and what a dim's groups have in common.
struct Total {
  float m, l, o;
};

// Merges the span's chunks begin .. end - 1 of a quad into its total. By a warp: lanes are chunks, then the first four are the dims. A chunk
// that is not there changes nothing, no zero's sign either: 1 x + 0 (-0).
TL_DEVICE void merge_span(Total &total, const AttentionMemory &m, const Handover &hand, const Quad &quad, int chunk_bytes, int begin, int end) {
  constexpr int kGroups = 32 / TL_CHUNK_GROUP;
  const int lane = hand.lane();
  float4 *const state = m.state(), *const o = m.o();
  const float *const dim = (const float *)o + lane % 4;
#pragma unroll 1
  for (int some = begin / 32 * 32; some < end; some += 32) {
    const int chunk = some + lane;
    const bool alive = chunk >= begin && chunk < end;
    uint64_t word[3];
    const int64_t from = (int64_t)(chunk % kHeldChunks) * chunk_bytes;
    await_words(word, alive ? 3 : 0, state_flag(hand, chunk), [&](int j) { return j ? quad.o + from + (j - 1) * 16 : quad.ml + from; });
    const float own = alive ? low_float(word[0]) : kMasked;
    float top = own;
#pragma unroll
    for (int d = 1; d < TL_CHUNK_GROUP; d *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, top, d, TL_CHUNK_GROUP);
      if (lane % TL_CHUNK_GROUP >= d) top = fmaxf(top, other);
    }
    const float left = __shfl_up_sync(0xffffffffu, top, 1, TL_CHUNK_GROUP);
    const MergeFactors own_factors = merge_factors(lane % TL_CHUNK_GROUP ? left : kMasked, own);
    state[lane] = alive ? make_float4(high_float(word[0]), own_factors.earlier, own_factors.later, 0.0f) : make_float4(0.0f, 1.0f, -0.0f, 0.0f);
    o[lane] = make_float4(low_float(word[1]), high_float(word[1]), low_float(word[2]), high_float(word[2]));
    __syncwarp();
    // A group's chunks in order, by four lanes; then the groups in order, by all.
    const int own_group = lane / 4 % kGroups * TL_CHUNK_GROUP;
    float sum = 0.0f, l = 0.0f;
#pragma unroll 1
    for (int c = 0; c < TL_CHUNK_GROUP && some + c < end; c += 8) {
      float4 factors[8];
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; j++) factors[j] = state[own_group + c + j], values[j] = dim[4 * (own_group + c + j)];
#pragma unroll
      for (int j = 0; j < 8; j++) {
        l = merge_value(l, factors[j].x, {factors[j].y, factors[j].z});
        sum = merge_value(sum, values[j], {factors[j].y, factors[j].z});
      }
    }
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
      const float group_m = __shfl_sync(0xffffffffu, top, (group + 1) * TL_CHUNK_GROUP - 1),
                  group_l = __shfl_sync(0xffffffffu, l, group * 4 + lane % 4), group_o = __shfl_sync(0xffffffffu, sum, group * 4 + lane % 4);
      if (group_m == kMasked) continue;
      const MergeFactors f = merge_factors(total.m, group_m);
      total.l = merge_value(total.l, group_l, f);
      total.o = merge_value(total.o, group_o, f);
      total.m = fmaxf(total.m, group_m);
    }
    __syncwarp();
  }
}

// What a CTA that merges nothing does instead where it has a chunk behind the span: words are used again kHeldChunks on, which those who merge must
// not be behind.
TL_DEVICE void follow_span(const Unit &u, const Handover &hand, int begin, int end) {
#pragma unroll 1
  for (int chunk = begin + hand.thread; chunk < end; chunk += kThreads)
    await_word(u.states + chunk % kHeldChunks * u.chunk_bytes, state_flag(hand, chunk));
}

// O / l of a quad, to the operand of the next product, after the last one the padding. By the warp that merged it.
TL_DEVICE void hand_attention(const StepAttention &t, const AttentionHead &h, const Handover &hand, const Quad &quad, const Total &total) {
  const float y = total.l != 0.0f ? total.o * (1.0f / total.l) : 0.0f;
  const uint32_t pair = pack_pair(h.out_dtype, y, __shfl_sync(0xffffffffu, y, hand.lane() + 1));
  const uint32_t high = __shfl_sync(0xffffffffu, pair, hand.lane() + 2);
  if (hand.lane()) return;
  const auto hand_on = [&](int column, uint32_t low, uint32_t high) {
    if (h.words) store_flagged(h.words + operand_word_at(column), (uint64_t)high << 32 | low, hand.flag);
    put_four(four_at(h.out, column), low, high);
  };
  hand_on(quad.column, pair, high);
  if (!quad.last) return;
#pragma unroll 1
  for (int column = quad.column + 4; column < t.attend.out.n_in; column += 4) hand_on(column, 0, 0);
}

#endif

}  // namespace tl
