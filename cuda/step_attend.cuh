// Attention of one row, as a task of a step (step.cu). The CTAs of a unit, the queries of one KV head, take its key chunks in turn, each
// chunk a team of four warps; they hand the chunks' states to each other through flagged words, and each merges them in order for some of
// the dims. The functions, and so the bits, are those of attend.cuh.
#pragma once

#include "step_product.cuh"

namespace tl {

constexpr int kStepTeams = 2, kStepTeamWarps = kPagesOfChunk;  // of a CTA; each warp scores a page
constexpr int kMergeQuads = 8;  // of four dims, that a CTA merges at a time
constexpr int kGroupsOfSpan = kSpanChunks / TL_CHUNK_GROUP;
static_assert(kStepTeams * kStepTeamWarps == kWarps && kStepTeamWarps == kArrivals, "warps are the teams'");

struct AttentionMemory {
  uint8_t *q;         // tile of kTileQueries
  uint8_t *zeros;     // stands for keys and values that are not read
  float *raw, *head;  // (kWarps, head_pad) each
  uint4 *new_k, *new_v;
  uint4 *p;           // (pages, 32) of the team
  float *top;         // (pages, kTileQueries) of the team
  float4 *o, *state;  // (kMergeQuads, kSpanChunks): O of a quad; l, and the factors of what is there and of the chunk
  float *group_m;     // (kMergeQuads, kGroupsOfSpan)
  float *total;       // (6, quads of the CTA): m, l, o[4] of the groups that are closed
};

// Quads of a unit that each of its CTAs merges.
TL_BOTH int merged_quads(int n_queries, int head_pad, int n_ranks) { return (n_queries * head_pad / 4 + n_ranks - 1) / n_ranks; }

TL_BOTH int lay_out(AttentionMemory &m, uint8_t *base, int head_pad, int k_nbytes, int n_quads, int team) {
  int at = 0;
  const auto take = [&](int nbytes) {
    uint8_t *p = base + at;
    at += round_up(nbytes, 16);
    return p;
  };
  m.q = take(kTileQueries * head_pad * 2);
  m.zeros = take(k_nbytes);
  m.raw = (float *)take(kWarps * head_pad * 4);
  m.head = (float *)take(kWarps * head_pad * 4);
  m.new_k = (uint4 *)take(head_pad * 2);
  m.new_v = (uint4 *)take(head_pad * 2);
  m.p = (uint4 *)take(kStepTeams * kPagesOfChunk * 512) + team * kPagesOfChunk * 32;
  m.top = (float *)take(kStepTeams * kPagesOfChunk * kTileQueries * 4) + team * kPagesOfChunk * kTileQueries;
  m.o = (float4 *)take(kMergeQuads * kSpanChunks * 16);
  m.state = (float4 *)take(kMergeQuads * kSpanChunks * 16);
  m.group_m = (float *)take(kMergeQuads * kGroupsOfSpan * 4);
  m.total = (float *)take(6 * n_quads * 4);
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

TL_DEVICE Unit unit_of(const StepAttention &t, int unit, int rank, uint8_t *states) {
  const PlaceArgs &p = t.attend.place;
  const int sub = unit < p.n_kv_heads ? 0 : unit / p.n_kv_heads, first = sub * kTileQueries;  // a division costs as much as a barrier
  Unit u;
  u.kv_head = unit - sub * p.n_kv_heads;
  u.first_head = u.kv_head * t.group + first;
  u.n_queries = min(t.group - first, kTileQueries);
  u.rank = rank;
  u.stores = sub == 0;
  u.query_bytes = state_words(p.kv.head_pad) * 16;
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
  bool own;              // this warp's page is read
  RingPlace place, more; // of that: keys, and values where they have a slot of their own
  RingPlace freed;       // the slot that this lane frees
  shared_t v[kPagesOfChunk];
};

TL_DEVICE RingPlace further(const RingPlace &place, int n, int n_slots) {  // less than a whole ring
  RingPlace at = place;
  at.slot += n;
  if (at.slot >= n_slots) at.slot -= n_slots, at.parity ^= 1;
  return at;
}

TL_DEVICE void find_pages(ChunkPages &c, const AttentionMemory &m, const Ring &ring, const RingPlace &place, const KvLayer &kv, const Keys &keys, int chunk) {
  const int w = warp_id() % kStepTeamWarps, n = page_slots(kv), offset = n == 1 ? kv.k_nbytes : 0;
  c.read = pages_of(keys, chunk);
  c.own = w >= c.read.first && w < c.read.first + c.read.n;
  c.place = further(place, max(w - c.read.first, 0) * n, ring.n_slots);
  c.more = further(c.place, n - 1, ring.n_slots);
  c.freed = further(place, min(lane_id(), 2 * kPagesOfChunk), ring.n_slots);
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    const bool read = j >= c.read.first && j < c.read.first + c.read.n;
    c.v[j] = lane_id() * 16 + (read ? ring.address(further(place, (j - c.read.first) * n + n - 1, ring.n_slots)) + offset : shared_of(m.zeros));
  }
}

// A chunk's state for all queries of the unit, to whoever merges it. By a team.
template <class Kv>
TL_DEVICE void attend_chunk(const StepAttention &t, const Unit &u, const AttentionMemory &m, const Handover &hand, const Ring &ring, const ChunkPages &c,
                            const Keys &keys, int chunk, int pos) {
  const KvLayer &kv = t.attend.place.kv;
  const int w = warp_id() % kStepTeamWarps, lane = lane_id(), team_barrier = kTaskBarrier + 1 + warp_id() / kStepTeamWarps, head_pad = kv.head_pad;
  const int n = page_slots(kv), page_first = chunk * TL_KEY_CHUNK + w * TL_PAGE_POSITIONS;
  const float scale = t.attend.scale;
  const uint64_t flag = state_flag(hand, chunk);
  uint8_t *to = u.states + chunk % (2 * kSpanChunks) * u.chunk_bytes + lane / 4 * u.query_bytes;
  float s[1][2][4], (&x)[2][4] = s[0];
  shared_t k[1] = {shared_of(m.zeros)};
  if (c.own) {
    k[0] = ring.wait(c.place);
    const shared_t v = n == 1 ? k[0] + kv.k_nbytes : ring.wait(c.more);
    if (pos >= page_first && pos < page_first + TL_PAGE_POSITIONS) insert_own(k[0], v, m, head_pad, pos - page_first);
  }
  k[0] += lane * 16;
  score_pages<Kv, 1>(s, shared_of(m.q) + lane * 16, k, head_pad / 16);
  if (keys.first > page_first || keys.end < page_first + TL_PAGE_POSITIONS) {
    const int lo[2] = {keys.first - page_first, keys.first - page_first}, hi[2] = {keys.end - page_first, keys.end - page_first};
    mask_page(x, lo, hi);
  }
  float top[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    top[h] = row_maximum<Kv>(lane_maximum<Kv>(s, h));
    if (lane % 4 == 0) m.top[w * kTileQueries + lane / 4 + 8 * h] = top[h];
  }
  sync_threads(team_barrier, kStepTeamWarps * 32);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float *all = m.top + lane / 4 + 8 * h;
    top[h] = larger<Kv>(larger<Kv>(all[0], all[kTileQueries]), larger<Kv>(all[2 * kTileQueries], all[3 * kTileQueries]));
    top[h] = chunk_maximum<Kv>(top[h], scale);
  }
  uint32_t p[kPagesOfChunk][4];
  soften_page<Kv>(p[0], x, top, scale);
  m.p[w * 32 + lane] = make_uint4(p[0][0], p[0][1], p[0][2], p[0][3]);
  sync_threads(team_barrier, kStepTeamWarps * 32);
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    const uint4 four = m.p[j * 32 + lane];
    p[j][0] = four.x, p[j][1] = four.y, p[j][2] = four.z, p[j][3] = four.w;
  }
  const bool exists[2] = {lane / 4 < u.n_queries, lane / 4 + 8 < u.n_queries};
#pragma unroll 1
  for (int b = w; b < head_pad / 16; b += kStepTeamWarps) {
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
  if (w == kStepTeamWarps - 1) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float l = sum_of_p<Kv>(p, h);
      if (exists[h] && lane % 4 == 0) store_flagged(to + h * 8 * u.query_bytes, two_floats(top[h], l), flag);
    }
  }
  __syncwarp();
  if (lane < c.read.n * n) ring.free(c.freed, 1);
}

// What a CTA merges of a unit, and where this thread's first quad lies; found before the thread waits.
struct MergeShare {
  int n_quads, n_mine, first;  // quads of every CTA, of this one, and its first one
  int query, dim;              // of the thread's quad of the first kMergeQuads
};
TL_DEVICE MergeShare merge_share(const StepAttention &t, const Unit &u) {
  const int per_query = t.attend.place.kv.head_pad / 4;
  const int n_quads = u.n_queries == min(t.group, kTileQueries) ? t.n_quads : merged_quads(u.n_queries, t.attend.place.kv.head_pad, t.n_ranks);
  const int first = u.rank * n_quads, quad = first + threadIdx.x % kMergeQuads, query = quad < per_query ? 0 : quad / per_query;
  return {n_quads, min(n_quads, u.n_queries * per_query - first), first, query, (quad - query * per_query) * 4};
}
// The same of a later quad, `base` on.
TL_DEVICE void find_quad(const StepAttention &t, const MergeShare &share, int base, int &query, int &dim) {
  query = share.query;
  dim = share.dim;
  if (!base) return;
  const int per_query = t.attend.place.kv.head_pad / 4, quad = share.first + base + threadIdx.x % kMergeQuads;
  query = quad / per_query;
  dim = (quad - query * per_query) * 4;
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

// One quad's groups of the span, in order, into its total. By one thread.
TL_DEVICE void merge_quad(const AttentionMemory &m, int quad, float *total, int stride, int begin, int n_chunks) {
  float total_m = total[0], total_l = total[stride], sum[4];
#pragma unroll
  for (int d = 0; d < 4; d++) sum[d] = total[(2 + d) * stride];
  const float4 *state = m.state + quad * kSpanChunks, *o = m.o + quad * kSpanChunks;
  int c = 0;
#pragma unroll 1
  for (int group = 0; c < n_chunks; group++) {
    const float group_m = m.group_m[quad * kGroupsOfSpan + group];
    const int end = min(n_chunks, (group + 1) * TL_CHUNK_GROUP - begin % TL_CHUNK_GROUP);
    float l = 0.0f, x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const auto merge = [&](const float4 &s, const float4 &y) {
      const MergeFactors f = {s.y, s.z};
      l = merge_value(l, s.x, f);
      x[0] = merge_value(x[0], y.x, f);
      x[1] = merge_value(x[1], y.y, f);
      x[2] = merge_value(x[2], y.z, f);
      x[3] = merge_value(x[3], y.w, f);
    };
    constexpr int kAtOnce = 8;
#pragma unroll 1
    for (; c + kAtOnce <= end; c += kAtOnce) {
      float4 s[kAtOnce], y[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) s[i] = state[c + i], y[i] = o[c + i];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) merge(s[i], y[i]);
    }
#pragma unroll 1
    for (; c < end; c++) merge(state[c], o[c]);
    if (group_m == kMasked) continue;
    const MergeFactors f = merge_factors(total_m, group_m);
    total_l = merge_value(total_l, l, f);
#pragma unroll
    for (int d = 0; d < 4; d++) sum[d] = merge_value(sum[d], x[d], f);
    total_m = fmaxf(total_m, group_m);
  }
  total[0] = total_m;
  total[stride] = total_l;
#pragma unroll
  for (int d = 0; d < 4; d++) total[(2 + d) * stride] = sum[d];
}

// Merges the span's chunks begin .. end - 1 into the totals of this CTA's quads.
TL_DEVICE void merge_span(const StepAttention &t, const Unit &u, const AttentionMemory &m, const Handover &hand, const MergeShare &share, int begin, int end) {
  const int n_chunks = end - begin, quad = threadIdx.x % kMergeQuads;
#pragma unroll 1
  for (int base = 0; base < share.n_mine; base += kMergeQuads) {
    int query, dim;
    find_quad(t, share, base, query, dim);
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
    if ((int)threadIdx.x < n) merge_quad(m, threadIdx.x, m.total + base + threadIdx.x, share.n_quads, begin, n_chunks);
  }
}

// O / l of this CTA's quads, to the operand of the next product, padding included. By the threads that merged them.
TL_DEVICE void hand_attention(const StepAttention &t, const Unit &u, const AttentionMemory &m, const Handover &hand, const MergeShare &share) {
  const AttendArgs &a = t.attend;
  const int head_dim = a.place.head_dim;
  if (threadIdx.x >= kMergeQuads) return;
  const auto hand_on = [&](int column, uint32_t low, uint32_t high) {
    if (t.out.index >= 0) store_flagged(hand.words(t.out) + column * 4, (uint64_t)high << 32 | low, hand.flag);
    put_four((uint8_t *)a.out.data, column, low, high);
  };
#pragma unroll 1
  for (int quad = threadIdx.x; quad < share.n_mine; quad += kMergeQuads) {
    int query, d;
    find_quad(t, share, quad - threadIdx.x, query, d);
    const int head = u.first_head + query;
    const float l = m.total[share.n_quads + quad], inverse = l != 0.0f ? 1.0f / l : 0.0f;
    float o[4];
#pragma unroll
    for (int i = 0; i < 4; i++) o[i] = l != 0.0f ? m.total[(2 + i) * share.n_quads + quad] * inverse : 0.0f;
    if (d < head_dim) hand_on(head * head_dim + d, pack_pair(a.out.dtype, o[0], o[1]), pack_pair(a.out.dtype, o[2], o[3]));
    if (head == a.place.n_heads - 1 && d == 0)
#pragma unroll 1
      for (int column = a.place.n_heads * head_dim; column < a.out.n_in; column += 4) hand_on(column, 0, 0);
  }
}

// The CTA's part of an attention. `settle` is called after the first barrier.
template <class Kv, class Settle>
TL_DEVICE void run_attention(const StepAttention &t, const CtaPlace &cta, uint8_t *memory, uint8_t *states, const Handover &hand, const Ring &ring,
                             RingPlace &base, int pos, const int32_t *table, const Settle &settle) {
  const AttendArgs &a = t.attend;
  const KvLayer &kv = a.place.kv;
  int index = cta.unit;
  if (index >= t.n_units) {
    meet();
    return settle();
  }
  const Keys keys = pos < 0 ? Keys{0, 0} : keys_of(pos, a.window);
  const KeyChunks chunks = chunks_of(keys);
  const int team = warp_id() / kStepTeamWarps, own = pos / TL_KEY_CHUNK, n_ranks = t.n_ranks, n_slots = page_slots(kv);
  Pairs angle;
  load_angles(angle, a.place, max(pos, 0));
  AttentionMemory m;
  lay_out(m, memory, kv.head_pad, kv.k_nbytes, t.n_quads, team);
  const int later = own - chunks.first - cta.rank;
  const bool owns = pos >= 0 && later >= 0 && later % n_ranks == 0;
  const int page = owns ? table[pos / TL_PAGE_POSITIONS] : -1;
  bool settled = false;
#pragma unroll 1
  for (; index < t.n_units; index += t.n_strides) {
    const Unit u = unit_of(t, index, cta.rank, states);
    const MergeShare share = merge_share(t, u);
    // A team's next chunk: the first or second of the CTA's, and every other one from there on.
    ChunkPages c;
    int chunk = chunks.first + cta.rank;
    const auto skip = [&] {
      base.advance(pages_of(keys, chunk).n * n_slots, ring.n_slots);
      chunk += n_ranks;
    };
    if (team && chunk < chunks.end) skip();
    if (chunk < chunks.end) find_pages(c, m, ring, base, kv, keys, chunk);
    if (settled) meet();  // no one reads the unit before any more
    for (int i = threadIdx.x; i < 6 * share.n_quads; i += kThreads) m.total[i] = i < share.n_quads ? kMasked : 0.0f;
    place_heads<Kv>(t, u, m, hand, angle, page, pos % TL_PAGE_POSITIONS, owns);
    meet();
    if (!settled) settle();
    settled = true;
#pragma unroll 1
    for (int begin = chunks.first; begin < chunks.end;) {
      const int end = min(chunks.end, (begin / kSpanChunks + 1) * kSpanChunks);
      // A team that waits for a chunk has read the one two before: the ring holds two chunks, so no slot is two uses behind.
#pragma unroll 1
      while (chunk < end) {
        attend_chunk<Kv>(t, u, m, hand, ring, c, keys, chunk, pos);
        skip();
        if (chunk < chunks.end) skip();
        if (chunk < chunks.end) find_pages(c, m, ring, base, kv, keys, chunk);
      }
      if (begin != chunks.first) meet();  // what the last span left to merge is read
      merge_span(t, u, m, hand, share, begin, end);
      begin = end;
    }
    hand_attention(t, u, m, hand, share);
  }
}

#endif

}  // namespace tl
