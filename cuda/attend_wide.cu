// Attention for many rows on wgmma: a CTA takes 64 queries of one KV head (rows, and within a row the heads that share it) through
// all their key chunks, which arrive one ahead. The group's O stays in registers, the total over groups in shared memory.
#include "attend_wgmma.cuh"

namespace tl {
namespace {

constexpr int kSlots = 2;  // chunks in shared memory: one that is used, one on its way

#if TL_WGMMA

// `empty` is told when the chunk's pages have been read.
template <class Kv, int kDims>
TL_DEVICE void attend_chunk(State<kDims> &state, const AttendArgs &a, const uint32_t (&q)[kDims / 16][4], const Keys (&keys)[2], shared_t pages,
                            shared_t empty, int chunk) {
  const int page_bytes = a.place.kv.k_nbytes + a.place.kv.v_nbytes, first = chunk * TL_KEY_CHUNK;
  const Sight sight = sight_of(keys, first);
  float s[kPagesOfChunk][2][4], m[2], o[kDims / 2];
  uint32_t p[kPagesOfChunk][4];
  score_chunk<Kv, kDims>(s, q, pages, page_bytes);
  soften_chunk<Kv>(p, m, s, keys, first, sight, a.scale);
  begin_weighing<Kv, kDims>(o, p, pages + a.place.kv.k_nbytes, page_bytes);
  MergeFactors f[2];
#pragma unroll
  for (int h = 0; h < 2; h++) absorb(state, f[h], m[h], sum_of_p<Kv>(p, h), sight.alive[h], h);
  wgmma_wait<0>();
  accumulators_ready(o);
  if (lane_id() == 0) barrier_arrive(empty);
#pragma unroll
  for (int b = 0; b < kDims / 16; b++) {
    float block[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) block[i / 4][i % 4] = o[b * 8 + i];
    absorb_block(state.o[b], block, f, sight.alive);
  }
}

// Tiles in an order that gives SMs an even share: later rows read more keys, and go first; the short ones join them.
TL_DEVICE int tile_of(int unit, int n_tiles) { return unit < (n_tiles + 1) / 2 ? n_tiles - 1 - unit : unit - (n_tiles + 1) / 2; }

#endif

template <class Kv, int kDims>
__global__ void __launch_bounds__(kTileThreads, 2) attend_wide(const AttendArgs a) {
#if TL_WGMMA
  const int group = a.place.n_heads / a.place.n_kv_heads, chunk_bytes = kPagesOfChunk * (a.place.kv.k_nbytes + a.place.kv.v_nbytes);
  const int kv_head = blockIdx.x % a.place.n_kv_heads, tile = tile_of(blockIdx.x / a.place.n_kv_heads, gridDim.x / a.place.n_kv_heads);
  uint8_t *memory = shared_memory<uint8_t>();
  const shared_t chunks = shared_of(memory), full = chunks + kSlots * chunk_bytes, empty = full + kSlots * 8;
  Query *query = (Query *)(memory + kSlots * chunk_bytes + 2 * kSlots * 8);
  float *total = (float *)(query + kWideQueries) + threadIdx.x;
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kSlots; s++) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, kTileWarps);
    }
    barrier_init_done();
  }
  if (threadIdx.x < kWideQueries) {
    const int flat = tile * kWideQueries + threadIdx.x;
    query[threadIdx.x] = query_at(a, flat / group, kv_head * group + flat % group, flat / group < a.place.rows.n_rows);
  }
  __syncthreads();
  wait_for_previous_kernel();
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0);  // the same for the warp, and known to be
  uint32_t q[kDims / 16][4];
  load_queries<kDims>(q, a, query);
  int n_used = 0;  // chunks so far
#pragma unroll 1
  for (int begin = 0; begin < kWideQueries;) {
    const Run run = wide_run_from(query, begin);
    begin = run.end;
    if (run.seq < 0) continue;
    const int32_t *table = table_of(a.place.rows, run.seq);
    const int first_chunk = run.keys.first / TL_KEY_CHUNK, end_chunk = (run.keys.end + TL_KEY_CHUNK - 1) / TL_KEY_CHUNK;
    int page = first_chunk < end_chunk && warp == 0 ? page_for_lane(table, first_chunk, run.keys) : 0;  // of the next chunk to request
    const auto request = [&](int chunk) {                                                              // by the first warp
      const int n = n_used + chunk - first_chunk, slot = n % kSlots;
      if (n >= kSlots) barrier_wait(empty + slot * 8, (n / kSlots - 1) % 2);
      request_chunk(a, chunks + slot * chunk_bytes, page, kv_head, full + slot * 8);
      page = page_for_lane(table, chunk + 1, run.keys);  // on its way while this chunk is attended to
    };
    if (warp == 0 && first_chunk < end_chunk) request(first_chunk);
    Keys keys[2];
    keys_of_run(keys, query, run);
    State<kDims> state;
    empty_group(state);
#pragma unroll
    for (int h = 0; h < 2; h++) state.total_m[h] = kMasked, state.total_l[h] = 0.0f;
#pragma unroll 8
    for (int i = 0; i < kDims / 2; i++) total[i * kTileThreads] = 0.0f;
#pragma unroll 1
    for (int chunk = first_chunk; chunk < end_chunk; chunk++) {
      const int n = n_used + chunk - first_chunk, slot = n % kSlots;
      if (warp == 0 && chunk + 1 < end_chunk) request(chunk + 1);
      barrier_wait(full + slot * 8, n / kSlots % 2);
      attend_chunk<Kv, kDims>(state, a, q, keys, chunks + slot * chunk_bytes, empty + slot * 8, chunk);
      if ((chunk + 1) % TL_CHUNK_GROUP == 0 || chunk + 1 == end_chunk) close_group(state, total);
    }
    n_used += max(end_chunk - first_chunk, 0);
    store_output(a, state, total, query, run);
  }
#endif
}

}  // namespace

bool launch_attend_wide(const Launcher &launcher, const AttendArgs &args) {
  const KvLayer &kv = args.place.kv;
  const int n_rows = args.place.rows.n_rows * (args.place.n_heads / args.place.n_kv_heads);
  const int n_tiles = (n_rows + kWideQueries - 1) / kWideQueries;
  const int nbytes =
      kSlots * (kPagesOfChunk * (kv.k_nbytes + kv.v_nbytes) + 16) + kWideQueries * (int)sizeof(Query) + kv.head_pad / 2 * kTileThreads * 4;
  if (!attends_by_wgmma(launcher.context, args) || nbytes > launcher.context.max_shared_nbytes) return false;
  const Shape shape{dim3(n_tiles * args.place.n_kv_heads), kTileThreads, nbytes, 1};
  if (kv.dtype == TL_BF16)
    launcher.launch(kv.head_pad == 64 ? attend_wide<Bf16, 64> : attend_wide<Bf16, 128>, shape, args);
  else
    launcher.launch(kv.head_pad == 64 ? attend_wide<F16, 64> : attend_wide<F16, 128>, shape, args);
  return true;
}

}  // namespace tl
