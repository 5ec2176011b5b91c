// Attention of one row, as a task of a step (step.cu). The CTAs of a unit, the queries of one KV head, take its key chunks in turn, each
// chunk a team of two warps; they hand the chunks' states to each other through flagged words, and merge them (step_merge.cuh).
#pragma once

#include "step_heads.cuh"
#include "step_merge_codes.cuh"

namespace tl {

#if TL_HOPPER

// A team's chunk: where its pages are in the ring, and what else is known before the queries are.
struct TeamChunk {
  PagesRead read;
  RingPlace own[kPagesOfWarp], freed;  // of this warp's pages; the slot that this lane frees
  bool reads_own[kPagesOfWarp];
  shared_t k[kPagesOfWarp], v[kPagesOfChunk];
  int first;      // key of this warp
  int inserted;   // which of its pages the row's own key comes into, or -1
  bool is_whole;  // all of the warp's keys are read
  uint64_t flag;
  uint8_t *to;    // this lane's part of the state
  TL_DEVICE_MEMBER bool reads(int page) const { return page >= read.first && page < read.first + read.n; }
};

TL_DEVICE RingPlace further(const RingPlace &place, int n, int n_slots) {  // less than a whole ring
  RingPlace at = place;
  at.slot += n;
  if (at.slot >= n_slots) at.slot -= n_slots, at.parity ^= 1;
  return at;
}

TL_DEVICE void find_chunk(TeamChunk &c, const Unit &u, const AttentionMemory &m, const Handover &hand, const Ring &ring, const RingPlace &place,
                          int k_nbytes, const Keys &keys, int chunk, int pos) {
  const int first = hand.warp() % kWarpsOfTeam * kPagesOfWarp, lane = hand.lane();
  c.read = pages_of(keys, chunk);
#pragma unroll
  for (int j = 0; j < kPagesOfWarp; j++) {
    c.own[j] = further(place, max(first + j - c.read.first, 0), ring.n_slots);
    c.reads_own[j] = c.reads(first + j);
    c.k[j] = lane * 16 + (c.reads_own[j] ? ring.address(c.own[j]) : shared_of(m.zeros()));
  }
  c.freed = further(place, lane % kPagesOfChunk, ring.n_slots);
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++)
    c.v[j] = lane * 16 + (c.reads(j) ? ring.address(further(place, j - c.read.first, ring.n_slots)) + k_nbytes : shared_of(m.zeros()));
  c.first = chunk * TL_KEY_CHUNK + first * TL_PAGE_POSITIONS;
  const int own = pos - c.first;
  c.inserted = own >= 0 && own < kPagesOfWarp * TL_PAGE_POSITIONS ? own / TL_PAGE_POSITIONS : -1;
  c.is_whole = keys.first <= c.first && keys.end >= c.first + kPagesOfWarp * TL_PAGE_POSITIONS;
  c.flag = state_flag(hand, chunk);
  c.to = u.states + chunk % kHeldChunks * u.chunk_bytes + lane / 4 * u.query_bytes;
}

TL_DEVICE void wait_for_pages(const Ring &ring, const TeamChunk &c) {
  bool there = true;  // mostly they are: one branch instead of four waits, one after another
#pragma unroll
  for (int j = 0; j < kPagesOfWarp; j++) there &= ring.is_there(c.own[j]) | !c.reads_own[j];
  if (there) return;
#pragma unroll
  for (int j = 0; j < kPagesOfWarp; j++)
    if (c.reads_own[j]) ring.wait(c.own[j]);
}
TL_DEVICE void free_pages(const Ring &ring, const TeamChunk &c, int lane) {
  __syncwarp();
  if (lane < c.read.n) ring.free(c.freed, 1);
}

// What a thread needs for any chunk of a unit: found before the queries are there.
struct TeamLane {
  int lane, w, barrier;  // w: which warp of the team
  int head_pad, k_nbytes, query_bytes;
  float scale;
  bool many, exists[2];  // whether the tile's lower half has queries; whether this lane's queries are there
  shared_t q;
  float *top;            // where this lane's maximum goes; the other warp's
  const float *other_top;
  uint4 *p;
};
TL_DEVICE TeamLane lane_of(const AttentionShape &shape, const Unit &u, const AttentionMemory &m, const Handover &hand, float scale) {
  const int lane = hand.lane(), w = hand.warp() % kWarpsOfTeam;
  float *const top = m.top() + lane / 4;
  static_assert(kWarpsOfTeam == 2, "the other warp has the other maximum");
  return {lane,
          w,
          kTaskBarrier + 1 + hand.warp() / kWarpsOfTeam,
          shape.head_pad,
          shape.k_nbytes,
          u.query_bytes,
          scale,
          u.n_queries > 8,
          {lane / 4 < u.n_queries, lane / 4 + 8 < u.n_queries},
          shared_of(m.q()) + lane * 16,
          top + w * kTileQueries,
          top + (1 - w) * kTileQueries,
          m.p() + lane};
}

// A chunk's state for all queries of the unit, to whoever merges it. By a team, which may know that its pages are there.
template <class Kv>
TL_DEVICE void attend_chunk(const TeamLane &me, const AttentionMemory &m, const Ring &ring, const TeamChunk &c, bool are_there, const Keys &keys,
                            int pos) {
  const int w = me.w, lane = me.lane;
  float s[kPagesOfWarp][2][4], top[2] = {0.0f, 0.0f};
  if (!are_there) wait_for_pages(ring, c);
  if (c.inserted >= 0) {
    const shared_t page = (c.inserted ? c.k[kPagesOfWarp - 1] : c.k[0]) - lane * 16;
    static_assert(kPagesOfWarp == 2, "one page or the other");
    insert_own(page, page + me.k_nbytes, m, lane, me.head_pad, pos % TL_PAGE_POSITIONS);
  }
  score_pages<Kv, kPagesOfWarp>(s, me.q, c.k, me.head_pad / 16);
  if (!c.is_whole)
#pragma unroll
    for (int j = 0; j < kPagesOfWarp; j++) {
      const int page = c.first + j * TL_PAGE_POSITIONS, lo[2] = {keys.first - page, keys.first - page}, hi[2] = {keys.end - page, keys.end - page};
      mask_page(s[j], lo, hi);
    }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if (h && !me.many) break;
    top[h] = row_maximum<Kv>(lane_maximum<Kv>(s, h));
    if (lane % 4 == 0) me.top[8 * h] = top[h];
  }
  sync_threads(me.barrier, kWarpsOfTeam * 32);
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (!h || me.many) top[h] = chunk_maximum<Kv>(larger<Kv>(top[h], me.other_top[8 * h]), me.scale);
  uint32_t p[kPagesOfChunk][4];
#pragma unroll
  for (int j = 0; j < kPagesOfWarp; j++) {
    soften_page<Kv>(p[j], s[j], top, me.scale);
    me.p[(w * kPagesOfWarp + j) * 32] = make_uint4(p[j][0], p[j][1], p[j][2], p[j][3]);
  }
  sync_threads(me.barrier, kWarpsOfTeam * 32);
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    const uint4 four = me.p[j * 32];
    p[j][0] = four.x, p[j][1] = four.y, p[j][2] = four.z, p[j][3] = four.w;
  }
#pragma unroll 2
  for (int b = w; b < me.head_pad / 16; b += kWarpsOfTeam) {
    float o[2][4];
    shared_t block[kPagesOfChunk];
#pragma unroll
    for (int j = 0; j < kPagesOfChunk; j++) block[j] = c.v[j] + b * 512;
    weigh_block<Kv>(o, p, block);
    uint8_t *word = c.to + (1 + b * 8 + lane % 4) * 16;
#pragma unroll
    for (int h = 0; h < 2; h++) {  // rows lane / 4 and lane / 4 + 8, dims eight and eight
      if (!me.exists[h]) continue;
      store_flagged(word + h * 8 * me.query_bytes, two_floats(o[0][2 * h], o[0][2 * h + 1]), c.flag);
      store_flagged(word + h * 8 * me.query_bytes + 64, two_floats(o[1][2 * h], o[1][2 * h + 1]), c.flag);
    }
  }
  if (w) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (h && !me.many) break;
      const float l = sum_of_p<Kv>(p, h);
      if (me.exists[h] && lane % 4 == 0) store_flagged(c.to + h * 8 * me.query_bytes, two_floats(top[h], l), c.flag);
    }
  }
  if (c.inserted >= 0) fence_bulk_copies();  // the slots are copied to next
  free_pages(ring, c, lane);
}

// Of codes, in step_attend_codes.cuh.
template <class Kv>
TL_DEVICE void attend_code_chunk(const TeamLane &me, const AttentionMemory &m, const Ring &ring, const TeamChunk &c, const Keys &keys, int pos);

// Where the span of chunks that begins here ends.
template <class Kv>
TL_DEVICE int span_end(int begin, int end) {
  constexpr int kSpan = Kv::kQuantised ? kHeadSpan : kSpanChunks;
  return min(end, (begin / kSpan + 1) * kSpan);
}

// The last chunk of one of a unit's CTAs.
TL_DEVICE int last_chunk(const KeyChunks &chunks, int rank, int n_ranks) {
  const int first = chunks.first + rank;
  return first + (chunks.end - 1 - first) / n_ranks * n_ranks;
}

// The span of all quads that the CTA merges; the first one of a warp is known.
TL_DEVICE void merge_quads(const StepAttention &t, const AttentionHead &a, const AttentionShape &shape, const Unit &u, const MergeShare &share,
                           const AttentionMemory &m, const Handover &hand, const Quad &first_quad, int begin, int end, bool is_first, bool is_last) {
#pragma unroll 1
  for (int i = hand.warp(); i < share.n_mine; i += kWarps) {
    const Quad quad = i < kWarps ? first_quad : quad_of(shape, u, share.first + i);
    float *kept = m.total() + (4 * i + hand.lane() % 4) * 3;
    Total total = {kMasked, 0.0f, 0.0f};
    if (!is_first) total = {kept[0], kept[1], kept[2]};
    merge_span(total, m, hand, quad, u.chunk_bytes, begin, end);
    if (is_last)
      hand_attention(t, a, hand, quad, total);
    else if (hand.lane() < 4)
      kept[0] = total.m, kept[1] = total.l, kept[2] = total.o;
  }
}

// The CTA's part of an attention. `settle` is called when all threads are in this task.
template <class Kv, class Settle>
TL_DEVICE void run_attention(const StepAttention &t, const AttentionShape &shape, const CtaPlace &cta, const StepMemory &memory, uint8_t *states,
                             const Handover &hand, const Ring &ring, RingPlace &base, int pos, const int32_t *table, const Settle &settle) {
  const AttentionMemory m{memory.attention, memory.operand, (uint8_t *)memory.partial, hand.warp()};
  AttentionHead a;
  AttentionPlan plan;
  load_at_once(a, t.head);
  load_at_once(plan, *(const AttentionPlan *)m.plan());
  const Keys keys = keys_of(pos, a.window);
  const KeyChunks chunks = chunks_of(keys);
  // Nothing to do: and so nobody would wait until it has read its queries, whose words are written again.
  if (cta.unit >= shape.n_units || (plan.share.n_mine <= 0 && chunks.first + cta.rank >= chunks.end)) {
    meet();
    return settle();
  }
  const int team = hand.warp() / kWarpsOfTeam, own = pos / TL_KEY_CHUNK, n_ranks = shape.n_ranks, later = own - chunks.first - cta.rank;
  const bool owns = later >= 0 && quotient(later, shape.ranks_inverse) * n_ranks == later;
  const int page = owns ? table[pos / TL_PAGE_POSITIONS] : -1;
#pragma unroll 1
  for (int index = cta.unit; index < shape.n_units; index += shape.n_strides) {
    const bool is_first = index == cta.unit;
    const Unit u = is_first ? plan.unit : unit_of<Kv>(shape, index, cta.rank, states);
    const MergeShare share = is_first ? plan.share : merge_share<Kv>(shape, u);
    const int n_heads = u.n_queries + (owns ? 2 : 0);
    HeadWords head;
    ask_head(head, a, shape, u, hand, first_head(hand), first_head(hand) < n_heads);
    const TeamLane me = lane_of(shape, u, m, hand, a.scale);
    // A team's next chunk: one of the CTA's first kTeamsOfCta, and every kTeamsOfCta-th from there on.
    TeamChunk c = {};
    int chunk = chunks.first + cta.rank;
    const auto skip = [&](int n) {
#pragma unroll 1
      for (; n && chunk < chunks.end; n--, chunk += n_ranks) base = further(base, pages_of(keys, chunk).n, ring.n_slots);
    };
    skip(team);
    if (chunk < chunks.end) find_chunk(c, u, m, hand, ring, base, shape.k_nbytes, keys, chunk, pos);
    Quad first_quad = {};
    if (hand.warp() < share.n_mine) first_quad = quad_of(shape, u, share.first + hand.warp());
    if (!is_first) meet();  // no one reads the unit before any more
    place_heads<Kv>(t, a, shape, u, m, hand, head, page, pos % TL_PAGE_POSITIONS, n_heads);
    bool are_there = !Kv::kQuantised && chunk < chunks.end;
    if (are_there) wait_for_pages(ring, c);  // while other warps wait for heads
    meet();
    // A span is merged behind the next one's chunks: then its states are there. Where there are more chunks than places for states, a CTA whose
    // chunk of span n takes a place of span n - 8 must not be ahead of those who merge that one. Its threads meet behind every second span, so
    // that all of the CTA have merged, or followed, span n - 3; who left that one had likewise merged span n - 6. Of codes there are places for
    // two spans: then each is merged, or followed, at once, and who left span n - 1 had merged span n - 2.
    const bool places_again = chunks.end - chunks.first > kHeldChunks, at_once = Kv::kQuantised && places_again;
    static_assert(kHeldChunks == 8 * kSpanChunks, "see above");
#pragma unroll 1
    for (int begin = chunks.first, before = begin; before < chunks.end;) {
      const int end = span_end<Kv>(begin, chunks.end);
      // A team that waits for a chunk has read the one kTeamsOfCta before: the ring holds as many, so no slot is two uses behind.
#pragma unroll 1
      while (chunk < end) {
        if constexpr (Kv::kQuantised)
          attend_code_chunk<Kv>(me, m, ring, c, keys, pos);
        else
          attend_chunk<Kv>(me, m, ring, c, are_there, keys, pos);
        are_there = false;
        skip(kTeamsOfCta);
        if (chunk < chunks.end) find_chunk(c, u, m, hand, ring, base, shape.k_nbytes, keys, chunk, pos);
      }
      const bool has_next = end < chunks.end, meets = places_again && has_next && (at_once || begin / kSpanChunks % 2);
      if (begin == chunks.first && has_next && !at_once) {
        begin = end;
        continue;
      }
      const int before_end = span_end<Kv>(before, chunks.end);
      if (meets && share.n_mine <= 0 && last_chunk(chunks, u.rank, n_ranks) >= end) follow_span(u, hand, before, before_end);
      if constexpr (Kv::kQuantised)
        merge_heads(shape, u, share, m, hand, before, before_end, before == chunks.first, before_end == chunks.end);
      else
        merge_quads(t, a, shape, u, share, m, hand, first_quad, before, before_end, before == chunks.first, before_end == chunks.end);
      if (meets) meet();
      before = before_end;
      begin = end;
    }
    if (Kv::kQuantised && share.n_mine > 0) {
      meet();
      hand_heads(t, a, shape, u, share, m, hand);
    }
  }
  settle();
}

#endif

}  // namespace tl
