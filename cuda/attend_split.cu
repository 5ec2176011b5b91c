// Attention for few rows: a cluster of CTAs shares out the key chunks of 16 queries that read the same keys (heads of one
// KV head, and rows of one sequence), in rounds of two chunks a CTA, and merges them in order through distributed shared
// memory, each CTA a slice of the output. Fused for one row: q, k and v are normed, turned, rounded and stored here.
// Accumulation and merging in float32, by the functions of attend.cuh.
#include <algorithm>

#include "attend.cuh"

namespace tl {
namespace {

constexpr int kTeams = 2;  // of four warps, each on a chunk of its own; a warp takes a page's scores, then its share of the dims
constexpr int kTeamThreads = kThreads / kTeams;
constexpr int kTeamWarps = kWarps / kTeams;
constexpr float kDead = -1.0f;  // factor of a chunk that a query does not see

// What a CTA's shared memory holds.
struct Shared {
  uint8_t *q;             // tile of kTileQueries rows
  uint8_t *k, *v;         // of this team's chunk
  uint4 *p;               // (pages, 32) of this team
  float *top;             // (kTeamWarps, kTileQueries) of this team
  float *m, *l, *o;       // chunk states: (2 rounds, kTeams, ..), o (.., n_queries, head_pad)
  float *factor_a, *factor_b, *chunk_l;  // (kTileQueries, TL_CHUNK_GROUP)
  float *group_m, *group_l, *total_m, *total_l;  // (kTileQueries,)
  float *group_o, *total_o;                      // this CTA's slice
  float *head;            // (kWarps, kMaxHeadDim)
  uint4 *new_k, *new_v;   // (head_pad / 8,) of the row placed here
};

TL_BOTH int tile_queries(const AttendArgs &a) {
  const int group = a.place.n_heads / a.place.n_kv_heads;
  return a.rows_of_tile > 1 ? a.rows_of_tile * group : group < kTileQueries ? group : kTileQueries;
}
TL_BOTH int tiles_of_row(const AttendArgs &a) {  // where a tile is of one row
  const int group = a.place.n_heads / a.place.n_kv_heads;
  return a.rows_of_tile > 1 ? 1 : (group + kTileQueries - 1) / kTileQueries;
}
TL_BOTH int slice_of(int n_queries, int head_pad, int n_ctas) { return round_up((n_queries * head_pad + n_ctas - 1) / n_ctas, 4); }

// Lays the parts out one after another; with base NULL the result is the size.
TL_BOTH int lay_out(Shared &s, uint8_t *base, int head_pad, int n_queries, int n_ctas, int team) {
  int at = 0;
  const auto take = [&](int nbytes) {
    uint8_t *p = base + at;
    at += round_up(nbytes, 16);
    return p;
  };
  const int chunk = TL_KEY_CHUNK * head_pad * 2, slice = slice_of(n_queries, head_pad, n_ctas) * 4;
  s.q = take(kTileQueries * head_pad * 2);
  s.k = take(kTeams * chunk) + team * chunk;
  s.v = take(kTeams * chunk) + team * chunk;
  s.p = (uint4 *)take(kTeams * kPagesOfChunk * 512) + team * kPagesOfChunk * 32;
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

struct Query {
  int row, head, seq;
  Keys keys;  // empty where the query does not exist or does nothing
};

TL_DEVICE Query query_of(const AttendArgs &a, int tile, int kv_head, int i) {
  const Rows &r = a.place.rows;
  const int group = a.place.n_heads / a.place.n_kv_heads, n_sub = tiles_of_row(a);
  const int in_row = a.rows_of_tile > 1 ? i % group : tile % n_sub * kTileQueries + i;
  Query q;
  q.row = a.rows_of_tile > 1 ? tile * a.rows_of_tile + i / group : tile / n_sub;
  q.head = kv_head * group + in_row;
  const bool exists = i < tile_queries(a) && q.row < r.n_rows && in_row < group;
  const int pos = exists ? r.pos[q.row] : -1;
  q.seq = exists ? r.seq[q.row] : -1;
  q.keys = pos < 0 ? Keys{0, 0} : keys_of(pos, a.window);
  if (!exists) q.row = -1;
  return q;
}

// The row's q, k and v from the product's outputs: q to the tile, k and v to the page and to new_k, new_v.
TL_DEVICE void place_row(const AttendArgs &a, const Shared &s, int tile, int kv_head, bool owns_position) {
  const PlaceArgs &p = a.place;
  const int pos = p.rows.pos[0], n_queries = tile_queries(a), head_pad = p.kv.head_pad;
  float *v = s.head + warp_id() * kMaxHeadDim;
  for (int i = warp_id(); i < n_queries + (owns_position ? 2 : 0); i += kWarps) {
    const int part = i - n_queries;  // 0: k, 1: v
    const int head = part < 0 ? query_of(a, tile, kv_head, i).head : p.n_heads + part * p.n_kv_heads + kv_head;
    if (part < 0 && query_of(a, tile, kv_head, i).row < 0) continue;
    finish_head(p, 0, head, max(pos, 0), 0.0f, v);
    const int dim = lane_id() * 8;
    if (dim >= head_pad) continue;
    const uint4 rounded = round_eight(p.kv.dtype, v + dim);
    if (part < 0) {
      *(uint4 *)((uint16_t *)s.q + k_index(i, dim)) = rounded;
      continue;
    }
    (part ? s.new_v : s.new_k)[lane_id()] = rounded;
    if (tile % tiles_of_row(a)) continue;  // another tile of the row stores it
    const int page = page_of(p.rows, p.rows.seq[0], pos), slot = pos % TL_PAGE_POSITIONS;
    uint16_t *to = (uint16_t *)(part ? v_of(p.kv, page, kv_head) : k_of(p.kv, page, kv_head));
    *(uint4 *)(to + (part ? v_index(slot, dim) : k_index(slot, dim))) = rounded;
    count_clamped(p, v + dim);
  }
}

TL_DEVICE void fetch_queries(const AttendArgs &a, const Shared &s, int tile, int kv_head) {
  const int pieces = a.place.kv.head_pad / 8;
  for (int i = threadIdx.x; i < tile_queries(a) * pieces; i += kThreads) {
    const Query q = query_of(a, tile, kv_head, i / pieces);
    if (q.row < 0) continue;
    const uint16_t *from = (const uint16_t *)a.place.q + ((int64_t)q.row * a.place.n_heads + q.head) * a.place.kv.head_pad + i % pieces * 8;
    *(uint4 *)((uint16_t *)s.q + k_index(i / pieces, i % pieces * 8)) = load_fresh((const uint4 *)from);
  }
}

// Scores and P of a chunk, by one team. `mine`: the queries of this lane's two rows.
template <class Kv>
TL_DEVICE void soften_chunk(const AttendArgs &a, const Shared &s, const Query (&mine)[2], int chunk, bool insert) {
  const int warp = warp_id() % kTeamWarps, lane = lane_id(), team = warp_id() / kTeamWarps, head_pad = a.place.kv.head_pad;
  const int page_elements = TL_PAGE_POSITIONS * head_pad, page_first = chunk * TL_KEY_CHUNK + warp * TL_PAGE_POSITIONS;
  const int thread = threadIdx.x % kTeamThreads, pos = a.place.rows.pos[0], key = pos % TL_KEY_CHUNK;
  wait_copies<1>();
  if (insert) {
    sync_threads(1 + team, kTeamThreads);
    const int at = key / TL_PAGE_POSITIONS * page_elements + k_index(key % TL_PAGE_POSITIONS, thread * 8);
    if (thread < head_pad / 8) *(uint4 *)((uint16_t *)s.k + at) = s.new_k[thread];
  }
  sync_threads(1 + team, kTeamThreads);
  float scores[1][2][4], (&x)[2][4] = scores[0];
  score_pages<Kv>(scores, (const uint16_t *)s.q, (const uint16_t *)s.k + warp * page_elements, page_elements, head_pad / 16);
  const int lo[2] = {mine[0].keys.first - page_first, mine[1].keys.first - page_first};
  const int hi[2] = {mine[0].keys.end - page_first, mine[1].keys.end - page_first};
  mask_page(x, a.scale, lo, hi);
  float m[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    m[h] = page_maximum(x, h);
    if (lane % 4 == 0) s.top[warp * kTileQueries + lane / 4 + 8 * h] = m[h];
  }
  sync_threads(1 + team, kTeamThreads);  // K is read, too
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float *top = s.top + lane / 4 + 8 * h;
    m[h] = fmaxf(fmaxf(top[0], top[kTileQueries]), fmaxf(top[2 * kTileQueries], top[3 * kTileQueries]));
  }
  uint32_t p[4];
  soften_page<Kv>(p, x, m);
  s.p[warp * 32 + lane] = make_uint4(p[0], p[1], p[2], p[3]);
}

// P V of a chunk, and its state, into the round's slot.
template <class Kv>
TL_DEVICE void weigh_chunk(const AttendArgs &a, const Shared &s, int n_queries, int slot, bool insert) {
  const int warp = warp_id() % kTeamWarps, lane = lane_id(), team = warp_id() / kTeamWarps, head_pad = a.place.kv.head_pad;
  const int page_elements = TL_PAGE_POSITIONS * head_pad, thread = threadIdx.x % kTeamThreads, key = a.place.rows.pos[0] % TL_KEY_CHUNK;
  wait_copies<1>();
  if (insert) {
    sync_threads(1 + team, kTeamThreads);
    const int at = key / TL_PAGE_POSITIONS * page_elements + v_index(key % TL_PAGE_POSITIONS, thread * 8);
    if (thread < head_pad / 8) *(uint4 *)((uint16_t *)s.v + at) = s.new_v[thread];
  }
  sync_threads(1 + team, kTeamThreads);
  uint32_t p[kPagesOfChunk][4];
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    const uint4 u = s.p[j * 32 + lane];
    p[j][0] = u.x, p[j][1] = u.y, p[j][2] = u.z, p[j][3] = u.w;
  }
  float *o_state = s.o + (int64_t)slot * n_queries * head_pad;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float l = sum_of_p<Kv>(p, h);
    const int q = lane / 4 + 8 * h;
    if (warp == 0 && lane % 4 == 0) {
      const float *top = s.top + q;
      s.m[slot * kTileQueries + q] = fmaxf(fmaxf(top[0], top[kTileQueries]), fmaxf(top[2 * kTileQueries], top[3 * kTileQueries]));
      s.l[slot * kTileQueries + q] = l;
    }
  }
  for (int b = warp; b < head_pad / 16; b += kTeamWarps) {
    float o[2][4];
    weigh_block<Kv>(o, p, (const uint16_t *)s.v + b * 256, page_elements);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int q = lane / 4 + i % 4 / 2 * 8;
      if (q < n_queries) o_state[q * head_pad + b * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2] = o[i / 4][i % 4];
    }
  }
}

// Factors of the round's chunks for every query, from the group's state on; l and m of the group move on.
TL_DEVICE void find_factors(const AttendArgs &a, const Shared &s, Keys keys, bool in_run, int base, int n_chunks, int round) {
  const int q = threadIdx.x / TL_CHUNK_GROUP, c = threadIdx.x % TL_CHUNK_GROUP, chunk = base + c;
  const bool alive = in_run && c < n_chunks && keys.first < (chunk + 1) * TL_KEY_CHUNK && keys.end > chunk * TL_KEY_CHUNK;
  const int at = (round % 2 * kTeams + c % kTeams) * kTileQueries + q;
  const float m = alive ? *of_cluster_rank(s.m + at, c / kTeams) : kMasked;
  const float l = alive ? *of_cluster_rank(s.l + at, c / kTeams) : 0.0f;
  const float before = s.group_m[q];
  float top = m;  // over this chunk and the round's earlier ones
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
#pragma unroll
    for (int i = 0; i < TL_CHUNK_GROUP; i++) {
      const MergeFactors g{s.factor_a[q * TL_CHUNK_GROUP + i], s.factor_b[q * TL_CHUNK_GROUP + i]};
      if (g.later != kDead) sum = merge_value(sum, s.chunk_l[q * TL_CHUNK_GROUP + i], g);
    }
    s.group_l[q] = sum;
  }
  if (c == TL_CHUNK_GROUP - 1) s.group_m[q] = fmaxf(before, top);
}

// Merges the round's chunks into this CTA's slice of the group's O.
TL_DEVICE void merge_round(const Shared &s, int n_queries, int head_pad, int slice, int n_chunks, int round) {
  const int first = cluster_rank() * slice, n = n_queries * head_pad;
  for (int i = threadIdx.x; i < slice && first + i < n; i += kThreads) {
    const int e = first + i;
    const float *a = s.factor_a + e / head_pad * TL_CHUNK_GROUP, *b = s.factor_b + e / head_pad * TL_CHUNK_GROUP;
    float o[TL_CHUNK_GROUP];
#pragma unroll
    for (int c = 0; c < TL_CHUNK_GROUP; c++)
      if (c < n_chunks) o[c] = *of_cluster_rank(s.o + (int64_t)(round % 2 * kTeams + c % kTeams) * n + e, c / kTeams);
    float sum = s.group_o[i];
#pragma unroll
    for (int c = 0; c < TL_CHUNK_GROUP; c++)
      if (c < n_chunks && b[c] != kDead) sum = merge_value(sum, o[c], {a[c], b[c]});
    s.group_o[i] = sum;
  }
}

// Merges the finished group into the total and empties it.
TL_DEVICE void close_group(const Shared &s, int n_queries, int head_pad, int slice) {
  __syncthreads();
  const int first = cluster_rank() * slice, n = n_queries * head_pad;
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

TL_DEVICE void empty_states(const Shared &s, int slice) {
  for (int i = threadIdx.x; i < slice; i += kThreads) s.group_o[i] = s.total_o[i] = 0.0f;
  if (threadIdx.x < kTileQueries) {
    s.group_m[threadIdx.x] = s.total_m[threadIdx.x] = kMasked;
    s.group_l[threadIdx.x] = s.total_l[threadIdx.x] = 0.0f;
  }
}

// O / l of this CTA's slice for the run's queries, to the operand of the next product, padding included.
TL_DEVICE void store_output(const AttendArgs &a, const Shared &s, int tile, int kv_head, int seq, int n_queries, int slice) {
  const int head_pad = a.place.kv.head_pad, head_dim = a.place.head_dim, first = cluster_rank() * slice;
  for (int i = threadIdx.x; i < slice && first + i < n_queries * head_pad; i += kThreads) {
    const int q = (first + i) / head_pad, d = (first + i) % head_pad;
    const Query query = query_of(a, tile, kv_head, q);
    if (query.row < 0 || query.seq != seq) continue;
    const float l = s.total_l[q];
    if (d < head_dim) store_operand(a.out, query.row, query.head * head_dim + d, l != 0.0f ? s.total_o[i] * (1.0f / l) : 0.0f);
    if (query.head == a.place.n_heads - 1 && d == 0)
      for (int k = a.place.n_heads * head_dim; k < a.out.n_in; k++) store_operand(a.out, query.row, k, 0.0f);
  }
}

template <class Kv>
__global__ void __launch_bounds__(kThreads) attend_split(const AttendArgs a) {
  const int n_ctas = cluster_size(), rank = cluster_rank(), team = warp_id() / kTeamWarps, head_pad = a.place.kv.head_pad;
  const int unit = blockIdx.x / n_ctas, kv_head = unit % a.place.n_kv_heads, tile = unit / a.place.n_kv_heads;
  const int n_queries = tile_queries(a), slice = slice_of(n_queries, head_pad, n_ctas), round_chunks = kTeams * n_ctas;
  Shared s;
  lay_out(s, shared_memory<uint8_t>(), head_pad, n_queries, n_ctas, team);
  let_next_kernel_start();

  const Query mine[2] = {query_of(a, tile, kv_head, lane_id() / 4), query_of(a, tile, kv_head, lane_id() / 4 + 8)};
  const Query of_factor = query_of(a, tile, kv_head, threadIdx.x / TL_CHUNK_GROUP);
  for (int i = threadIdx.x; i < kTileQueries * head_pad / 8; i += kThreads) ((uint4 *)s.q)[i] = make_uint4(0, 0, 0, 0);
  bool fetched = false;
  int run_seq = -1, round = 0;
  for (int begin = 0; begin < n_queries;) {
    // A run: the queries that follow each other in one sequence.
    const Query head = query_of(a, tile, kv_head, begin);
    run_seq = head.seq;
    Keys all{head.keys.first, head.keys.end};
    bool mine_in[2] = {false, false}, factor_in = false;
    int end = begin;
    for (; end < n_queries; end++) {
      const Query q = query_of(a, tile, kv_head, end);
      if (q.seq != run_seq) break;
      if (q.keys.end && (!all.end || q.keys.first < all.first)) all.first = q.keys.first;
      all.end = max(all.end, q.keys.end);
      for (int h = 0; h < 2; h++) mine_in[h] = mine_in[h] || end == lane_id() / 4 + 8 * h;
      factor_in = factor_in || end == (int)threadIdx.x / TL_CHUNK_GROUP;
    }
    begin = end;
    Query seen[2] = {mine[0], mine[1]};
    for (int h = 0; h < 2; h++)
      if (!mine_in[h]) seen[h].keys = Keys{0, 0};
    const int32_t *table = run_seq < 0 ? nullptr : a.place.rows.page_table[run_seq] + (int64_t)a.place.rows.stage * a.place.rows.table_stride;
    const int first_chunk = all.first / TL_KEY_CHUNK, end_chunk = (all.end + TL_KEY_CHUNK - 1) / TL_KEY_CHUNK;
    int base = first_chunk / round_chunks * round_chunks, chunk = base + rank * kTeams + team;
    const auto request = [&](int c, bool values) {
      if (c >= first_chunk && c < end_chunk)
        copy_chunk(values ? s.v : s.k, a, table, c, all, kv_head, values, threadIdx.x % kTeamThreads, kTeamThreads);
      else
        commit_copies();
    };
    // What older steps wrote may be read before the wait; a batch's own rows only after it.
    const bool early = a.place_here && !fetched;
    if (!fetched && !early) wait_for_previous_kernel();
    request(chunk, false);
    request(chunk, true);
    if (!fetched) {
      if (early) wait_for_previous_kernel();
      __syncthreads();  // the tile is zero
      const int pos_chunk = a.place.rows.pos[0] / TL_KEY_CHUNK;
      const bool owns = a.place_here && all.end > 0 && pos_chunk % round_chunks / kTeams == rank;
      if (a.place_here)
        place_row(a, s, tile, kv_head, owns);
      else
        fetch_queries(a, s, tile, kv_head);
      fetched = true;
    }
    empty_states(s, slice);
    __syncthreads();
    for (; base < end_chunk; base += round_chunks, chunk += round_chunks, round++) {
      const bool here = chunk >= first_chunk && chunk < end_chunk;
      const bool insert = a.place_here && chunk == a.place.rows.pos[0] / TL_KEY_CHUNK;
      const int slot = round % 2 * kTeams + team;
      if (here) soften_chunk<Kv>(a, s, seen, chunk, insert);
      request(chunk + round_chunks, false);
      if (here) weigh_chunk<Kv>(a, s, n_queries, slot, insert);
      cluster_sync();
      request(chunk + round_chunks, true);
      const int n_chunks = min(round_chunks, end_chunk - base);
      find_factors(a, s, of_factor.keys, factor_in, base, n_chunks, round);
      merge_round(s, n_queries, head_pad, slice, n_chunks, round);
      if ((base + round_chunks) % TL_CHUNK_GROUP == 0 || base + round_chunks >= end_chunk) close_group(s, n_queries, head_pad, slice);
    }
    wait_copies<0>();
    store_output(a, s, tile, kv_head, run_seq, n_queries, slice);
    __syncthreads();
  }
  cluster_sync();  // no CTA leaves while another reads its states
}

}  // namespace

void launch_attend_split(const Launcher &launcher, const AttendArgs &args) {
  const int n_units = (args.rows_of_tile > 1 ? (args.place.rows.n_rows + args.rows_of_tile - 1) / args.rows_of_tile
                                             : args.place.rows.n_rows * tiles_of_row(args)) * args.place.n_kv_heads;
  int cluster = launcher.context.code >= kCodeSm90 ? 8 : 1;
  while (cluster > 1 && n_units * cluster > 2 * launcher.context.n_multiprocessors) cluster /= 2;
  Shared s;
  const int nbytes = lay_out(s, nullptr, args.place.kv.head_pad, tile_queries(args), cluster, 0);
  const Shape shape{dim3(n_units * cluster), kThreads, nbytes, cluster};
  if (args.place.kv.dtype == TL_BF16)
    launcher.launch(attend_split<Bf16>, shape, args);
  else
    launcher.launch(attend_split<F16>, shape, args);
}

}  // namespace tl
