// Attention for many rows on wgmma: a CTA takes 64 queries of one KV head (rows, and within a row the heads that share it) through all
// their key chunks, two at a time.
//
// A query's chunks are merged one after another, so what a CTA does in a row bounds the kernel. Its two warpgroups therefore score
// and soften a chunk each, hand each other P, and then weigh and merge both chunks for half of the dims each. The scores of the next
// two chunks run meanwhile, and their keys and values arrive a step ahead. The group's O stays in registers, the total over groups
// in shared memory.
#include <algorithm>

#include "attend_steps.cuh"

namespace tl {
namespace {

#if TL_WGMMA

// The end of a run: its last group joins the total, which lies in shared memory where there were others, and O goes out. kTiles: to tiles
// of 16-bit values, heads whole.
template <class Kv, int kDims, bool kTiles>
TL_DEVICE void leave_output(const AttendArgs &a, const HalfState<kDims> &s, const float *total, bool more_groups, const Query *query, const Run &run,
                            int first_dim) {
  const int head_dim = a.place.head_dim, lane_dim = lane_id() % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int at = warp_id() % kTileWarps * kTileQueries + lane_id() / 4 + 8 * h;
    const Query q = query[at];
    if (at < run.begin || at >= run.end || q.row < 0) continue;
    const bool any = s.m[h] != kMasked;
    const MergeFactors f = merge_factors(s.total_m[h], s.m[h]);
    const float l = any ? merge_value(s.total_l[h], s.l[h], f) : s.total_l[h], inverse = l != 0.0f ? 1.0f / l : 0.0f;
    const auto value = [&](int i) {
      const float earlier = more_groups ? total[i * kTileThreads] : 0.0f;
      return (any ? merge_value(earlier, s.o[i / 8][i % 8 / 4][i % 4], f) : earlier) * inverse;
    };
    const int first = q.head * head_dim + first_dim + lane_dim;
    uint16_t *to = (uint16_t *)a.out.data + (kTiles ? operand_index(a.out, q.row, first) : 0);
#pragma unroll
    for (int b = 0; b < kDims / 16; b++) {
      const float lower = value(b * 4 + 2 * h), upper = value(b * 4 + 2 * h + 1);
      if (kTiles)
        *(uint32_t *)(to + b * 64) = pack_pair(a.out.dtype, lower, upper);
      else if (first_dim + b * 8 + lane_dim < head_dim)
        store_operand_pair(a.out, q.row, first + b * 8, lower, upper);
    }
    if (!kTiles && !first_dim) store_padding(a, q);
  }
}

// Units are a tile of queries and a KV head. Those whose rows read most keys come first, and the short ones join them.
TL_DEVICE int tile_of(int unit, int n_tiles) { return unit < (n_tiles + 1) / 2 ? n_tiles - 1 - unit : unit - (n_tiles + 1) / 2; }

struct Units {
  int n_tiles;
  TL_DEVICE_MEMBER int count(const AttendArgs &a) const { return n_tiles * a.place.n_kv_heads; }
  // By kWideQueries threads.
  TL_DEVICE_MEMBER void find_query(const AttendArgs &a, Query *query, int unit) const {
    const int group = a.place.n_heads / a.place.n_kv_heads, kv_head = unit % a.place.n_kv_heads;
    const int flat = tile_of(unit / a.place.n_kv_heads, n_tiles) * kWideQueries + threadIdx.x;
    query[threadIdx.x] = query_at(a, flat / group, kv_head * group + flat % group, flat / group < a.place.rows.n_rows);
  }
};

#endif

struct WideArgs {
  AttendArgs attend;
  int32_t n_tiles;
};

template <class Kv, int kDims>
__global__ void __launch_bounds__(kCtaThreads, 1) attend_wide(const WideArgs args) {
#if TL_WGMMA
  const AttendArgs &a = args.attend;
  const Units units{args.n_tiles};
  uint8_t *memory = shared_memory<uint8_t>();
  const Layout at = layout_of(a.place.kv.k_nbytes, a.place.kv.v_nbytes, kDims);
  Query *queries = (Query *)(memory + at.query);
  Cta cta{a, (int)blockIdx.x % a.place.n_kv_heads, memory, at, shared_of(memory)};
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2 * kSlots; s++) barrier_init(cta.full + s * 8, 1);
    barrier_init_done();
  }
  if (threadIdx.x < kWideQueries) units.find_query(a, queries, blockIdx.x);
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0), team = warp / kTileWarps;  // the same for the warp, and known to be
  float *total = (float *)(memory + at.total) + team * kDims / 4 * kTileThreads + threadIdx.x % kTileThreads;
  constexpr int kStepKeys = kTeams * TL_KEY_CHUNK;
  uint32_t q[kDims / 16][4];
  int unit = blockIdx.x, n_units = 0;  // the unit, and how many came before
  int n_keys = 0, n_values = 0;        // steps so far
  Run run = wide_run_from(queries, 0);
  Pages pages(cta, run.seq < 0 ? nullptr : table_of(a.place.rows, run.seq), run.keys);
  if (warp == 0 && run.keys.end) pages.begin(run.keys.first / kStepKeys);
  bool is_new = true;  // the unit
  wait_for_previous_kernel();
  // Asks for what a run needs first, when all slots are free.
  const auto begin = [&] {
    if (warp == 0 && run.keys.end) {
      pages.request(cta, n_keys, n_values);
      pages.request(cta, n_keys + 1, -1);
    }
    if (is_new) load_queries<kDims>(q, a, queries + n_units % kQueryBuffers * kWideQueries);
  };
  begin();
#pragma unroll 1
  for (;;) {
    const Query *query = queries + n_units % kQueryBuffers * kWideQueries;
    if (is_new && unit + (int)gridDim.x < units.count(a) && threadIdx.x < kWideQueries)
      units.find_query(a, queries + (n_units + 1) % kQueryBuffers * kWideQueries, unit + gridDim.x);
    Keys keys[2];
    keys_of_run(keys, query, run);
    HalfState<kDims> state;
    empty_group(state);
#pragma unroll
    for (int h = 0; h < 2; h++) state.total_m[h] = kMasked, state.total_l[h] = 0.0f;
    const Steps steps{__shfl_sync(0xffffffffu, run.keys.first / kStepKeys, 0),
                      __shfl_sync(0xffffffffu, (run.keys.end + kStepKeys - 1) / kStepKeys, 0)};
    const bool more_groups = steps.first / kGroupSteps != (steps.end - 1) / kGroupSteps;
    if (more_groups)
#pragma unroll 8
      for (int i = 0; i < kDims / 4; i++) total[i * kTileThreads] = 0.0f;
    if (run.keys.end) {
      if (team == 0)
        attend_steps<Kv, kDims, 0>(cta, state, total, q, keys, pages, warp == 0, steps, n_keys, n_values);
      else
        attend_steps<Kv, kDims, 1>(cta, state, total, q, keys, pages, false, steps, n_keys, n_values);
      n_keys += steps.end - steps.first + 1;
      n_values += steps.end - steps.first;
    }
    sync_threads(1, kCtaThreads);  // all slots are free, and the next unit's queries are known
    const Run done = run;
    is_new = run.end >= kWideQueries;
    if (is_new) unit += gridDim.x, n_units++;
    const bool last = unit >= units.count(a);
    if (!last) {
      run = wide_run_from(queries + n_units % kQueryBuffers * kWideQueries, is_new ? 0 : run.end);
      cta.kv_head = unit % a.place.n_kv_heads;
      pages = Pages(cta, run.seq < 0 ? nullptr : table_of(a.place.rows, run.seq), run.keys);
      if (warp == 0 && run.keys.end) pages.begin(run.keys.first / kStepKeys);
      begin();
    }
    if (done.seq >= 0) {
      const bool tiles = a.out.layout == kOperandTiles && a.out.dtype != TL_F32 && a.place.head_dim == kDims;
      if (tiles)
        leave_output<Kv, kDims, true>(a, state, total, more_groups, query, done, team * kDims / 2);
      else
        leave_output<Kv, kDims, false>(a, state, total, more_groups, query, done, team * kDims / 2);
    }
    if (last) break;
  }
#endif
}

template <class Kv>
void launch_with(const Launcher &launcher, const WideArgs &args, const Shape &shape) {
  launcher.launch(args.attend.place.kv.head_pad == 64 ? attend_wide<Kv, 64> : attend_wide<Kv, 128>, shape, args);
}

}  // namespace

bool launch_attend_wide(const Launcher &launcher, const AttendArgs &args) {
  const KvLayer &kv = args.place.kv;
  const int n_rows = args.place.rows.n_rows * (args.place.n_heads / args.place.n_kv_heads);
  const int n_tiles = (n_rows + kWideQueries - 1) / kWideQueries, nbytes = layout_of(kv.k_nbytes, kv.v_nbytes, kv.head_pad).nbytes;
  if (!attends_by_wgmma(launcher.context, args) || nbytes > launcher.context.max_shared_nbytes) return false;
  const WideArgs wide{args, n_tiles};
  const Shape shape{dim3(std::min(n_tiles * args.place.n_kv_heads, launcher.context.n_multiprocessors)), kCtaThreads, nbytes, 1};
  kv.dtype == TL_BF16 ? launch_with<Bf16>(launcher, wide, shape) : launch_with<F16>(launcher, wide, shape);
  return true;
}

}  // namespace tl
