// Attention of 64 queries on one chunk of keys by a warpgroup's wgmma, for 16-bit K and V and heads of 64 or 128: scores, P and P V
// with the numbers of attend.cuh. The queries stay in registers; a chunk's pages lie in shared memory as they lie in memory.
//
// A page's keys are two rows of tiles, the first eight keys and the last, so scores come as two products of 4 x 8 keys.
#pragma once

#include "attend_tile.cuh"
#include "wgmma.cuh"

namespace tl {

constexpr int kWideQueries = 64;

#if TL_WGMMA

// This warp's sixteen queries as left operands, from q in memory; those that are not there are zero.
template <int kDims>
TL_DEVICE void load_queries(uint32_t (&q)[kDims / 16][4], const AttendArgs &a, const Query *query) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const Query &of = query[warp_id() % 4 * kTileQueries + lane_id() / 4 + 8 * h];
    const uint16_t *from = (const uint16_t *)a.place.q + ((int64_t)max(of.row, 0) * a.place.n_heads + of.head) * kDims + lane_id() % 4 * 2;
#pragma unroll
    for (int b = 0; b < kDims / 16; b++)
#pragma unroll
      for (int half = 0; half < 2; half++) q[b][half * 2 + h] = of.row < 0 ? 0 : *(const uint32_t *)(from + b * 16 + half * 8);
  }
}

// Begins the scores of a chunk, of its pages' first eight keys and of the others; `pages`: four, page_bytes apart.
template <class Kv, int kDims>
TL_DEVICE void begin_scores(float (&x)[2][kPagesOfChunk * 4], const uint32_t (&q)[kDims / 16][4], shared_t pages, int page_bytes) {
  const uint64_t keys = wgmma_tiles(pages, page_bytes, 256);
  wgmma_fence();
#pragma unroll
  for (int b = 0; b < kDims / 16; b++)
#pragma unroll
    for (int half = 0; half < 2; half++) wgmma<Kv>(x[half], q[b], wgmma_tiles_at(keys, b * 512 + half * 128), b > 0);
  wgmma_commit();
}

TL_DEVICE void take_scores(float (&s)[kPagesOfChunk][2][4], const float (&x)[2][kPagesOfChunk * 4]) {
#pragma unroll
  for (int i = 0; i < kPagesOfChunk * 8; i++) s[i / 8][i % 8 / 4][i % 4] = x[i % 8 / 4][i / 8 * 4 + i % 4];
}

template <class Kv, int kDims>
TL_DEVICE void score_chunk(float (&s)[kPagesOfChunk][2][4], const uint32_t (&q)[kDims / 16][4], shared_t pages, int page_bytes) {
  float x[2][kPagesOfChunk * 4];
  begin_scores<Kv, kDims>(x, q, pages, page_bytes);
  wgmma_wait<0>();
  accumulators_ready(x[0]);
  accumulators_ready(x[1]);
  take_scores(s, x);
}

// Begins O of the chunk, from zero; `values`: V of the first page.
template <class Kv, int kDims>
TL_DEVICE void begin_weighing(float (&o)[kDims / 2], const uint32_t (&p)[kPagesOfChunk][4], shared_t values, int page_bytes) {
  const uint64_t tiles = wgmma_tiles(values, 256);
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) wgmma<Kv, true>(o, p[j], wgmma_tiles_at(tiles, j * page_bytes), j > 0);
  wgmma_commit();
}

// P of a chunk, and its m.
template <class Kv>
TL_DEVICE void soften_chunk(uint32_t (&p)[kPagesOfChunk][4], float (&m)[2], float (&s)[kPagesOfChunk][2][4], const Keys (&keys)[2], int first,
                            const Sight &sight, float scale) {
  if (!sight.whole) mask_chunk(s, keys, first);
#pragma unroll
  for (int h = 0; h < 2; h++) m[h] = chunk_maximum<Kv>(row_maximum<Kv>(lane_maximum<Kv>(s, h)), scale);
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) soften_page<Kv>(p[j], s[j], m, scale);
}

// The keys of this lane's two queries, where they are of the run.
TL_DEVICE void keys_of_run(Keys (&keys)[2], const Query *query, const Run &run) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int i = warp_id() % 4 * kTileQueries + lane_id() / 4 + 8 * h;
    keys[h] = i >= run.begin && i < run.end ? Keys{query[i].first, query[i].end} : Keys{0, 0};
  }
}

#if defined(TL_EMULATOR)
TL_DEVICE int warp_min(int x) {
  for (int w = 16; w; w /= 2) x = min(x, __shfl_xor_sync(0xffffffffu, x, w));
  return x;
}
#else
TL_DEVICE int warp_min(int x) { return __reduce_min_sync(0xffffffffu, x); }
#endif

// run_from, by a warp.
TL_DEVICE Run wide_run_from(const Query *query, int begin) {
  const int seq = query[begin].seq;
  int end = kWideQueries, first = kWideQueries * (1 << 24), last = 0;
#pragma unroll
  for (int i = lane_id(); i < kWideQueries; i += 32)
    if (i >= begin && query[i].seq != seq) end = min(end, i);
  end = warp_min(end);
#pragma unroll
  for (int i = lane_id(); i < kWideQueries; i += 32) {
    if (i < begin || i >= end || !query[i].end) continue;
    first = min(first, query[i].first);
    last = max(last, query[i].end);
  }
  last = -warp_min(-last);
  return Run{seq, begin, end, {last ? warp_min(first) : 0, last}};
}

// A lane's page of a chunk, for lanes 0..3. In place of one that no query reads comes one that some read: it is finite, and its P
// is zero.
TL_DEVICE int page_for_lane(const int32_t *table, int chunk, Keys keys) {
  return table[min(max(chunk * kPagesOfChunk + lane_id() % kPagesOfChunk, keys.first / TL_PAGE_POSITIONS), (keys.end - 1) / TL_PAGE_POSITIONS)];
}

// A warp requests a chunk's pages, K and V of each in one run of bytes. `page`: of this lane's page of the chunk.
TL_DEVICE void request_chunk(const AttendArgs &a, shared_t to, int page, int kv_head, shared_t full) {
  const int page_bytes = a.place.kv.k_nbytes + a.place.kv.v_nbytes;
  int pages[kPagesOfChunk];
#pragma unroll
  for (int i = 0; i < kPagesOfChunk; i++) pages[i] = __shfl_sync(0xffffffffu, page, i);
  if (elected()) {
    barrier_arrive_expecting(full, kPagesOfChunk * page_bytes);
#pragma unroll
    for (int i = 0; i < kPagesOfChunk; i++) copy_bulk(to + i * page_bytes, k_of(a.place.kv, pages[i], kv_head), page_bytes, full);
  }
  __syncwarp();
}

#endif

// Whether these kernels take it.
inline bool attends_by_wgmma(const tl_context &context, const AttendArgs &args) {
  const KvLayer &kv = args.place.kv;
  return context.code == kCodeSm90a && (kv.dtype == TL_BF16 || kv.dtype == TL_F16) && (kv.head_pad == 64 || kv.head_pad == 128);
}

}  // namespace tl
