// Attention in a step as one kernel: who works for which queries, and how the CTAs of a unit merge its key chunks' states in order, each CTA
// for some of the dims. The functions, and so the bits, are those of attend.cuh.
#pragma once

#include "step_product.cuh"

namespace tl {

constexpr int kTeamsOfCta = 4, kWarpsOfTeam = kWarps / kTeamsOfCta, kPagesOfWarp = kPagesOfChunk / kWarpsOfTeam;
constexpr int kStepHeadPad = 128;  // most that a head is padded to: its page is a slot, and the ring holds the chunks of all teams
constexpr int kMergeQuads = 8;  // of four dims, that a warp merges at a time: a lane a dim
constexpr int kGroupsOfSpan = kSpanChunks / TL_CHUNK_GROUP;
static_assert(kWarpsOfTeam == kArrivals && 4 * kStepHeadPad * TL_PAGE_POSITIONS <= kSlotBytes, "slots are a team's");

struct AttentionMemory {
  uint8_t *q;         // tile of kTileQueries
  uint8_t *zeros;     // stands for keys and values that are not read
  float *raw, *head;  // (kWarps, head_pad) each
  uint4 *new_k, *new_v;
  uint4 *p;           // (pages, 32) of the team
  float *top;         // (kWarpsOfTeam, kTileQueries) of the team
  float4 *o, *state;  // (kMergeQuads, kSpanChunks): O of a quad; l, and the factors of what is there and of the chunk
  float2 *angle;      // (rotary_dim / 2,): cosine and sine at the row's position; the last part
  float *group_m;     // (kMergeQuads, kGroupsOfSpan)
  float *total;       // (dims of the CTA, 3): m, l and O of the groups that are closed
};

// Quads of a unit that each of its CTAs merges.
TL_BOTH int merged_quads(int n_queries, int head_dim, int n_ranks) { return (n_queries * head_dim / 4 + n_ranks - 1) / n_ranks; }

TL_BOTH int lay_out(AttentionMemory &m, uint8_t *base, const AttentionShape &shape, int team) {
  const int head_pad = shape.head_pad;
  int at = 0;
  const auto take = [&](int nbytes) {
    uint8_t *p = base + at;
    at += round_up(nbytes, 16);
    return p;
  };
  m.q = take(kTileQueries * head_pad * 2);
  m.zeros = take(shape.k_nbytes);
  m.raw = (float *)take(kWarps * head_pad * 4);
  m.head = (float *)take(kWarps * head_pad * 4);
  m.new_k = (uint4 *)take(head_pad * 2);
  m.new_v = (uint4 *)take(head_pad * 2);
  m.p = (uint4 *)take(kTeamsOfCta * kPagesOfChunk * 512) + team * kPagesOfChunk * 32;
  m.top = (float *)take(kTeamsOfCta * kWarpsOfTeam * kTileQueries * 4) + team * kWarpsOfTeam * kTileQueries;
  m.o = (float4 *)take(kMergeQuads * kSpanChunks * 16);
  m.state = (float4 *)take(kMergeQuads * kSpanChunks * 16);
  m.group_m = (float *)take(kMergeQuads * kGroupsOfSpan * 4);
  m.total = (float *)take(12 * shape.n_quads * 4);
  m.angle = (float2 *)take(head_pad * 4);
  return at;
}

// Words of a query's state: m and l, then O two dims a word.
TL_BOTH int state_words(int head_pad) { return 1 + head_pad / 2; }
// Of the states that all units hand over, of two spans' chunks.
inline uint64_t states_nbytes(int n_heads, int head_pad) { return (uint64_t)n_heads * 2 * kSpanChunks * state_words(head_pad) * 16; }

#if TL_HOPPER

// Which queries a CTA works for, and where their states lie: (2 kSpanChunks, n_queries, state_words).
struct Unit {
  int kv_head, first_head, n_queries, rank, chunk_bytes, query_bytes;
  bool stores;  // the row's k and v
  uint8_t *states;
};

TL_DEVICE Unit unit_of(const AttentionShape &shape, int unit, int rank, uint8_t *states) {
  const int sub = unit < shape.n_kv_heads ? 0 : unit / shape.n_kv_heads, first = sub * kTileQueries;
  Unit u;
  u.kv_head = unit - sub * shape.n_kv_heads;
  u.first_head = u.kv_head * shape.group + first;
  u.n_queries = min(shape.group - first, kTileQueries);
  u.rank = rank;
  u.stores = sub == 0;
  u.query_bytes = state_words(shape.head_pad) * 16;
  u.chunk_bytes = u.n_queries * u.query_bytes;
  u.states = states + (int64_t)u.first_head * 2 * kSpanChunks * u.query_bytes;
  return u;
}

// The flag of a chunk's state: words are used again within a task, for the chunk two spans on.
TL_DEVICE uint64_t state_flag(const Handover &hand, int chunk) { return hand.flag | (uint64_t)(chunk / (2 * kSpanChunks)) << kFlagBits; }

// What a CTA merges of a unit, and where this thread's first quad lies; found before the thread waits.
struct MergeShare {
  int n_quads, n_mine, first;  // quads of every CTA, of this one, and its first one
  int query, dim;              // of the thread's quad of the first kMergeQuads
};
TL_DEVICE MergeShare merge_share(const AttentionShape &shape, const Unit &u) {
  const int per_query = shape.head_dim / 4, n_quads = merged_quads(u.n_queries, shape.head_dim, shape.n_ranks);
  const int first = u.rank * n_quads, quad = first + threadIdx.x % kMergeQuads, query = quad / per_query;
  return {n_quads, min(n_quads, u.n_queries * per_query - first), first, query, (quad - query * per_query) * 4};
}
// The same of a later quad, `base` on.
TL_DEVICE void find_quad(const AttentionShape &shape, const MergeShare &share, int base, int quad_of_base, int &query, int &dim) {
  const int per_query = shape.head_dim / 4, quad = share.first + base + quad_of_base;
  query = quad < per_query ? 0 : quad / per_query;
  dim = (quad - query * per_query) * 4;
}

// All that a CTA works out for its first unit before a step begins.
struct AttentionPlan {
  const AttentionShape &shape;
  CtaPlace cta;
  uint8_t *states;
  AttentionMemory memory;
  Unit unit;
  MergeShare share;
};
TL_DEVICE AttentionPlan plan_attention(const AttentionShape &shape, const CtaPlace &cta, uint8_t *shared, uint8_t *states) {
  AttentionPlan plan = {shape, cta, states, {}, {}, {}};
  lay_out(plan.memory, shared, shape, warp_id() / kWarpsOfTeam);
  plan.unit = unit_of(shape, cta.unit, cta.rank, states);
  plan.share = merge_share(shape, plan.unit);
  return plan;
}

// Factors of the groups' chunks: a thread a chunk, sixteen a group and quad.
TL_DEVICE void find_factors(const AttentionMemory &m, int begin, int n_chunks, int n) {
  const int c = threadIdx.x % TL_CHUNK_GROUP;
#pragma unroll 1
  for (int item = threadIdx.x / TL_CHUNK_GROUP; item < kMergeQuads * kGroupsOfSpan; item += kThreads / TL_CHUNK_GROUP) {
    const int quad = item % kMergeQuads, group = item / kMergeQuads, chunk = group * TL_CHUNK_GROUP + c - begin % TL_CHUNK_GROUP;
    if (group * TL_CHUNK_GROUP - begin % TL_CHUNK_GROUP >= n_chunks) break;
    const bool alive = chunk >= 0 && chunk < n_chunks && quad < n;
    float4 *state = m.state + quad * kSpanChunks + chunk;
    float2 ml = make_float2(kMasked, 0.0f);
    if (alive) ml = *(const float2 *)state;
    float top = ml.x;
#pragma unroll
    for (int d = 1; d < TL_CHUNK_GROUP; d *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, top, d, TL_CHUNK_GROUP);
      if (c >= d) top = fmaxf(top, other);
    }
    const float left = __shfl_up_sync(0xffffffffu, top, 1, TL_CHUNK_GROUP);
    const MergeFactors f = merge_factors(c ? left : kMasked, ml.x);
    if (alive) *state = make_float4(ml.y, f.earlier, f.later, 0.0f);
    if (c == TL_CHUNK_GROUP - 1 && quad < n) m.group_m[quad * kGroupsOfSpan + group] = top;
  }
}

// One dim's groups of the span, in order, into its total: m, l and O. By a lane.
struct Total {
  float m, l, o;
};
TL_DEVICE void merge_dim(const AttentionMemory &m, Total &total, int quad, int dim, int begin, int n_chunks) {
  const float4 *state = m.state + quad * kSpanChunks;
  const float *o = (const float *)(m.o + quad * kSpanChunks) + dim;
  int c = 0;
#pragma unroll 1
  for (int group = 0; c < n_chunks; group++) {
    const float group_m = m.group_m[quad * kGroupsOfSpan + group];
    const int end = min(n_chunks, (group + 1) * TL_CHUNK_GROUP - begin % TL_CHUNK_GROUP);
    float l = 0.0f, x = 0.0f;
#pragma unroll 8
    for (; c < end; c++) {
      const float4 s = state[c];
      l = merge_value(l, s.x, {s.y, s.z});
      x = merge_value(x, o[4 * c], {s.y, s.z});
    }
    if (group_m == kMasked) continue;
    const MergeFactors f = merge_factors(total.m, group_m);
    total.l = merge_value(total.l, l, f);
    total.o = merge_value(total.o, x, f);
    total.m = fmaxf(total.m, group_m);
  }
}

// Merges the span's chunks begin .. end - 1 into the totals of this CTA's quads.
TL_DEVICE void merge_span(const AttentionShape &shape, const Unit &u, const AttentionMemory &m, const Handover &hand, const MergeShare &share,
                          int begin, int end) {
  const int n_chunks = end - begin, quad = threadIdx.x % kMergeQuads;
#pragma unroll 1
  for (int base = 0; base < share.n_mine; base += kMergeQuads) {
    int query = share.query, dim = share.dim;
    if (base) find_quad(shape, share, base, quad, query, dim);
    const int n = min(kMergeQuads, share.n_mine - base), at = query * u.query_bytes, o_at = (1 + dim / 2) * 16;
    if (base) meet();
#pragma unroll 1
    for (int chunk = threadIdx.x / kMergeQuads; chunk < n_chunks && quad < n; chunk += kThreads / kMergeQuads) {
      const uint8_t *state = u.states + (begin + chunk) % (2 * kSpanChunks) * u.chunk_bytes + at;
      uint64_t word[3];
      await_words(word, 3, state_flag(hand, begin + chunk), [&](int j) { return state + (j ? o_at + (j - 1) * 16 : 0); });
      *(float2 *)(m.state + quad * kSpanChunks + chunk) = make_float2(low_float(word[0]), high_float(word[0]));
      m.o[quad * kSpanChunks + chunk] = make_float4(low_float(word[1]), high_float(word[1]), low_float(word[2]), high_float(word[2]));
    }
    meet();
    find_factors(m, begin, n_chunks, n);
    meet();
    if ((int)threadIdx.x >= 4 * n) continue;
    float *total = m.total + base * 12 + threadIdx.x * 3;
    Total sum = {total[0], total[1], total[2]};
    merge_dim(m, sum, threadIdx.x / 4, threadIdx.x % 4, begin, n_chunks);
    total[0] = sum.m, total[1] = sum.l, total[2] = sum.o;
  }
}

// What a CTA that merges nothing does instead where it has a chunk behind the span: words are used again two spans on, which those who merge
// must not be behind.
TL_DEVICE void follow_span(const Unit &u, const Handover &hand, int begin, int end) {
#pragma unroll 1
  for (int chunk = begin + threadIdx.x; chunk < end; chunk += kThreads) {
    uint64_t word[1];
    await_words(word, 1, state_flag(hand, chunk), [&](int) { return u.states + chunk % (2 * kSpanChunks) * u.chunk_bytes; });
  }
  meet();
}

// O / l of this CTA's quads, to the operand of the next product, padding included. By the warp that merged them.
TL_DEVICE void hand_attention(const StepAttention &t, const AttentionShape &shape, const Unit &u, const AttentionMemory &m, const Handover &hand,
                              const MergeShare &share) {
  const AttendArgs &a = t.attend;
  const int head_dim = a.place.head_dim, dtype = a.out.dtype, dim = threadIdx.x % 4;
  if (threadIdx.x >= 4 * kMergeQuads) return;
  uint8_t *words = t.out.index >= 0 ? hand.words(t.out) : nullptr, *out = (uint8_t *)a.out.data;
  const auto hand_on = [&](int column, uint32_t low, uint32_t high) {
    if (words) store_flagged(words + column * 4, (uint64_t)high << 32 | low, hand.flag);
    put_four(out, column, low, high);
  };
#pragma unroll 1
  for (int base = 0; base < share.n_mine; base += kMergeQuads) {
    const int quad = base + threadIdx.x / 4;
    const bool exists = quad < share.n_mine;
    const float *total = m.total + base * 12 + threadIdx.x * 3;
    const float l = exists ? total[1] : 0.0f, y = l != 0.0f ? total[2] * (1.0f / l) : 0.0f;
    const uint32_t pair = pack_pair(dtype, y, __shfl_sync(0xffffffffu, y, lane_id() + 1)), high = __shfl_sync(0xffffffffu, pair, lane_id() + 2);
    if (!exists || dim) continue;
    int query, d;
    find_quad(shape, share, base, threadIdx.x / 4, query, d);
    const int head = u.first_head + query;
    hand_on(head * head_dim + d, pair, high);
    if (head == a.place.n_heads - 1 && d == 0)
#pragma unroll 1
      for (int column = a.place.n_heads * head_dim; column < a.out.n_in; column += 4) hand_on(column, 0, 0);
  }
}

#endif

}  // namespace tl
