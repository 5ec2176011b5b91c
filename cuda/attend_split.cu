// Attention for few rows: a cluster of CTAs shares out the key chunks of up to 16 queries that read the same keys (heads of
// one KV head, and rows of one sequence), in rounds of two chunks a CTA, and merges them in order through distributed
// shared memory, each CTA a slice of the output. Fused for one row: q, k and v are normed, turned, rounded or quantised, and stored here.
// Accumulation and merging in float32, by the functions of attend.cuh.
#include <algorithm>

#include "attend_split_codes.cuh"

namespace tl {
namespace {

// Who the tile's queries are, and which keys they read.
TL_DEVICE void find_queries(const AttendArgs &a, const Split &s, int tile, int kv_head) {
  const int i = threadIdx.x, group = a.place.n_heads / a.place.n_kv_heads, n_sub = subtiles(a);
  if (i >= kTileQueries) return;
  const int in_row = a.rows_of_tile > 1 ? i % group : tile % n_sub * a.queries_of_tile + i;
  const int row = a.rows_of_tile > 1 ? tile * a.rows_of_tile + i / group : tile / n_sub;
  const bool exists = i < tile_queries(a) && row < a.place.rows.n_rows && in_row < group;
  s.query[i] = query_at(a, row, kv_head * group + in_row, exists);
}

// A finished head of the row placed here: q to the tile, k and v to the page and to new_k, new_v. part: below 0, 0, 1; stores: the page too.
TL_DEVICE void place_values(const PlaceArgs &p, const Split &s, const float *v, int i, int part, uint8_t *page, int slot, bool stores) {
  const int dim = lane_id() * 8;
  if (dim >= p.kv.head_pad) return;
  const uint4 rounded = round_eight(p.kv.dtype, v + dim);
  if (part < 0)
    *(uint4 *)((uint16_t *)s.q + k_index(i, dim)) = rounded;
  else
    (part ? s.new_v : s.new_k)[lane_id()] = rounded;
  if (part < 0 || !stores) return;
  *(uint4 *)((uint16_t *)page + (part ? v_index(slot, dim) : k_index(slot, dim))) = rounded;
  count_clamped(p, v + dim);
}

// The row's q, k and v from the product's outputs; of a row's tiles, the first one stores k and v.
template <class Kv>
TL_DEVICE void place_row(const AttendArgs &a, const Split &s, int tile, int kv_head, int n_queries, const Pairs &angle, int page, int slot,
                         bool owns_position) {
  const PlaceArgs &p = a.place;
  float *v = s.head + warp_id() * kMaxHeadDim;
  for (int i = warp_id(); i < n_queries + (owns_position ? 2 : 0); i += kWarps) {
    const int part = i - n_queries;  // 0: k, 1: v
    if (part < 0 && s.query[i].row < 0) continue;
    const int head = part < 0 ? s.query[i].head : p.n_heads + part * p.n_kv_heads + kv_head;
    finish_head(p, raw_head(p, 0, head), head, angle, 0.0f, v);
    uint8_t *to = part < 0 ? nullptr : part ? v_of(p.kv, page, kv_head) : k_of(p.kv, page, kv_head);
    if constexpr (Kv::kQuantised)
      place_codes<Kv>(p, s, v, i, part, to, slot, tile % subtiles(a) == 0);
    else
      place_values(p, s, v, i, part, to, slot, tile % subtiles(a) == 0);
  }
}

TL_DEVICE void fetch_queries(const AttendArgs &a, const Split &s, int n_queries) {
  const int pieces = a.place.kv.head_pad / 8;
  for (int i = threadIdx.x; i < n_queries * pieces; i += kThreads) {
    const Query &q = s.query[i / pieces];
    if (q.row < 0) continue;
    const uint16_t *from = (const uint16_t *)a.place.q + ((int64_t)q.row * a.place.n_heads + q.head) * a.place.kv.head_pad + i % pieces * 8;
    *(uint4 *)((uint16_t *)s.q + k_index(i / pieces, i % pieces * 8)) = *(const uint4 *)from;
  }
}

// Scores of a chunk and P, by one team: each warp its page. lo, hi: the keys of the page that this lane's two rows see.
template <class Kv>
TL_DEVICE void soften_chunk(const AttendArgs &a, const Split &s, const int (&lo)[2], const int (&hi)[2]) {
  const int w = warp_id() % kTeamWarps, lane = lane_id(), page_bytes = a.place.kv.k_nbytes, head_pad = a.place.kv.head_pad;
  float scores[1][2][4], (&x)[2][4] = scores[0];
  if constexpr (Kv::kQuantised) {
    const shared_t q = shared_of(s.q) + lane * 16;
    const float scale[2] = {s.q_scale[lane / 4] * a.scale, s.q_scale[lane / 4 + 8] * a.scale};
    score_codes(x, q, q + kTileQueries * code_pad(head_pad), s.k + w * page_bytes, head_pad, scale);
  } else {
    score_pages<Kv>(scores, shared_of(s.q) + lane * 16, shared_of(s.k) + w * page_bytes + lane * 16, page_bytes, head_pad / 16);
  }
  mask_page(x, lo, hi);
  float m[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    m[h] = row_maximum<Kv>(lane_maximum<Kv>(scores, h));
    if (lane % 4 == 0) s.top[w * kTileQueries + lane / 4 + 8 * h] = m[h];
  }
  sync_threads(1 + warp_id() / kTeamWarps, kTeamThreads);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float *top = s.top + lane / 4 + 8 * h;
    m[h] = larger<Kv>(larger<Kv>(top[0], top[kTileQueries]), larger<Kv>(top[2 * kTileQueries], top[3 * kTileQueries]));
    m[h] = chunk_maximum<Kv>(m[h], a.scale);
    if (w == 0 && lane % 4 == 0) s.m[lane / 4 + 8 * h] = m[h];
  }
  if constexpr (Kv::kQuantised) {
    soften_codes(x, m);
#pragma unroll
    for (int i = 0; i < 2; i++) ((float4 *)s.p)[(w * 32 + lane) * 2 + i] = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
  } else {
    uint32_t p[4];
    soften_page<Kv>(p, x, m, a.scale);
    s.p[w * 32 + lane] = make_uint4(p[0], p[1], p[2], p[3]);
  }
}

// P V of the team's chunk, and its l, to the round's state; each warp its share of the dims.
template <class Kv>
TL_DEVICE void weigh_chunk(const AttendArgs &a, const Split &s, int n_queries) {
  const int w = warp_id() % kTeamWarps, lane = lane_id(), head_pad = a.place.kv.head_pad;
  uint32_t p[kPagesOfChunk][4];
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    const uint4 u = s.p[j * 32 + lane];
    p[j][0] = u.x, p[j][1] = u.y, p[j][2] = u.z, p[j][3] = u.w;
  }
  if (w == 0) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float l = sum_of_p<Kv>(p, h);
      if (lane % 4 == 0) s.l[lane / 4 + 8 * h] = l;
    }
  }
#pragma unroll 1
  for (int b = w; b < head_pad / 16; b += kTeamWarps) {
    float o[2][4];
    weigh_block<Kv>(o, p, shared_of(s.v) + b * 512 + lane * 16, a.place.kv.v_nbytes);
    leave_block(s, b, o, n_queries, head_pad);
  }
}

// The row placed here into this warp's page of K, or V, beside what was copied.
template <class Kv>
TL_DEVICE void insert_row(const AttendArgs &a, const Split &s, int own, int slot, bool values) {
  const int lane = lane_id(), head_pad = a.place.kv.head_pad;
  if (lane >= head_pad / 8) return;
  uint8_t *page = values ? s.v + own * a.place.kv.v_nbytes : s.k + own * a.place.kv.k_nbytes;
  const uint4 row = (values ? s.new_v : s.new_k)[lane];
  if constexpr (!Kv::kQuantised)
    *(uint4 *)((uint16_t *)page + (values ? v_index(slot, lane * 8) : k_index(slot, lane * 8))) = row;
  else
    store_codes<Kv>(page, head_pad, slot, row, values);
}

// One tile's queries of one KV head. `shared` is what lay_out asks for.
template <class Kv>
TL_DEVICE void attend_unit(const AttendArgs &a, uint8_t *shared, int unit) {
  const int n_ctas = cluster_size(), rank = cluster_rank(), team = warp_id() / kTeamWarps, head_pad = a.place.kv.head_pad, lane = lane_id();
  const int kv_head = unit % a.place.n_kv_heads, tile = unit / a.place.n_kv_heads;
  const int n_queries = tile_queries(a), slice = slice_of(n_queries, head_pad, n_ctas), round_chunks = kTeams * n_ctas;
  const Rows &rows = a.place.rows;
  Split s;
  lay_out<Kv>(s, shared, a.place.kv, n_queries, n_ctas, team);

  // Before the wait: who asks, the row's angles, and the first chunks of older steps where no kernel before this one writes K and V.
  find_queries(a, s, tile, kv_head);
  for (int i = threadIdx.x; i < kTileQueries * tile_row_bytes<Kv>(head_pad) / 16; i += kThreads) ((uint4 *)s.q)[i] = make_uint4(0, 0, 0, 0);
  if (Kv::kQuantised && threadIdx.x < kTileQueries) s.q_scale[threadIdx.x] = 0.0f;
  const int pos = a.place_here ? rows.pos[0] : -1;
  Pairs angle;
  if (a.place_here) load_angles(angle, a.place, max(pos, 0));
  __syncthreads();
  if (!a.place_here) {
    wait_for_previous_kernel();
    if constexpr (Kv::kQuantised)
      fetch_query_codes<Kv>(a, s, n_queries);
    else
      fetch_queries(a, s, n_queries);
  }
  int round = 0;
  for (int begin = 0; begin < n_queries;) {
    const Run run = run_from(s.query, begin, n_queries);
    begin = run.end;
    if (run.seq < 0) continue;
    const int32_t *table = table_of(rows, run.seq);
    const int first_chunk = run.keys.first / TL_KEY_CHUNK, end_chunk = (run.keys.end + TL_KEY_CHUNK - 1) / TL_KEY_CHUNK;
    int base = first_chunk / round_chunks * round_chunks, chunk = base + rank * kTeams + team;
    const auto request = [&](int c, bool values) {
      if (c >= first_chunk && c < end_chunk) request_page<Kv>(a, values ? s.v : s.k, table, c, warp_id() % kTeamWarps, run.keys, kv_head, values);
      commit_copies();
    };
    request(chunk, false);
    request(chunk, true);
    const int own_chunk = pos / TL_KEY_CHUNK;  // of the row placed here
    if (a.place_here) {
      const bool owns = pos >= 0 && own_chunk % round_chunks / kTeams == rank;
      const int page = owns ? table[pos / TL_PAGE_POSITIONS] : -1;
      wait_for_previous_kernel();
      place_row<Kv>(a, s, tile, kv_head, n_queries, angle, page, pos % TL_PAGE_POSITIONS, owns);
    }
    empty_states(s, slice);
    int first[2], end[2];  // the keys of this lane's two rows, where they are of the run
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = lane / 4 + 8 * h;
      const bool mine = i >= run.begin && i < run.end;
      first[h] = mine ? s.query[i].first : 0;
      end[h] = mine ? s.query[i].end : 0;
    }
    __syncthreads();
    for (; base < end_chunk; base += round_chunks, chunk += round_chunks, round++) {
      const bool here = chunk >= first_chunk && chunk < end_chunk;
      const int own = warp_id() % kTeamWarps, page_first = chunk * TL_KEY_CHUNK + own * TL_PAGE_POSITIONS;
      const bool insert = pos >= 0 && pos >= page_first && pos < page_first + TL_PAGE_POSITIONS;  // the row's own K and V, into this warp's page
      Split t = s;
      use_slot(t, round % 2 * kTeams + team, n_queries, head_pad);
      if (here) {
        wait_copies<1>();
        __syncwarp();  // the copies of all lanes are there before one of them inserts
        if (insert) insert_row<Kv>(a, s, own, pos % TL_PAGE_POSITIONS, false);
        __syncwarp();
        const int lo[2] = {first[0] - page_first, first[1] - page_first}, hi[2] = {end[0] - page_first, end[1] - page_first};
        soften_chunk<Kv>(a, t, lo, hi);
      }
      request(chunk + round_chunks, false);
      if (here) {
        wait_copies<1>();
        __syncwarp();  // the copies of all lanes are there before one of them inserts
        if (insert) insert_row<Kv>(a, s, own, pos % TL_PAGE_POSITIONS, true);
        sync_threads(1 + team, kTeamThreads);
        if constexpr (Kv::kQuantised)
          weigh_code_chunk<Kv>(a, t, n_queries);
        else
          weigh_chunk<Kv>(a, t, n_queries);
      }
      cluster_sync();
      request(chunk + round_chunks, true);
      const int n_chunks = min(round_chunks, end_chunk - base);
      find_factors(s, run, base, n_chunks, round);
      merge_round(s, n_queries, head_pad, slice, n_chunks, round);
      if ((base + round_chunks) % TL_CHUNK_GROUP == 0 || base + round_chunks >= end_chunk) close_group(s, n_queries, head_pad, slice);
    }
    wait_copies<0>();
    if constexpr (Kv::kQuantised)
      store_turned(a, s, run, n_queries, slice);
    else
      store_output(a, s, run, n_queries, slice);
    __syncthreads();
  }
  cluster_sync();  // no CTA leaves while another reads its states
}

template <class Kv>
__global__ void __launch_bounds__(kThreads, 2) attend_split(const AttendArgs a) {
  let_next_kernel_start();
  attend_unit<Kv>(a, shared_memory<uint8_t>(), blockIdx.x / cluster_size());
}

// Launches with as many queries a tile as the device's shared memory holds.
template <class Kv>
void launch_with(const Launcher &launcher, AttendArgs args) {
  const int group = args.place.n_heads / args.place.n_kv_heads;
  const bool many = args.rows_of_tile > 1;
  Split s;
  for (args.queries_of_tile = kTileQueries;; args.queries_of_tile /= 2) {
    if (args.queries_of_tile == 0) throw std::length_error("attention over heads of this size needs more shared memory than this device has");
    args.rows_of_tile = many ? std::max(1, args.queries_of_tile / group) : 1;
    const int n_units = (many ? (args.place.rows.n_rows + args.rows_of_tile - 1) / args.rows_of_tile : args.place.rows.n_rows) * subtiles(args) *
                        args.place.n_kv_heads;
    int cluster = launcher.context.code >= kCodeSm90 ? 8 : 1;
    while (cluster > 1 && n_units * cluster > 2 * launcher.context.n_multiprocessors) cluster /= 2;
    const int nbytes = lay_out<Kv>(s, nullptr, args.place.kv, tile_queries(args), cluster, 0);
    if (nbytes <= launcher.context.max_shared_nbytes)
      return launcher.launch(attend_split<Kv>, Shape{dim3(n_units * cluster), kThreads, nbytes, cluster}, args);
  }
}

}  // namespace

void launch_attend_split(const Launcher &launcher, const AttendArgs &args) {
  switch (args.place.kv.dtype) {
    case TL_BF16: return launch_with<Bf16>(launcher, args);
    case TL_F16: return launch_with<F16>(launcher, args);
    case TL_INT8: return launch_with<Codes<8>>(launcher, args);
    default: return launch_with<Codes<4>>(launcher, args);
  }
}

}  // namespace tl
