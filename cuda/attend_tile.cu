// Attention for many rows: a CTA takes 64 queries of one KV head (rows, and within a row the heads that share it) through
// all their key chunks, four warps of 16 queries on the same keys, which arrive one chunk ahead. The group's O stays in
// registers, the total over groups in shared memory. Accumulation and merging in float32, by the functions of attend.cuh.
#include "attend.cuh"

namespace tl {
namespace {

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

// One chunk of K and V in shared memory, for the warp's queries that see any of it.
template <class Kv, int kDims>
TL_DEVICE void attend_chunk(const AttendArgs &a, State<kDims> &state, const Keys (&keys)[2], shared_t q_tile, shared_t k, shared_t v, int chunk) {
  const int head_pad = a.place.kv.head_pad, page_bytes = TL_PAGE_POSITIONS * head_pad * 2, first = chunk * TL_KEY_CHUNK;
  bool alive[2], whole = true;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    alive[h] = keys[h].first < first + TL_KEY_CHUNK && keys[h].end > first;
    whole = whole && keys[h].first <= first && keys[h].end >= first + TL_KEY_CHUNK;
  }
  if (!__any_sync(0xffffffffu, alive[0] || alive[1])) return;
  float s[kPagesOfChunk][2][4];
  score_pages<Kv>(s, q_tile, k, page_bytes, head_pad / 16);
  if (__any_sync(0xffffffffu, !whole)) {
#pragma unroll
    for (int j = 0; j < kPagesOfChunk; j++) {
      const int page = first + j * TL_PAGE_POSITIONS;
      const int lo[2] = {keys[0].first - page, keys[1].first - page}, hi[2] = {keys[0].end - page, keys[1].end - page};
      mask_page(s[j], lo, hi);
    }
  }
  float m[2];
#pragma unroll
  for (int h = 0; h < 2; h++) m[h] = scaled_maximum(row_maximum(lane_maximum(s, h)), a.scale);
  uint32_t p[kPagesOfChunk][4];
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) soften_page<Kv>(p[j], s[j], m, a.scale);
  MergeFactors f[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float l = sum_of_p<Kv>(p, h);
    f[h] = merge_factors(state.m[h], m[h]);
    if (!alive[h]) continue;
    state.l[h] = merge_value(state.l[h], l, f[h]);
    state.m[h] = fmaxf(state.m[h], m[h]);
  }
#pragma unroll
  for (int b = 0; b < kDims / 16; b++) {
    if (b * 16 >= head_pad) break;
    float o[2][4];
    weigh_block<Kv>(o, p, v + b * 512, page_bytes);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float &sum = state.o[b][i / 4][i % 4];
      const float merged = merge_value(sum, o[i / 4][i % 4], f[i % 4 / 2]);
      sum = alive[i % 4 / 2] ? merged : sum;
    }
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

template <int kDims>
TL_DEVICE void store_output(const AttendArgs &a, const State<kDims> &s, const float *total, const Query *query, const Run &run) {
  const int head_dim = a.place.head_dim;
#pragma unroll 1
  for (int h = 0; h < 2; h++) {
    const int at = warp_id() * kTileQueries + lane_id() / 4 + 8 * h;
    const Query q = query[at];
    if (at < run.begin || at >= run.end || q.row < 0) continue;
    const float l = h ? s.total_l[1] : s.total_l[0], inverse = l != 0.0f ? 1.0f / l : 0.0f;
#pragma unroll 4
    for (int b = 0; b < kDims / 8; b++) {
      const int d = b * 8 + lane_id() % 4 * 2, i = b * 4 + 2 * h;
      if (d < head_dim)
        store_operand_pair(a.out, q.row, q.head * head_dim + d, total[i * kTileThreads] * inverse, total[(i + 1) * kTileThreads] * inverse);
    }
    if (q.head == a.place.n_heads - 1 && lane_id() % 4 == 0)
#pragma unroll 1
      for (int k = a.place.n_heads * head_dim; k < a.out.n_in; k++) store_operand(a.out, q.row, k, 0.0f);
  }
}

// Tiles in an order that gives SMs an even share: later rows read more keys, and go first; the short ones join them.
TL_DEVICE int tile_of(int unit, int n_tiles) { return unit < (n_tiles + 1) / 2 ? n_tiles - 1 - unit : unit - (n_tiles + 1) / 2; }

template <class Kv, int kDims>
__global__ void __launch_bounds__(kTileThreads, kDims == 256 ? 1 : 2) attend_tile(const AttendArgs a) {
  const int head_pad = a.place.kv.head_pad, group = a.place.n_heads / a.place.n_kv_heads, lane = lane_id(), warp = warp_id();
  const int kv_head = blockIdx.x % a.place.n_kv_heads, tile = tile_of(blockIdx.x / a.place.n_kv_heads, gridDim.x / a.place.n_kv_heads);
  const int chunk_bytes = TL_KEY_CHUNK * head_pad * 2;
  uint8_t *q_memory = shared_memory<uint8_t>(), *kv = q_memory + kQueriesOfCta * head_pad * 2;
  Query *query = (Query *)(kv + 4 * chunk_bytes);
  float *total = (float *)(query + kQueriesOfCta) + threadIdx.x;
  let_next_kernel_start();
  if (threadIdx.x < kQueriesOfCta) {
    const int flat = tile * kQueriesOfCta + threadIdx.x;
    query[threadIdx.x] = query_at(a, flat / group, kv_head * group + flat % group, flat / group < a.place.rows.n_rows);
  }
  __syncthreads();
  wait_for_previous_kernel();
  for (int i = threadIdx.x; i < kQueriesOfCta * head_pad / 8; i += kTileThreads) {
    const int at = i / (head_pad / 8), dim = i % (head_pad / 8) * 8;
    const Query &q = query[at];
    uint16_t *to = (uint16_t *)q_memory + at / kTileQueries * kTileQueries * head_pad + k_index(at % kTileQueries, dim);
    if (q.row < 0)
      *(uint4 *)to = make_uint4(0, 0, 0, 0);
    else
      copy16_async(to, (const uint16_t *)a.place.q + ((int64_t)q.row * a.place.n_heads + q.head) * head_pad + dim);
  }
  commit_copies();
  const shared_t q_tile = shared_of(q_memory) + warp * kTileQueries * head_pad * 2 + lane * 16, chunks = shared_of(kv) + lane * 16;

  for (int begin = 0; begin < kQueriesOfCta;) {
    const Run run = run_from(query, begin, kQueriesOfCta);
    begin = run.end;
    if (run.seq < 0) continue;
    const int32_t *table = table_of(a.place.rows, run.seq);
    const int first_chunk = run.keys.first / TL_KEY_CHUNK, end_chunk = (run.keys.end + TL_KEY_CHUNK - 1) / TL_KEY_CHUNK;
    Keys keys[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = warp * kTileQueries + lane / 4 + 8 * h;
      keys[h] = i >= run.begin && i < run.end ? Keys{query[i].first, query[i].end} : Keys{0, 0};
    }
    State<kDims> state;
    empty_group(state);
#pragma unroll
    for (int h = 0; h < 2; h++) state.total_m[h] = kMasked, state.total_l[h] = 0.0f;
#pragma unroll 8
    for (int i = 0; i < kDims / 16 * 8; i++) total[i * kTileThreads] = 0.0f;
    const auto request = [&](int chunk) {
      uint8_t *to = kv + chunk % 2 * 2 * chunk_bytes;
      if (chunk < end_chunk) {
        request_page(a, to, table, chunk, warp, run.keys, kv_head, false);
        request_page(a, to + chunk_bytes, table, chunk, warp, run.keys, kv_head, true);
      }
      commit_copies();
    };
    request(first_chunk);
#pragma unroll 1
    for (int chunk = first_chunk; chunk < end_chunk; chunk++) {
      request(chunk + 1);
      wait_copies<1>();
      __syncthreads();
      const shared_t k = chunks + chunk % 2 * 2 * chunk_bytes;
      attend_chunk<Kv>(a, state, keys, q_tile, k, k + chunk_bytes, chunk);
      if ((chunk + 1) % TL_CHUNK_GROUP == 0 || chunk + 1 == end_chunk) close_group(state, total);
      __syncthreads();
    }
    wait_copies<0>();
    store_output(a, state, total, query, run);
    __syncthreads();
  }
  wait_copies<0>();
}

}  // namespace

bool launch_attend_tile(const Launcher &launcher, const AttendArgs &args) {
  const int group = args.place.n_heads / args.place.n_kv_heads, head_pad = args.place.kv.head_pad;
  const int n_tiles = (args.place.rows.n_rows * group + kQueriesOfCta - 1) / kQueriesOfCta;
  const int dims = head_pad <= 64 ? 64 : head_pad <= 128 ? 128 : 256;
  const int nbytes =
      kQueriesOfCta * head_pad * 2 + 4 * TL_KEY_CHUNK * head_pad * 2 + kQueriesOfCta * (int)sizeof(Query) + dims / 16 * 8 * kTileThreads * 4;
  if (nbytes > launcher.context.max_shared_nbytes) return false;
  const Shape shape{dim3(n_tiles * args.place.n_kv_heads), kTileThreads, nbytes, 1};
  const bool bf16 = args.place.kv.dtype == TL_BF16;
  switch (dims) {
    case 64: bf16 ? launcher.launch(attend_tile<Bf16, 64>, shape, args) : launcher.launch(attend_tile<F16, 64>, shape, args); break;
    case 128: bf16 ? launcher.launch(attend_tile<Bf16, 128>, shape, args) : launcher.launch(attend_tile<F16, 128>, shape, args); break;
    default: bf16 ? launcher.launch(attend_tile<Bf16, 256>, shape, args) : launcher.launch(attend_tile<F16, 256>, shape, args);
  }
  return true;
}

}  // namespace tl
