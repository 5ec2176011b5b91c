// What the tile attention keeps of its queries over chunks and groups of them, and how it leaves the result.
#pragma once

#include "attend.cuh"

namespace tl {

constexpr int kTileWarps = kPagesOfChunk;  // each brings one page of a chunk
constexpr int kTileThreads = 32 * kTileWarps;
constexpr int kQueriesOfCta = kTileWarps * kTileQueries;

// State of this lane's two queries over the current group of chunks, and (m, l) of the groups before it.
template <int kDims>
struct State {
  float o[kDims / 16][2][4];
  float m[2], l[2], total_m[2], total_l[2];
};

template <int kDims>
TL_DEVICE void empty_group(State<kDims> &s) {
#pragma unroll
  for (int i = 0; i < kDims / 16 * 8; i++) s.o[i / 8][i % 8 / 4][i % 4] = 0.0f;
#pragma unroll
  for (int h = 0; h < 2; h++) s.m[h] = kMasked, s.l[h] = 0.0f;
}

// Whether a warp's rows see any of a chunk, and all of it.
struct Sight {
  bool alive[2], any, whole;
};

TL_DEVICE Sight sight_of(const Keys (&keys)[2], int first) {
  Sight s;
  bool whole = true;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    s.alive[h] = keys[h].first < first + TL_KEY_CHUNK && keys[h].end > first;
    whole = whole && keys[h].first <= first && keys[h].end >= first + TL_KEY_CHUNK;
  }
  s.any = __any_sync(0xffffffffu, s.alive[0] || s.alive[1]);
  s.whole = !__any_sync(0xffffffffu, !whole);
  return s;
}

TL_DEVICE void mask_chunk(float (&s)[kPagesOfChunk][2][4], const Keys (&keys)[2], int first) {
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    const int page = first + j * TL_PAGE_POSITIONS;
    const int lo[2] = {keys[0].first - page, keys[1].first - page}, hi[2] = {keys[0].end - page, keys[1].end - page};
    mask_page(s[j], lo, hi);
  }
}

// Takes a chunk's m and l into the state.
template <int kDims>
TL_DEVICE void absorb(State<kDims> &state, MergeFactors &f, float m, float l, bool alive, int h) {
  f = merge_factors(state.m[h], m);
  if (!alive) return;
  state.l[h] = merge_value(state.l[h], l, f);
  state.m[h] = fmaxf(state.m[h], m);
}

// The same of O of a block of dims.
TL_DEVICE void absorb_block(float (&sum)[2][4], const float (&o)[2][4], const MergeFactors (&f)[2], const bool (&alive)[2]) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float &x = sum[i / 4][i % 4];
    const float merged = merge_value(x, o[i / 4][i % 4], f[i % 4 / 2]);
    x = alive[i % 4 / 2] ? merged : x;
  }
}

// Merges the group into the total and empties it. The total's O: value i of a thread at total[i * kTileThreads].
template <int kDims>
TL_DEVICE void close_group(State<kDims> &s, float *total) {
  MergeFactors f[2];
  bool any[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    any[h] = s.m[h] != kMasked;
    f[h] = merge_factors(s.total_m[h], s.m[h]);
    if (!any[h]) continue;
    s.total_l[h] = merge_value(s.total_l[h], s.l[h], f[h]);
    s.total_m[h] = fmaxf(s.total_m[h], s.m[h]);
  }
#pragma unroll
  for (int i = 0; i < kDims / 16 * 8; i++) {
    float &sum = total[i * kTileThreads];
    if (any[i % 4 / 2]) sum = merge_value(sum, s.o[i / 8][i % 8 / 4][i % 4], f[i % 4 / 2]);
  }
  empty_group(s);
}

// Zeros behind the last head of a row.
TL_DEVICE void store_padding(const AttendArgs &a, const Query &q) {
  if (q.head != a.place.n_heads - 1 || lane_id() % 4) return;
#pragma unroll 1
  for (int k = a.place.n_heads * a.place.head_dim; k < a.out.n_in; k++) store_operand(a.out, q.row, k, 0.0f);
}

// The dims from first_dim on.
template <int kDims>
TL_DEVICE void store_output(const AttendArgs &a, const State<kDims> &s, const float *total, const Query *query, const Run &run, int first_dim = 0) {
  const int head_dim = a.place.head_dim;
#pragma unroll 1
  for (int h = 0; h < 2; h++) {
    const int at = warp_id() % kTileWarps * kTileQueries + lane_id() / 4 + 8 * h;
    const Query q = query[at];
    if (at < run.begin || at >= run.end || q.row < 0) continue;
    const float l = h ? s.total_l[1] : s.total_l[0], inverse = l != 0.0f ? 1.0f / l : 0.0f;
#pragma unroll 4
    for (int b = 0; b < kDims / 8; b++) {
      const int d = first_dim + b * 8 + lane_id() % 4 * 2, i = b * 4 + 2 * h;
      if (d < head_dim)
        store_operand_pair(a.out, q.row, q.head * head_dim + d, total[i * kTileThreads] * inverse, total[(i + 1) * kTileThreads] * inverse);
    }
    if (!first_dim) store_padding(a, q);
  }
}

// The same with heads turned back. A row's values are over four lanes: bit 0 of a dim is a lane's neighbours, bits 1 and 2 the lane.
template <int kDims>
TL_DEVICE void store_turned(const AttendArgs &a, const State<kDims> &s, const float *total, const Query *query, const Run &run) {
  const int head_dim = a.place.head_dim, lane = lane_id() % 4;
#pragma unroll 1
  for (int h = 0; h < 2; h++) {
    const float l = h ? s.total_l[1] : s.total_l[0], inverse = l != 0.0f ? 1.0f / l : 0.0f;
    float x[kDims / 8][2];
#pragma unroll
    for (int b = 0; b < kDims / 8; b++) {
      const float *from = total + (b * 4 + 2 * h) * kTileThreads;
      const float lower = from[0] * inverse, upper = from[kTileThreads] * inverse;
      x[b][0] = lower + upper;
      x[b][1] = lower - upper;
    }
#pragma unroll
    for (int half = 2; half < 8; half *= 2) {
      if (half >= a.place.turn) break;
#pragma unroll
      for (int i = 0; i < kDims / 4; i++) {
        float &own = x[i / 2][i % 2];
        const float other = __shfl_xor_sync(0xffffffffu, own, half / 2);
        own = lane & half / 2 ? other - own : own + other;
      }
    }
#pragma unroll
    for (int half = 8; half < kDims; half *= 2) {
      if (half >= a.place.turn) break;
#pragma unroll
      for (int i = 0; i < kDims / 4; i++) {
        const int b = i / 2;
        if (b & half / 8) continue;
        const float lower = x[b][i % 2], upper = x[b + half / 8][i % 2];
        x[b][i % 2] = lower + upper;
        x[b + half / 8][i % 2] = lower - upper;
      }
    }
    const int at = warp_id() * kTileQueries + lane_id() / 4 + 8 * h;
    const Query q = query[at];
    if (at < run.begin || at >= run.end || q.row < 0) continue;
#pragma unroll
    for (int b = 0; b < kDims / 8; b++) {
      const int d = b * 8 + lane * 2;
      if (d < head_dim) store_operand_pair(a.out, q.row, q.head * head_dim + d, x[b][0] * a.place.turn_scale, x[b][1] * a.place.turn_scale);
    }
    store_padding(a, q);
  }
}

}  // namespace tl
