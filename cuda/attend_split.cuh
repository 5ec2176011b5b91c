// What the split attention keeps in shared memory, and how a cluster merges the chunks of a round in order.
#pragma once

#include "attend.cuh"

namespace tl {

constexpr int kTeams = 2;  // of four warps, each on a chunk of its own
constexpr int kTeamThreads = kThreads / kTeams;
constexpr int kTeamWarps = kWarps / kTeams;
constexpr float kDead = -1.0f;  // factor of a chunk that a query does not see

struct Split {
  Query *query;           // (kTileQueries,)
  uint8_t *q;             // tile of kTileQueries rows; of codes the high bytes, then the low ones
  float *q_scale;         // (kTileQueries,) of codes
  uint8_t *k, *v;         // of this team's chunk
  uint4 *p;               // (pages, 32) of this team; of codes (pages, 32, 2), P in float32
  float *top;             // (kTeamWarps, kTileQueries) of this team
  float *m, *l, *o;       // chunk states: (2 rounds, kTeams, ..), o (.., n_queries, head_pad)
  float *factor_a, *factor_b, *chunk_l;  // (kTileQueries, TL_CHUNK_GROUP)
  float *group_m, *group_l, *total_m, *total_l;  // (kTileQueries,)
  float *group_o, *total_o;                      // this CTA's slice
  float *head;            // (kWarps, kMaxHeadDim)
  uint4 *new_k, *new_v;   // (head_pad / 8,) of the row placed here: eight dims each
};

// Bytes of a query in the tile.
template <class Kv>
TL_BOTH int tile_row_bytes(int head_pad) {
  return 2 * (Kv::kQuantised ? code_pad(head_pad) : head_pad);
}

// Queries of a tile, and tiles of a row where a tile is of one row.
TL_BOTH int tile_queries(const AttendArgs &a) {
  const int group = a.place.n_heads / a.place.n_kv_heads;
  return a.rows_of_tile > 1 ? a.rows_of_tile * group : group < a.queries_of_tile ? group : a.queries_of_tile;
}
TL_BOTH int subtiles(const AttendArgs &a) {
  const int group = a.place.n_heads / a.place.n_kv_heads;
  return a.rows_of_tile > 1 ? 1 : (group + a.queries_of_tile - 1) / a.queries_of_tile;
}
TL_BOTH int slice_of(int n_queries, int head_pad, int n_ctas) { return round_up((n_queries * head_pad + n_ctas - 1) / n_ctas, 4); }

// Lays the parts out one after another; with base NULL the result is the size.
template <class Kv>
TL_BOTH int lay_out(Split &s, uint8_t *base, const KvLayer &kv, int n_queries, int n_ctas, int team) {
  int at = 0;
  const auto take = [&](int nbytes) {
    uint8_t *p = base + at;
    at += round_up(nbytes, 16);
    return p;
  };
  const int head_pad = kv.head_pad, slice = slice_of(n_queries, head_pad, n_ctas) * 4, p_words = Kv::kQuantised ? 2 : 1;
  const int k_chunk = kPagesOfChunk * kv.k_nbytes, v_chunk = kPagesOfChunk * kv.v_nbytes;
  s.query = (Query *)take(kTileQueries * sizeof(Query));
  s.q = take(kTileQueries * tile_row_bytes<Kv>(head_pad));
  s.q_scale = (float *)take(Kv::kQuantised ? kTileQueries * 4 : 0);
  s.k = take(kTeams * k_chunk) + team * k_chunk;
  s.v = take(kTeams * v_chunk) + team * v_chunk;
  s.p = (uint4 *)take(kTeams * kPagesOfChunk * p_words * 512) + team * kPagesOfChunk * p_words * 32;
  s.top = (float *)take(kWarps * kTileQueries * 4) + team * kTeamWarps * kTileQueries;
  s.m = (float *)take(2 * kTeams * kTileQueries * 4);
  s.l = (float *)take(2 * kTeams * kTileQueries * 4);
  s.o = (float *)take(2 * kTeams * n_queries * head_pad * 4);
  s.factor_a = (float *)take(kTileQueries * TL_CHUNK_GROUP * 4);
  s.factor_b = (float *)take(kTileQueries * TL_CHUNK_GROUP * 4);
  s.chunk_l = (float *)take(kTileQueries * TL_CHUNK_GROUP * 4);
  s.group_m = (float *)take(kTileQueries * 4);
  s.group_l = (float *)take(kTileQueries * 4);
  s.total_m = (float *)take(kTileQueries * 4);
  s.total_l = (float *)take(kTileQueries * 4);
  s.group_o = (float *)take(slice);
  s.total_o = (float *)take(slice);
  s.head = (float *)take(kWarps * kMaxHeadDim * 4);
  s.new_k = (uint4 *)take(head_pad * 2);
  s.new_v = (uint4 *)take(head_pad * 2);
  return at;
}

// Points m, l and o at one chunk's state.
TL_DEVICE void use_slot(Split &s, int slot, int n_queries, int head_pad) {
  s.m += slot * kTileQueries;
  s.l += slot * kTileQueries;
  s.o += slot * n_queries * head_pad;
}

// Factors of the round's chunks for every query, from the group's state on; l and m of the group move on.
TL_DEVICE void find_factors(const Split &s, const Run &run, int base, int n_chunks, int round) {
  const int q = threadIdx.x / TL_CHUNK_GROUP, c = threadIdx.x % TL_CHUNK_GROUP, chunk = base + c;
  const bool alive =
      q >= run.begin && q < run.end && c < n_chunks && s.query[q].first < (chunk + 1) * TL_KEY_CHUNK && s.query[q].end > chunk * TL_KEY_CHUNK;
  const int at = (round % 2 * kTeams + c % kTeams) * kTileQueries + q;
  const float m = alive ? *of_cluster_rank(s.m + at, c / kTeams) : kMasked;
  const float l = alive ? *of_cluster_rank(s.l + at, c / kTeams) : 0.0f;
  const float before = s.group_m[q];
  float top = m;  // over this chunk and the round's earlier ones
#pragma unroll
  for (int d = 1; d < TL_CHUNK_GROUP; d *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, top, d, TL_CHUNK_GROUP);
    if (c >= d) top = fmaxf(top, other);
  }
  const float left = __shfl_up_sync(0xffffffffu, top, 1, TL_CHUNK_GROUP);
  const MergeFactors f = merge_factors(fmaxf(before, c ? left : kMasked), m);
  s.factor_a[threadIdx.x] = f.earlier;
  s.factor_b[threadIdx.x] = alive ? f.later : kDead;
  s.chunk_l[threadIdx.x] = l;
  __syncthreads();
  if (c == 0) {
    float sum = s.group_l[q];
#pragma unroll 4
    for (int i = 0; i < TL_CHUNK_GROUP; i++) {
      const MergeFactors g{s.factor_a[q * TL_CHUNK_GROUP + i], s.factor_b[q * TL_CHUNK_GROUP + i]};
      if (g.later != kDead) sum = merge_value(sum, s.chunk_l[q * TL_CHUNK_GROUP + i], g);
    }
    s.group_l[q] = sum;
  }
  if (c == TL_CHUNK_GROUP - 1) s.group_m[q] = fmaxf(before, top);
}

// Merges the round's chunks into this CTA's slice of the group's O.
TL_DEVICE void merge_round(const Split &s, int n_queries, int head_pad, int slice, int n_chunks, int round) {
  const int first = cluster_rank() * slice, n = n_queries * head_pad;
#pragma unroll 1
  for (int i = threadIdx.x; i < slice && first + i < n; i += kThreads) {
    const int e = first + i;
    const float *a = s.factor_a + e / head_pad * TL_CHUNK_GROUP, *b = s.factor_b + e / head_pad * TL_CHUNK_GROUP;
    float o[TL_CHUNK_GROUP];
#pragma unroll
    for (int c = 0; c < TL_CHUNK_GROUP; c++)
      if (c < n_chunks) o[c] = *of_cluster_rank(s.o + (round % 2 * kTeams + c % kTeams) * n + e, c / kTeams);
    float sum = s.group_o[i];
#pragma unroll
    for (int c = 0; c < TL_CHUNK_GROUP; c++)
      if (c < n_chunks && b[c] != kDead) sum = merge_value(sum, o[c], {a[c], b[c]});
    s.group_o[i] = sum;
  }
}

// Merges the finished group into the total and empties it.
TL_DEVICE void close_group(const Split &s, int n_queries, int head_pad, int slice) {
  __syncthreads();
  const int first = cluster_rank() * slice, n = n_queries * head_pad;
#pragma unroll 1
  for (int i = threadIdx.x; i < slice && first + i < n; i += kThreads) {
    const int q = (first + i) / head_pad;
    if (s.group_m[q] != kMasked) s.total_o[i] = merge_value(s.total_o[i], s.group_o[i], merge_factors(s.total_m[q], s.group_m[q]));
    s.group_o[i] = 0.0f;
  }
  __syncthreads();
  const int q = threadIdx.x;
  if (q < kTileQueries) {
    if (s.group_m[q] != kMasked) {
      s.total_l[q] = merge_value(s.total_l[q], s.group_l[q], merge_factors(s.total_m[q], s.group_m[q]));
      s.total_m[q] = fmaxf(s.total_m[q], s.group_m[q]);
    }
    s.group_m[q] = kMasked;
    s.group_l[q] = 0.0f;
  }
  __syncthreads();
}

TL_DEVICE void empty_states(const Split &s, int slice) {
  for (int i = threadIdx.x; i < slice; i += kThreads) s.group_o[i] = s.total_o[i] = 0.0f;
  if (threadIdx.x < kTileQueries) {
    s.group_m[threadIdx.x] = s.total_m[threadIdx.x] = kMasked;
    s.group_l[threadIdx.x] = s.total_l[threadIdx.x] = 0.0f;
  }
}

// O / l of this CTA's slice for the run's queries, to the operand of the next product, padding included.
TL_DEVICE void store_output(const AttendArgs &a, const Split &s, const Run &run, int n_queries, int slice) {
  const int head_pad = a.place.kv.head_pad, head_dim = a.place.head_dim, first = cluster_rank() * slice, q_dim = a.place.n_heads * head_dim;
#pragma unroll 1
  for (int i = threadIdx.x; i < slice && first + i < n_queries * head_pad; i += kThreads) {
    const int q = (first + i) / head_pad, d = (first + i) % head_pad;
    const Query &query = s.query[q];
    if (q < run.begin || q >= run.end || query.row < 0) continue;
    const float l = s.total_l[q];
    if (d < head_dim) store_operand(a.out, query.row, query.head * head_dim + d, l != 0.0f ? s.total_o[i] * (1.0f / l) : 0.0f);
    if (query.head == a.place.n_heads - 1 && d == 0)
#pragma unroll 1
      for (int k = q_dim; k < a.out.n_in; k++) store_operand(a.out, query.row, k, 0.0f);
  }
}

// A warp's O of sixteen dims to the round's state.
TL_DEVICE void leave_block(const Split &s, int b, const float (&o)[2][4], int n_queries, int head_pad) {
  const int lane = lane_id();
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const int q = lane / 4 + i % 4 / 2 * 8;
    if (q < n_queries) *(float2 *)(s.o + q * head_pad + b * 16 + i / 4 * 8 + lane % 4 * 2) = make_float2(o[i / 4][i % 4], o[i / 4][i % 4 + 1]);
  }
}

}  // namespace tl
