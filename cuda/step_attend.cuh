// Attention of one row, as a task of a step (step.cu). The CTAs of a unit, the queries of one KV head, take its key chunks in turn,
// each chunk one warp; they hand the chunks' states to each other through flagged words, and each merges them in order for some of
// the dims. The functions, and so the bits, are those of attend.cuh.
#pragma once

#include "step_product.cuh"

namespace tl {

constexpr int kMergeQuads = 8;  // of four dims, that a CTA merges at a time
constexpr int kStateWords = 1;  // of a query's m and l, before those of its O

// Of a chunk and a quad of dims, as it is merged.
struct alignas(16) MergedQuad {
  float o[4];
};

struct AttentionMemory {
  uint8_t *q;        // tile of kTileQueries
  uint8_t *zeros;    // stands for keys and values that are not read
  float *raw, *head; // (kWarps, head_pad) each
  uint4 *new_k, *new_v;
  MergedQuad *o;     // (kMergeQuads, kSpanChunks)
  float2 *ml;        // the same: m and l
  float *total;      // (6, quads of the CTA): m, l, o[4] of the groups that are closed
};

// Quads of a unit that each of its CTAs merges.
TL_BOTH int merged_quads(int n_queries, int head_pad, int n_ranks) { return (n_queries * head_pad / 4 + n_ranks - 1) / n_ranks; }

TL_BOTH int lay_out(AttentionMemory &m, uint8_t *base, int head_pad, int k_nbytes, int n_quads) {
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
  m.o = (MergedQuad *)take(kMergeQuads * kSpanChunks * sizeof(MergedQuad));
  m.ml = (float2 *)take(kMergeQuads * kSpanChunks * sizeof(float2));
  m.total = (float *)take(6 * n_quads * 4);
  return at;
}

// Bytes of the words that all units hand over: states of two spans' chunks.
TL_BOTH int64_t state_words(int head_pad) { return kStateWords + head_pad / 2; }
inline uint64_t states_nbytes(int n_heads, int head_pad) { return (uint64_t)n_heads * 2 * kSpanChunks * state_words(head_pad) * 16; }

#if TL_HOPPER

// Which queries a CTA works for, and where their states lie.
struct Unit {
  int kv_head, first_head, n_queries, rank;
  uint8_t *states;  // (2 kSpanChunks, n_queries, state_words)
};

TL_DEVICE Unit unit_of(const StepAttention &t, int unit, uint8_t *states) {
  const PlaceArgs &p = t.attend.place;
  const int group = p.n_heads / p.n_kv_heads, sub = unit / p.n_kv_heads, first = sub * min(group, kTileQueries);
  Unit u;
  u.kv_head = unit % p.n_kv_heads;
  u.first_head = u.kv_head * group + first;
  u.n_queries = min(group - first, kTileQueries);
  u.rank = blockIdx.x % t.n_ranks;
  u.states = states + (int64_t)u.first_head * 2 * kSpanChunks * state_words(p.kv.head_pad) * 16;
  return u;
}

TL_DEVICE uint8_t *state_of(const Unit &u, int chunk, int query, int head_pad) {
  return u.states + ((int64_t)(chunk % (2 * kSpanChunks)) * u.n_queries + query) * state_words(head_pad) * 16;
}

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
      const uint8_t *from = hand.words(t.qkv) + ((int64_t)head * n_words + lane) * 16;
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
      const uint4 rounded = round_eight(p.kv.dtype, v + dim);
      if (part < 0) {
        *(uint4 *)((uint16_t *)m.q + k_index(i, dim)) = rounded;
      } else {
        (part ? m.new_v : m.new_k)[lane] = rounded;
        uint8_t *to = part ? v_of(p.kv, page, u.kv_head) : k_of(p.kv, page, u.kv_head);
        if (u.first_head % (p.n_heads / p.n_kv_heads) == 0) {
          *(uint4 *)((uint16_t *)to + (part ? v_index(slot, dim) : k_index(slot, dim))) = rounded;
          count_clamped(p, v + dim);
        }
      }
    }
    __syncwarp();
  }
}

// This warp's pages of a chunk, each as the address of its keys and of its values; `place` moves behind them.
struct ChunkPages {
  RingPlace place[kPagesOfChunk];
  shared_t k[kPagesOfChunk], v[kPagesOfChunk];
  bool there[kPagesOfChunk];
};

TL_DEVICE void await_pages(ChunkPages &c, const Ring &ring, RingPlace place, const KvLayer &kv, const Keys &keys, int chunk, shared_t zeros) {
  const int n = page_slots(kv);
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    c.there[j] = page_is_read(keys, chunk, j);
    c.place[j] = place;
    c.k[j] = c.v[j] = zeros;
    if (!c.there[j]) continue;
    c.k[j] = ring.wait(place);
    c.v[j] = c.k[j] + kv.k_nbytes;
    place.advance(1, ring.n_slots);
    if (n == 1) continue;
    c.v[j] = ring.wait(place);
    place.advance(1, ring.n_slots);
  }
}

TL_DEVICE void free_pages(const ChunkPages &c, const Ring &ring, const KvLayer &kv) {
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    if (!c.there[j]) continue;
    RingPlace place = c.place[j];
    ring.done(place);
    if (page_slots(kv) == 1) continue;
    place.advance(1, ring.n_slots);
    ring.done(place);
  }
}

TL_DEVICE void store_shared16(shared_t to, uint4 v) {
#if defined(TL_EMULATOR)
  *(uint4 *)to = v;
#else
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}

// The row's own keys and values into the copy of its page.
TL_DEVICE void insert_own(const ChunkPages &c, const AttentionMemory &m, int head_pad, int pos) {
  const int slot = pos % TL_PAGE_POSITIONS, dim = lane_id() * 8;
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    if (j != pos % TL_KEY_CHUNK / TL_PAGE_POSITIONS || dim >= head_pad) continue;
    store_shared16(c.k[j] + k_index(slot, dim) * 2, m.new_k[lane_id()]);
    store_shared16(c.v[j] + v_index(slot, dim) * 2, m.new_v[lane_id()]);
    fence_bulk_copies();
  }
  __syncwarp();
}

// The flag of a chunk's state: words are used again within a task, for the chunk two spans on.
TL_DEVICE uint64_t state_flag(const Handover &hand, int chunk) { return hand.flag | (uint64_t)(chunk / (2 * kSpanChunks)) << kFlagBits; }

// A chunk's state for all queries of the unit, to whoever merges it.
template <class Kv>
TL_DEVICE void attend_chunk(const StepAttention &t, const Unit &u, const AttentionMemory &m, const Handover &hand, const ChunkPages &c, const Keys &keys,
                            int chunk) {
  const int head_pad = t.attend.place.kv.head_pad, lane = lane_id(), first = chunk * TL_KEY_CHUNK;
  float s[kPagesOfChunk][2][4], top[2], l[2];
  shared_t k[kPagesOfChunk];
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) k[j] = c.k[j] + lane * 16;
  score_pages<Kv, kPagesOfChunk>(s, shared_of(m.q) + lane * 16, k, head_pad / 16);
  if (keys.first > first || keys.end < first + TL_KEY_CHUNK)
#pragma unroll
    for (int j = 0; j < kPagesOfChunk; j++) {
      const int page = first + j * TL_PAGE_POSITIONS, lo[2] = {keys.first - page, keys.first - page}, hi[2] = {keys.end - page, keys.end - page};
      mask_page(s[j], lo, hi);
    }
#pragma unroll
  for (int h = 0; h < 2; h++) top[h] = chunk_maximum<Kv>(row_maximum<Kv>(lane_maximum<Kv>(s, h)), t.attend.scale);
  uint32_t p[kPagesOfChunk][4];
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) soften_page<Kv>(p[j], s[j], top, t.attend.scale);
#pragma unroll
  for (int h = 0; h < 2; h++) l[h] = sum_of_p<Kv>(p, h);
  const uint64_t flag = state_flag(hand, chunk);
  uint8_t *to[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    to[h] = state_of(u, chunk, lane / 4 + 8 * h, head_pad);
    if (lane / 4 + 8 * h < u.n_queries && lane % 4 == 0) store_flagged(to[h], two_floats(top[h], l[h]), flag);
    to[h] += (kStateWords + lane % 4) * 16;
  }
#pragma unroll 2
  for (int b = 0; b < head_pad / 16; b++) {
    float o[2][4];
    shared_t v[kPagesOfChunk];
#pragma unroll
    for (int j = 0; j < kPagesOfChunk; j++) v[j] = c.v[j] + b * 512 + lane * 16;
    weigh_block<Kv>(o, p, v);
#pragma unroll
    for (int i = 0; i < 4; i++) {  // eight dims, rows lane / 4 and lane / 4 + 8
      const int h = i % 2;
      if (lane / 4 + 8 * h < u.n_queries) store_flagged(to[h] + (b * 8 + i / 2 * 4) * 16, two_floats(o[i / 2][2 * h], o[i / 2][2 * h + 1]), flag);
    }
  }
}

// Merges the span's chunks begin .. end - 1 into the totals of this CTA's quads.
TL_DEVICE void merge_span(const StepAttention &t, const Unit &u, const AttentionMemory &m, const Handover &hand, int begin, int end) {
  const int head_pad = t.attend.place.kv.head_pad, per_query = head_pad / 4, n_all = u.n_queries * per_query, n_chunks = end - begin;
  const int n_quads = merged_quads(u.n_queries, head_pad, t.n_ranks), first = u.rank * n_quads, n_mine = min(n_quads, n_all - first);
#pragma unroll 1
  for (int base = 0; base < n_mine; base += kMergeQuads) {
    const int n = min(kMergeQuads, n_mine - base);
    if (base) meet();
#pragma unroll 1
    for (int i = threadIdx.x; i < n_chunks * kMergeQuads; i += kThreads) {
      const int quad = i % kMergeQuads, chunk = i / kMergeQuads, all = first + base + quad;
      if (quad >= n) continue;
      const uint8_t *state = state_of(u, begin + chunk, all / per_query, head_pad);
      uint64_t word[3];
      const int o_at = (kStateWords + all % per_query * 2) * 16;
      await_words(word, 3, state_flag(hand, begin + chunk), [&](int j) { return state + (j ? o_at + (j - 1) * 16 : 0); });
      const int at = quad * kSpanChunks + chunk;
      m.ml[at] = make_float2(low_float(word[0]), high_float(word[0]));
      *(float4 *)m.o[at].o = make_float4(low_float(word[1]), high_float(word[1]), low_float(word[2]), high_float(word[2]));
    }
    meet();
    const int quad = threadIdx.x;
    if (quad >= n) continue;
    float *total = m.total + base + quad;
    float total_m = total[0], total_l = total[n_quads], total_o[4];
#pragma unroll
    for (int d = 0; d < 4; d++) total_o[d] = total[(2 + d) * n_quads];
    const float2 *ml = m.ml + quad * kSpanChunks;
    const MergedQuad *o = m.o + quad * kSpanChunks;
#pragma unroll 1
    for (int c = 0; c < n_chunks;) {
      float group_m = kMasked, group_l = 0.0f, group_o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      const int group_end = min(n_chunks, c + TL_CHUNK_GROUP - (begin + c) % TL_CHUNK_GROUP);
#pragma unroll 4
      for (; c < group_end; c++) {
        const float2 x = ml[c];
        const float4 y = *(const float4 *)o[c].o;
        const MergeFactors f = merge_factors(group_m, x.x);
        group_l = merge_value(group_l, x.y, f);
        group_o[0] = merge_value(group_o[0], y.x, f);
        group_o[1] = merge_value(group_o[1], y.y, f);
        group_o[2] = merge_value(group_o[2], y.z, f);
        group_o[3] = merge_value(group_o[3], y.w, f);
        group_m = fmaxf(group_m, x.x);
      }
      if (group_m == kMasked) continue;
      const MergeFactors f = merge_factors(total_m, group_m);
      total_l = merge_value(total_l, group_l, f);
#pragma unroll
      for (int d = 0; d < 4; d++) total_o[d] = merge_value(total_o[d], group_o[d], f);
      total_m = fmaxf(total_m, group_m);
    }
    total[0] = total_m;
    total[n_quads] = total_l;
#pragma unroll
    for (int d = 0; d < 4; d++) total[(2 + d) * n_quads] = total_o[d];
  }
}

// O / l of this CTA's quads, to the operand of the next product, padding included. By the threads that merged them.
TL_DEVICE void hand_attention(const StepAttention &t, const Unit &u, const AttentionMemory &m, const Handover &hand) {
  const AttendArgs &a = t.attend;
  const int head_pad = a.place.kv.head_pad, head_dim = a.place.head_dim, per_query = head_pad / 4, n_all = u.n_queries * per_query;
  const int n_quads = merged_quads(u.n_queries, head_pad, t.n_ranks), first = u.rank * n_quads, n_mine = min(n_quads, n_all - first);
  const auto hand_on = [&](int column, uint32_t low, uint32_t high) {
    uint16_t *to = (uint16_t *)a.out.data;
    *(uint32_t *)(to + operand_index(a.out, 0, column)) = low;
    *(uint32_t *)(to + operand_index(a.out, 0, column + 2)) = high;
    if (t.out.index >= 0) store_flagged(hand.words(t.out) + column * 4, (uint64_t)high << 32 | low, hand.flag);
  };
#pragma unroll 1
  for (int base = 0; base < n_mine; base += kMergeQuads) {
    const int quad = base + threadIdx.x;
    if ((int)threadIdx.x >= kMergeQuads || quad >= n_mine) break;
    const int all = first + quad, head = u.first_head + all / per_query, d = all % per_query * 4;
    const float l = m.total[n_quads + quad], inverse = l != 0.0f ? 1.0f / l : 0.0f;
    float o[4];
#pragma unroll
    for (int i = 0; i < 4; i++) o[i] = l != 0.0f ? m.total[(2 + i) * n_quads + quad] * inverse : 0.0f;
    if (d < head_dim) hand_on(head * head_dim + d, pack_pair(a.out.dtype, o[0], o[1]), pack_pair(a.out.dtype, o[2], o[3]));
    if (head == a.place.n_heads - 1 && d == 0)
#pragma unroll 1
      for (int column = a.place.n_heads * head_dim; column < a.out.n_in; column += 4) hand_on(column, 0, 0);
  }
}

// The CTA's part of an attention. `read_ahead` returns when the next task is in shared memory.
template <class Kv, class ReadAhead>
TL_DEVICE void run_attention(const StepAttention &t, const StepMemory &memory, uint8_t *states, const Handover &hand, const Ring &ring, RingPlace &base,
                             int pos, const int32_t *table, const ReadAhead &read_ahead) {
  const AttendArgs &a = t.attend;
  const KvLayer &kv = a.place.kv;
  const Keys keys = pos < 0 ? Keys{0, 0} : keys_of(pos, a.window);
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0), group = a.place.n_heads / a.place.n_kv_heads;
  AttentionMemory m;
  const int n_quads = merged_quads(min(group, kTileQueries), kv.head_pad, t.n_ranks);
  lay_out(m, memory.attention, kv.head_pad, kv.k_nbytes, n_quads);
  if ((int)blockIdx.x / t.n_ranks >= t.n_units) {
    read_ahead();
    return meet();
  }
  Pairs angle;
  load_angles(angle, a.place, max(pos, 0));
#pragma unroll 1
  for (int i = threadIdx.x * 16; i < kTileQueries * kv.head_pad * 2; i += kThreads * 16) *(uint4 *)(m.q + i) = make_uint4(0, 0, 0, 0);
#pragma unroll 1
  for (int i = threadIdx.x * 16; i < kv.k_nbytes; i += kThreads * 16) *(uint4 *)(m.zeros + i) = make_uint4(0, 0, 0, 0);
  bool waited = false;
#pragma unroll 1
  for (int index = blockIdx.x / t.n_ranks; index < t.n_units; index += gridDim.x / t.n_ranks) {
    const Unit u = unit_of(t, index, states);
    const CtaChunks chunks = chunks_of(t, keys, u.rank);
    const int own = pos / TL_KEY_CHUNK, n_mine = merged_quads(u.n_queries, kv.head_pad, t.n_ranks);
    const bool owns = pos >= 0 && (own - chunks.first) % t.n_ranks == 0;
    meet();  // the zeros are there; no one reads the unit before
    for (int i = threadIdx.x; i < 6 * n_mine; i += kThreads) m.total[i] = i < n_mine ? kMasked : 0.0f;
    place_heads<Kv>(t, u, m, hand, angle, owns ? table[pos / TL_PAGE_POSITIONS] : -1, pos % TL_PAGE_POSITIONS, owns);
    if (!waited) read_ahead();
    waited = true;
    meet();
    RingPlace place = base;
    int turn = 0;  // whose turn the next chunk is
    const int first_chunk = keys.first / TL_KEY_CHUNK;
    int chunk = chunks.first;
#pragma unroll 1
    for (int begin = first_chunk; begin < chunks.end;) {
      const int end = min(chunks.end, (begin / kSpanChunks + 1) * kSpanChunks);
#pragma unroll 1
      for (; chunk < end; chunk += t.n_ranks, turn = (turn + 1) % kWarps) {
        int n_pages = 0;
#pragma unroll
        for (int j = 0; j < kPagesOfChunk; j++) n_pages += page_is_read(keys, chunk, j);
        if (turn == warp) {
          ChunkPages c;
          await_pages(c, ring, place, kv, keys, chunk, shared_of(m.zeros));
          if (chunk == own) insert_own(c, m, kv.head_pad, pos);
          attend_chunk<Kv>(t, u, m, hand, c, keys, chunk);
          free_pages(c, ring, kv);
        }
        place.advance(n_pages * page_slots(kv), ring.n_slots);
      }
      if (begin != first_chunk) meet();  // what the last span left to merge is read
      merge_span(t, u, m, hand, begin, end);
      begin = end;
    }
    hand_attention(t, u, m, hand);
    base = place;
  }
}

#endif

}  // namespace tl
