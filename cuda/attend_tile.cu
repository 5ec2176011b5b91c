// Attention for many rows: a CTA takes 64 queries of one KV head (rows, and within a row the heads that share it) through
// all their key chunks, four warps of 16 queries on the same keys, which arrive one chunk ahead. The group's O stays in
// registers, the total over groups in shared memory. Accumulation and merging in float32, by the functions of attend.cuh.
#include "attend_tile.cuh"

#include "attend_codes.cuh"

namespace tl {
namespace {

// One chunk of K and V in shared memory, for the warp's queries that see any of it.
template <class Kv, int kDims>
TL_DEVICE void attend_chunk(const AttendArgs &a, State<kDims> &state, const Keys (&keys)[2], shared_t q_tile, shared_t k, shared_t v, int chunk) {
  const int head_pad = a.place.kv.head_pad, page_bytes = TL_PAGE_POSITIONS * head_pad * 2, first = chunk * TL_KEY_CHUNK;
  const Sight sight = sight_of(keys, first);
  if (!sight.any) return;
  float s[kPagesOfChunk][2][4];
  score_pages<Kv>(s, q_tile, k, page_bytes, head_pad / 16);
  if (!sight.whole) mask_chunk(s, keys, first);
  float m[2];
#pragma unroll
  for (int h = 0; h < 2; h++) m[h] = chunk_maximum<Kv>(row_maximum<Kv>(lane_maximum<Kv>(s, h)), a.scale);
  uint32_t p[kPagesOfChunk][4];
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) soften_page<Kv>(p[j], s[j], m, a.scale);
  MergeFactors f[2];
#pragma unroll
  for (int h = 0; h < 2; h++) absorb(state, f[h], m[h], sum_of_p<Kv>(p, h), sight.alive[h], h);
#pragma unroll
  for (int b = 0; b < kDims / 16; b++) {
    if (b * 16 >= head_pad) break;
    float o[2][4];
    weigh_block<Kv>(o, p, v + b * 512, page_bytes);
    absorb_block(state.o[b], o, f, sight.alive);
  }
}

// The same of codes; scale: of this lane's two queries.
template <class Kv, int kDims>
TL_DEVICE void attend_codes(const AttendArgs &a, State<kDims> &state, const Keys (&keys)[2], shared_t q_high, shared_t q_low, const float (&scale)[2],
                            const uint8_t *k, const uint8_t *v, int chunk) {
  const KvLayer &kv = a.place.kv;
  const int first = chunk * TL_KEY_CHUNK;
  const Sight sight = sight_of(keys, first);
  if (!sight.any) return;
  float p[kPagesOfChunk][2][4], m[2];
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) score_codes(p[j], q_high, q_low, k + j * kv.k_nbytes, kv.head_pad, scale);
  if (!sight.whole) mask_chunk(p, keys, first);
#pragma unroll
  for (int h = 0; h < 2; h++) m[h] = chunk_maximum<Kv>(row_maximum<Kv>(lane_maximum<Kv>(p, h)), a.scale);
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) soften_codes(p[j], m);
  MergeFactors f[2];
#pragma unroll
  for (int h = 0; h < 2; h++) absorb(state, f[h], m[h], sum_of_chunk(p, h), sight.alive[h], h);
  WeightOperands w;
  if (Kv::kValueBits == 8) weigh_group<Kv>(w, p, v, kv.v_nbytes, kv.head_pad, 0);
#pragma unroll
  for (int unit = 0; unit < kDims / Kv::kUnitDims; unit++) {
    if (unit * Kv::kUnitDims >= kv.head_pad) break;
    weigh_unit<Kv>(w, p, v, kv.v_nbytes, kv.head_pad, unit, [&](int b, const float (&o)[2][4]) { absorb_block(state.o[b], o, f, sight.alive); });
  }
}

// Tiles in an order that gives SMs an even share: later rows read more keys, and go first; the short ones join them.
TL_DEVICE int tile_of(int unit, int n_tiles) { return unit < (n_tiles + 1) / 2 ? n_tiles - 1 - unit : unit - (n_tiles + 1) / 2; }

// Brings the tile's queries to shared memory: rows of 16-bit values.
TL_DEVICE void fetch_queries(const AttendArgs &a, uint8_t *q_memory, const Query *query) {
  const int head_pad = a.place.kv.head_pad;
  for (int i = threadIdx.x; i < kQueriesOfCta * head_pad / 8; i += kTileThreads) {
    const int at = i / (head_pad / 8), dim = i % (head_pad / 8) * 8;
    const Query &q = query[at];
    uint16_t *to = (uint16_t *)q_memory + at / kTileQueries * kTileQueries * head_pad + k_index(at % kTileQueries, dim);
    if (q.row < 0)
      *(uint4 *)to = make_uint4(0, 0, 0, 0);
    else
      copy16_async(to, (const uint16_t *)a.place.q + ((int64_t)q.row * a.place.n_heads + q.head) * head_pad + dim);
  }
}

// The same of codes: for each warp's queries the high bytes, then the low ones. Gives the scales of this lane's two queries.
template <class Kv>
TL_DEVICE void fetch_query_codes(const AttendArgs &a, uint8_t *q_memory, const Query *query, float (&scale)[2]) {
  const int head_pad = a.place.kv.head_pad, pad = code_pad(head_pad), pieces = pad / 8, row_bytes = query_nbytes(Kv::kDtype, head_pad);
  const auto source = [&](const Query &q) { return (const uint8_t *)a.place.q + ((int64_t)q.row * a.place.n_heads + q.head) * row_bytes; };
  for (int i = threadIdx.x; i < kQueriesOfCta * pieces; i += kTileThreads) {
    const int at = i / pieces, piece = i % pieces, low = piece / (pieces / 2), dim = piece % (pieces / 2) * 16;
    const Query &q = query[at];
    uint8_t *to = q_memory + (at / kTileQueries * 2 + low) * kTileQueries * pad + k_code_at(at % kTileQueries, dim);
    if (q.row < 0)
      *(uint4 *)to = make_uint4(0, 0, 0, 0);
    else
      copy16_async(to, source(q) + piece * 16);
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const Query &q = query[warp_id() * kTileQueries + lane_id() / 4 + 8 * h];
    scale[h] = q.row < 0 ? 0.0f : *(const float *)(source(q) + 2 * pad) * a.scale;
  }
}

template <class Kv, int kDims>
__global__ void __launch_bounds__(kTileThreads, kDims == 256 ? 1 : 2) attend_tile(const AttendArgs a) {
  const int head_pad = a.place.kv.head_pad, group = a.place.n_heads / a.place.n_kv_heads, lane = lane_id(), warp = warp_id();
  const int kv_head = blockIdx.x % a.place.n_kv_heads, tile = tile_of(blockIdx.x / a.place.n_kv_heads, gridDim.x / a.place.n_kv_heads);
  const int k_bytes = kPagesOfChunk * a.place.kv.k_nbytes, chunk_bytes = k_bytes + kPagesOfChunk * a.place.kv.v_nbytes;
  const int query_bytes = Kv::kQuantised ? 2 * code_pad(head_pad) : 2 * head_pad;
  uint8_t *q_memory = shared_memory<uint8_t>(), *kv = q_memory + kQueriesOfCta * query_bytes;
  Query *query = (Query *)(kv + 2 * chunk_bytes);
  float *total = (float *)(query + kQueriesOfCta) + threadIdx.x;
  let_next_kernel_start();
  if (threadIdx.x < kQueriesOfCta) {
    const int flat = tile * kQueriesOfCta + threadIdx.x;
    query[threadIdx.x] = query_at(a, flat / group, kv_head * group + flat % group, flat / group < a.place.rows.n_rows);
  }
  __syncthreads();
  wait_for_previous_kernel();
  float q_scale[2] = {0.0f, 0.0f};  // of codes
  if constexpr (Kv::kQuantised)
    fetch_query_codes<Kv>(a, q_memory, query, q_scale);
  else
    fetch_queries(a, q_memory, query);
  commit_copies();
  const shared_t q_tile = shared_of(q_memory) + warp * kTileQueries * query_bytes + lane * 16, chunks = shared_of(kv) + lane * 16;

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
      uint8_t *to = kv + chunk % 2 * chunk_bytes;
      if (chunk < end_chunk) {
        request_page<Kv>(a, to, table, chunk, warp, run.keys, kv_head, false);
        request_page<Kv>(a, to + k_bytes, table, chunk, warp, run.keys, kv_head, true);
      }
      commit_copies();
    };
    request(first_chunk);
#pragma unroll 1
    for (int chunk = first_chunk; chunk < end_chunk; chunk++) {
      request(chunk + 1);
      wait_copies<1>();
      __syncthreads();
      if constexpr (Kv::kQuantised) {
        const uint8_t *k = kv + chunk % 2 * chunk_bytes;
        attend_codes<Kv>(a, state, keys, q_tile, q_tile + kTileQueries * code_pad(head_pad), q_scale, k, k + k_bytes, chunk);
      } else {
        const shared_t k = chunks + chunk % 2 * chunk_bytes;
        attend_chunk<Kv>(a, state, keys, q_tile, k, k + k_bytes, chunk);
      }
      if ((chunk + 1) % TL_CHUNK_GROUP == 0 || chunk + 1 == end_chunk) close_group(state, total);
      __syncthreads();
    }
    wait_copies<0>();
    if constexpr (Kv::kQuantised)
      store_turned(a, state, total, query, run);
    else
      store_output(a, state, total, query, run);
    __syncthreads();
  }
  wait_copies<0>();
}

template <class Kv>
void launch_with(const Launcher &launcher, const Shape &shape, const AttendArgs &args, int dims) {
  switch (dims) {
    case 64: return launcher.launch(attend_tile<Kv, 64>, shape, args);
    case 128: return launcher.launch(attend_tile<Kv, 128>, shape, args);
    default: return launcher.launch(attend_tile<Kv, 256>, shape, args);
  }
}

}  // namespace

bool launch_attend_tile(const Launcher &launcher, const AttendArgs &args) {
  const KvLayer &kv = args.place.kv;
  const int group = args.place.n_heads / args.place.n_kv_heads, head_pad = args.place.kv.head_pad;
  const int n_tiles = (args.place.rows.n_rows * group + kQueriesOfCta - 1) / kQueriesOfCta;
  const int dims = head_pad <= 64 ? 64 : head_pad <= 128 ? 128 : 256;
  const int queries = kQueriesOfCta * (2 * (is_quantised(kv.dtype) ? code_pad(head_pad) : head_pad) + (int)sizeof(Query));
  const int nbytes = queries + 2 * kPagesOfChunk * (kv.k_nbytes + kv.v_nbytes) + dims / 16 * 8 * kTileThreads * 4;
  if (nbytes > launcher.context.max_shared_nbytes) return false;
  const Shape shape{dim3(n_tiles * args.place.n_kv_heads), kTileThreads, nbytes, 1};
  switch (kv.dtype) {
    case TL_BF16: launch_with<Bf16>(launcher, shape, args, dims); break;
    case TL_F16: launch_with<F16>(launcher, shape, args, dims); break;
    case TL_INT8: launch_with<Codes<8>>(launcher, shape, args, dims); break;
    default: launch_with<Codes<4>>(launcher, shape, args, dims);
  }
  return true;
}

}  // namespace tl
