// Attention of one row, as a task of a step (step.cu). The CTAs of a unit, the queries of one KV head, take its key chunks in turn, each
// chunk a team of two warps; they hand the chunks' states to each other through flagged words, and each merges them in order for some of
// the dims. The functions, and so the bits, are those of attend.cuh.
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
TL_BOTH int merged_quads(int n_queries, int head_pad, int n_ranks) { return (n_queries * head_pad / 4 + n_ranks - 1) / n_ranks; }

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

// The heads of the row: q to the tile; where this CTA has the row's own chunk also k and v, kept beside the page they go to.
template <class Kv>
TL_DEVICE void place_heads(const StepAttention &t, const Unit &u, const AttentionMemory &m, const Handover &hand, const Pairs &angle, int page,
                           int slot, bool owns) {
  const PlaceArgs &p = t.attend.place;
  const int head_pad = p.kv.head_pad, lane = lane_id(), n_words = head_pad / 2;
  float *raw = m.raw + warp_id() * head_pad, *v = m.head + warp_id() * head_pad;
#pragma unroll 1
  for (int i = warp_id(); i < u.n_queries + (owns ? 2 : 0); i += kWarps) {
    const int part = i - u.n_queries;  // 0: k, 1: v
    const int head = part < 0 ? u.first_head + i : p.n_heads + part * p.n_kv_heads + u.kv_head;
    if (t.qkv.index >= 0) {
      uint64_t word[kMaxHeadDim / 64];
      const uint8_t *from = hand.words(t.qkv) + (head * n_words + lane) * 16;
      const int mine = max(0, (n_words - lane + 31) / 32);
      await_words(word, mine, hand.flag - t.qkv.back, [&](int j) { return from + j * 512; });
#pragma unroll
      for (int j = 0; j < kMaxHeadDim / 64; j++)
        if (j < mine) ((float2 *)raw)[lane + 32 * j] = make_float2(low_float(word[j]), high_float(word[j]));
      __syncwarp();
    }
    finish_head(p, t.qkv.index >= 0 ? raw : raw_head(p, 0, head), head, angle, 0.0f, v);
    const int dim = lane * 8;
    if (dim < head_pad) {
      const uint4 rounded = round_eight(Kv::kDtype, v + dim);
      if (part < 0) {
        *(uint4 *)((uint16_t *)m.q + k_index(i, dim)) = rounded;
      } else {
        (part ? m.new_v : m.new_k)[lane] = rounded;
        uint8_t *to = part ? v_of(p.kv, page, u.kv_head) : k_of(p.kv, page, u.kv_head);
        if (u.stores) {
          *(uint4 *)((uint16_t *)to + (part ? v_index(slot, dim) : k_index(slot, dim))) = rounded;
          count_clamped(p, v + dim);
        }
      }
    }
    __syncwarp();
  }
}

// The row's own keys and values into the copy of its page. By one warp.
TL_DEVICE void insert_own(shared_t k, shared_t v, const AttentionMemory &m, int head_pad, int slot) {
  const int dim = lane_id() * 8;
  if (dim < head_pad) {
    store_shared16(k + k_index(slot, dim) * 2, m.new_k[lane_id()]);
    store_shared16(v + v_index(slot, dim) * 2, m.new_v[lane_id()]);
    fence_bulk_copies();
  }
  __syncwarp();
}

// Where a chunk's pages are in the ring: found before anyone waits for them.
struct ChunkPages {
  PagesRead read;
  RingPlace own[kPagesOfWarp], freed;  // of this warp's pages; the slot that this lane frees
  shared_t v[kPagesOfChunk];
  TL_DEVICE_MEMBER bool reads(int page) const { return page >= read.first && page < read.first + read.n; }
};

TL_DEVICE RingPlace further(const RingPlace &place, int n, int n_slots) {  // less than a whole ring
  RingPlace at = place;
  at.slot += n;
  if (at.slot >= n_slots) at.slot -= n_slots, at.parity ^= 1;
  return at;
}

TL_DEVICE void find_pages(ChunkPages &c, const AttentionMemory &m, const Ring &ring, const RingPlace &place, int k_nbytes, const Keys &keys, int chunk) {
  const int first = warp_id() % kWarpsOfTeam * kPagesOfWarp;
  c.read = pages_of(keys, chunk);
#pragma unroll
  for (int j = 0; j < kPagesOfWarp; j++) c.own[j] = further(place, max(first + j - c.read.first, 0), ring.n_slots);
  c.freed = further(place, lane_id() % kPagesOfChunk, ring.n_slots);
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++)
    c.v[j] = lane_id() * 16 + (c.reads(j) ? ring.address(further(place, j - c.read.first, ring.n_slots)) + k_nbytes : shared_of(m.zeros));
}

// A chunk's state for all queries of the unit, to whoever merges it. By a team.
template <class Kv>
TL_DEVICE void attend_chunk(const StepAttention &t, const Unit &u, const AttentionMemory &m, const Handover &hand, const Ring &ring, const ChunkPages &c,
                            const Keys &keys, int chunk, int pos) {
  const KvLayer &kv = t.attend.place.kv;
  const int w = warp_id() % kWarpsOfTeam, lane = lane_id(), team_barrier = kTaskBarrier + 1 + warp_id() / kWarpsOfTeam, head_pad = kv.head_pad;
  const int first = chunk * TL_KEY_CHUNK + w * kPagesOfWarp * TL_PAGE_POSITIONS;
  const float scale = t.attend.scale;
  const uint64_t flag = state_flag(hand, chunk);
  uint8_t *to = u.states + chunk % (2 * kSpanChunks) * u.chunk_bytes + lane / 4 * u.query_bytes;
  float s[kPagesOfWarp][2][4], top[2];
  shared_t k[kPagesOfWarp];
#pragma unroll
  for (int j = 0; j < kPagesOfWarp; j++) {
    const int page = w * kPagesOfWarp + j, page_first = first + j * TL_PAGE_POSITIONS;
    k[j] = shared_of(m.zeros);
    if (c.reads(page)) k[j] = ring.wait(c.own[j]);
    if (pos >= page_first && pos < page_first + TL_PAGE_POSITIONS) insert_own(k[j], k[j] + kv.k_nbytes, m, head_pad, pos - page_first);
    k[j] += lane * 16;
  }
  score_pages<Kv, kPagesOfWarp>(s, shared_of(m.q) + lane * 16, k, head_pad / 16);
  if (keys.first > first || keys.end < first + kPagesOfWarp * TL_PAGE_POSITIONS)
#pragma unroll
    for (int j = 0; j < kPagesOfWarp; j++) {
      const int page = first + j * TL_PAGE_POSITIONS, lo[2] = {keys.first - page, keys.first - page}, hi[2] = {keys.end - page, keys.end - page};
      mask_page(s[j], lo, hi);
    }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    top[h] = row_maximum<Kv>(lane_maximum<Kv>(s, h));
    if (lane % 4 == 0) m.top[w * kTileQueries + lane / 4 + 8 * h] = top[h];
  }
  sync_threads(team_barrier, kWarpsOfTeam * 32);
#pragma unroll
  for (int h = 0; h < 2; h++) top[h] = chunk_maximum<Kv>(larger<Kv>(top[h], m.top[(1 - w) * kTileQueries + lane / 4 + 8 * h]), scale);
  static_assert(kWarpsOfTeam == 2, "the other warp has the other maximum");
  uint32_t p[kPagesOfChunk][4];
#pragma unroll
  for (int j = 0; j < kPagesOfWarp; j++) {
    soften_page<Kv>(p[j], s[j], top, scale);
    m.p[(w * kPagesOfWarp + j) * 32 + lane] = make_uint4(p[j][0], p[j][1], p[j][2], p[j][3]);
  }
  sync_threads(team_barrier, kWarpsOfTeam * 32);
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    const uint4 four = m.p[j * 32 + lane];
    p[j][0] = four.x, p[j][1] = four.y, p[j][2] = four.z, p[j][3] = four.w;
  }
  const bool exists[2] = {lane / 4 < u.n_queries, lane / 4 + 8 < u.n_queries};
  if (w) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float l = sum_of_p<Kv>(p, h);
      if (exists[h] && lane % 4 == 0) store_flagged(to + h * 8 * u.query_bytes, two_floats(top[h], l), flag);
    }
  }
#pragma unroll 2
  for (int b = w; b < head_pad / 16; b += kWarpsOfTeam) {
    float o[2][4];
    shared_t block[kPagesOfChunk];
#pragma unroll
    for (int j = 0; j < kPagesOfChunk; j++) block[j] = c.v[j] + b * 512;
    weigh_block<Kv>(o, p, block);
    uint8_t *word = to + (1 + b * 8 + lane % 4) * 16;
#pragma unroll
    for (int h = 0; h < 2; h++) {  // rows lane / 4 and lane / 4 + 8, dims eight and eight
      if (!exists[h]) continue;
      store_flagged(word + h * 8 * u.query_bytes, two_floats(o[0][2 * h], o[0][2 * h + 1]), flag);
      store_flagged(word + h * 8 * u.query_bytes + 64, two_floats(o[1][2 * h], o[1][2 * h + 1]), flag);
    }
  }
  __syncwarp();
  if (lane < c.read.n) ring.free(c.freed, 1);
}

// What a CTA merges of a unit, and where this thread's first quad lies; found before the thread waits.
struct MergeShare {
  int n_quads, n_mine, first;  // quads of every CTA, of this one, and its first one
  int query, dim;              // of the thread's quad of the first kMergeQuads
};
TL_DEVICE MergeShare merge_share(const AttentionShape &shape, const Unit &u) {
  const int per_query = shape.head_pad / 4, n_quads = merged_quads(u.n_queries, shape.head_pad, shape.n_ranks);
  const int first = u.rank * n_quads, quad = first + threadIdx.x % kMergeQuads, query = quad / per_query;
  return {n_quads, min(n_quads, u.n_queries * per_query - first), first, query, (quad - query * per_query) * 4};
}
// The same of a later quad, `base` on.
TL_DEVICE void find_quad(const AttentionShape &shape, const MergeShare &share, int base, int quad_of_base, int &query, int &dim) {
  const int per_query = shape.head_pad / 4, quad = share.first + base + quad_of_base;
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
TL_DEVICE void merge_span(const AttentionShape &shape, const Unit &u, const AttentionMemory &m, const Handover &hand, const MergeShare &share, int begin, int end) {
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

// O / l of this CTA's quads, to the operand of the next product, padding included. By the warp that merged them.
TL_DEVICE void hand_attention(const StepAttention &t, const AttentionShape &shape, const Unit &u, const AttentionMemory &m, const Handover &hand, const MergeShare &share) {
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
    if (d < head_dim) hand_on(head * head_dim + d, pair, high);
    if (head == a.place.n_heads - 1 && d == 0)
#pragma unroll 1
      for (int column = a.place.n_heads * head_dim; column < a.out.n_in; column += 4) hand_on(column, 0, 0);
  }
}

// The CTA's part of an attention. `settle` is called after the first barrier.
template <class Kv, class Settle>
TL_DEVICE void run_attention(const StepAttention &t, const AttentionPlan &plan, const Handover &hand, const Ring &ring, RingPlace &base, int pos,
                             const int32_t *table, const Settle &settle) {
  const AttendArgs &a = t.attend;
  const AttentionShape &shape = plan.shape;
  const AttentionMemory &m = plan.memory;
  int index = plan.cta.unit;
  if (index >= shape.n_units) {
    meet();
    return settle();
  }
  const Keys keys = pos < 0 ? Keys{0, 0} : keys_of(pos, a.window);
  const KeyChunks chunks = chunks_of(keys);
  const int team = warp_id() / kWarpsOfTeam, own = pos / TL_KEY_CHUNK, n_ranks = shape.n_ranks;
  Pairs angle;
#pragma unroll
  for (int j = 0; j < kLanePairs; j++) {
    const int i = lane_id() + 32 * j;
    const float2 at = i < a.place.rotary_dim / 2 ? m.angle[i] : make_float2(1.0f, 0.0f);
    angle.a[j] = at.x, angle.b[j] = at.y;
  }
  const int later = own - chunks.first - plan.cta.rank;
  const bool owns = pos >= 0 && later >= 0 && later % n_ranks == 0;
  const int page = owns ? table[pos / TL_PAGE_POSITIONS] : -1;
  bool settled = false;
#pragma unroll 1
  for (; index < shape.n_units; index += shape.n_strides) {
    const bool is_first = index == plan.cta.unit;
    const Unit u = is_first ? plan.unit : unit_of(shape, index, plan.cta.rank, plan.states);
    const MergeShare share = is_first ? plan.share : merge_share(shape, u);
    // A team's next chunk: one of the CTA's first kTeamsOfCta, and every kTeamsOfCta-th from there on.
    ChunkPages c;
    int chunk = chunks.first + plan.cta.rank;
    const auto skip = [&](int n) {
#pragma unroll 1
      for (; n && chunk < chunks.end; n--, chunk += n_ranks) base = further(base, pages_of(keys, chunk).n, ring.n_slots);
    };
    skip(team);
    if (chunk < chunks.end) find_pages(c, m, ring, base, shape.k_nbytes, keys, chunk);
    if (settled) meet();  // no one reads the unit before any more
    for (int i = threadIdx.x; i < 12 * share.n_quads; i += kThreads) m.total[i] = i % 3 ? 0.0f : kMasked;
    place_heads<Kv>(t, u, m, hand, angle, page, pos % TL_PAGE_POSITIONS, owns);
    meet();
    if (!settled) settle();
    settled = true;
#pragma unroll 1
    for (int begin = chunks.first; begin < chunks.end;) {
      const int end = min(chunks.end, (begin / kSpanChunks + 1) * kSpanChunks);
      // A team that waits for a chunk has read the one kTeamsOfCta before: the ring holds as many, so no slot is two uses behind.
#pragma unroll 1
      while (chunk < end) {
        attend_chunk<Kv>(t, u, m, hand, ring, c, keys, chunk, pos);
        skip(kTeamsOfCta);
        if (chunk < chunks.end) find_pages(c, m, ring, base, shape.k_nbytes, keys, chunk);
      }
      if (begin != chunks.first) meet();  // what the last span left to merge is read
      merge_span(shape, u, m, hand, share, begin, end);
      begin = end;
    }
    hand_attention(t, shape, u, m, hand, share);
  }
}

#endif

}  // namespace tl
