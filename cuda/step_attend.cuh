// Attention of one row, as a task of a step (step.cu). The CTAs of a unit, the queries of one KV head, take its key chunks in turn, each
// chunk a team of two warps; they hand the chunks' states to each other through flagged words, and merge them (step_merge.cuh).
#pragma once

#include "step_merge.cuh"

namespace tl {

#if TL_HOPPER

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

TL_DEVICE void find_pages(ChunkPages &c, const AttentionMemory &m, const Ring &ring, const RingPlace &place, int k_nbytes, const Keys &keys,
                          int chunk) {
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
TL_DEVICE void attend_chunk(const StepAttention &t, const Unit &u, const AttentionMemory &m, const Handover &hand, const Ring &ring,
                            const ChunkPages &c, const Keys &keys, int chunk, int pos) {
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

// The last chunk of one of a unit's CTAs.
TL_DEVICE int last_chunk(const KeyChunks &chunks, int rank, int n_ranks) {
  const int first = chunks.first + rank;
  return first + (chunks.end - 1 - first) / n_ranks * n_ranks;
}

// The CTA's part of an attention. `settle` is called after the first barrier.
template <class Kv, class Settle>
TL_DEVICE void run_attention(const StepAttention &t, const AttentionPlan &plan, const Handover &hand, const Ring &ring, RingPlace &base, int pos,
                             const int32_t *table, const Settle &settle) {
  const AttendArgs &a = t.attend;
  const AttentionShape &shape = plan.shape;
  const AttentionMemory &m = plan.memory;
  int index = plan.cta.unit;
  const Keys keys = keys_of(pos, a.window);
  const KeyChunks chunks = chunks_of(keys);
  // Nothing to do: and so nobody would wait until it has read its queries, whose words are written again.
  if (index >= shape.n_units || (plan.share.n_mine <= 0 && chunks.first + plan.cta.rank >= chunks.end)) {
    meet();
    return settle();
  }
  const int team = warp_id() / kWarpsOfTeam, own = pos / TL_KEY_CHUNK, n_ranks = shape.n_ranks;
  Pairs angle;
#pragma unroll
  for (int j = 0; j < kLanePairs; j++) {
    const int i = lane_id() + 32 * j;
    const float2 at = i < a.place.rotary_dim / 2 ? m.angle[i] : make_float2(1.0f, 0.0f);
    angle.a[j] = at.x, angle.b[j] = at.y;
  }
  const int later = own - chunks.first - plan.cta.rank;
  const bool owns = later >= 0 && later % n_ranks == 0;
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
      if (share.n_mine > 0)
        merge_span(shape, u, m, hand, share, begin, end);
      else if (last_chunk(chunks, u.rank, n_ranks) >= end)
        follow_span(u, hand, begin, end);
      begin = end;
    }
    hand_attention(t, shape, u, m, hand, share);
  }
}

#endif

}  // namespace tl
