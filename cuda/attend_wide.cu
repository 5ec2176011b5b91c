// Attention for many rows on wgmma: a CTA takes 64 queries of one KV head (rows, and within a row the heads that share it) through all
// their key chunks, two at a time.
//
// A query's chunks are merged one after another, so what a CTA does in a row bounds the kernel. Its two warpgroups therefore score
// and soften a chunk each, hand each other P, and then weigh and merge both chunks for half of the dims each. The scores of the next
// two chunks run meanwhile, and their keys and values arrive a step ahead. The group's O stays in registers, the total over groups
// in shared memory.
#include <algorithm>

#include "attend_wgmma.cuh"

namespace tl {
namespace {

constexpr int kTeams = 2;  // warpgroups, and chunks of a step
constexpr int kCtaThreads = kTeams * kTileThreads;
constexpr int kQueryBuffers = 3;  // of units: the one before, whose output is on its way, this one and the next
constexpr int kSlots = 2;  // steps in shared memory, of keys and of values: one that is used, one on its way
constexpr int kStepPages = kTeams * kPagesOfChunk, kGroupSteps = TL_CHUNK_GROUP / kTeams;
static_assert(TL_CHUNK_GROUP % kTeams == 0, "a step's chunks are of one group");

// What a team hands to the other: of each thread P, and m and l of its two queries.
struct Softened {
  uint4 p[kPagesOfChunk][kTileThreads];
  float4 ml[kTileThreads];
};

// Steps are the chunks 2 step and 2 step + 1, wherever a run of queries begins.
struct Steps {
  int first, end;
};

struct Layout {
  int keys, values, softened, total, query, nbytes;  // offsets; barriers come first
};
TL_BOTH Layout layout_of(int k_nbytes, int v_nbytes, int dims) {
  Layout at;
  at.keys = 2 * kSlots * 8;
  at.keys = round_up(at.keys, 1024);
  at.values = at.keys + kSlots * kStepPages * k_nbytes;
  at.softened = at.values + kSlots * kStepPages * v_nbytes;
  at.total = at.softened + 2 * kTeams * (int)sizeof(Softened);
  at.query = at.total + kWideQueries * dims * 4;
  at.nbytes = at.query + kQueryBuffers * kWideQueries * (int)sizeof(Query);
  return at;
}

#if TL_WGMMA

// What every thread of a CTA knows.
struct Cta {
  const AttendArgs &a;
  int kv_head;
  uint8_t *memory;
  Layout at;
  shared_t full;  // barriers of the slots: keys, then values

  TL_DEVICE_MEMBER shared_t keys(int n) const { return shared_of(memory) + at.keys + n % kSlots * kStepPages * a.place.kv.k_nbytes; }
  TL_DEVICE_MEMBER shared_t values(int n) const { return shared_of(memory) + at.values + n % kSlots * kStepPages * a.place.kv.v_nbytes; }
  TL_DEVICE_MEMBER shared_t keys_full(int n) const { return full + n % kSlots * 8; }
  TL_DEVICE_MEMBER shared_t values_full(int n) const { return full + (kSlots + n % kSlots) * 8; }
  TL_DEVICE_MEMBER Softened &softened(int n, int team) const { return ((Softened *)(memory + at.softened))[n % 2 * kTeams + team]; }
};

// The first warp's requests: lanes 0..7 bring the keys of a step's pages, lanes 8..15 the values. A lane reads its page's number one
// request ahead. In place of pages that no query reads come ones that some read: they are finite, and their P is zero.
struct Pages {
  const AttendArgs *a;
  int kv_head;
  const int32_t *table;
  int first, last, own, next;  // pages that are read; the lane's of its next request but one, and the number of that of its next request

  TL_DEVICE_MEMBER Pages(const Cta &cta, const int32_t *table, Keys keys)
      : a(&cta.a),
        kv_head(cta.kv_head),
        table(table),
        first(keys.first / TL_PAGE_POSITIONS),
        last((keys.end - 1) / TL_PAGE_POSITIONS),
        own(0),
        next(0) {}
  TL_DEVICE_MEMBER void begin(int step) {
    own = step * kStepPages + lane_id() % kStepPages;
    read_number();
  }
  TL_DEVICE_MEMBER void read_number() {
    next = table[min(max(own, first), last)];
    own += kStepPages;
  }
  // Keys of a step to slot n_keys, values of one to slot n_values; none where that is below 0.
  TL_DEVICE_MEMBER void request(const Cta &cta, int n_keys, int n_values) {
    const KvLayer &kv = a->place.kv;
    const int lane = lane_id(), place = lane % kStepPages;
    const bool values = lane >= kStepPages;
    const int n = values ? n_values : n_keys, nbytes = values ? kv.v_nbytes : kv.k_nbytes;
    const shared_t full = values ? cta.values_full(n) : cta.keys_full(n), to = (values ? cta.values(n) : cta.keys(n)) + place * nbytes;
    const bool asks = lane < 2 * kStepPages && n >= 0;
    if (asks && place == 0) barrier_arrive_expecting(full, kStepPages * nbytes);
    __syncwarp();
    if (!asks) return;
    copy_bulk(to, values ? v_of(kv, next, kv_head) : k_of(kv, next, kv_head), nbytes, full);
    read_number();
  }
};

template <int kDims>
using HalfState = State<kDims / 2>;  // a team's dims

template <int kDims>
TL_DEVICE void absorb_chunk(HalfState<kDims> &state, const float (&o)[kDims / 4], const MergeFactors (&f)[2], const bool (&alive)[2]) {
#pragma unroll
  for (int b = 0; b < kDims / 32; b++) {
    float block[2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) block[i / 4][i % 4] = o[b * 8 + i];
    absorb_block(state.o[b], block, f, alive);
  }
}

// The steps first .. end - 1 by a team; n: steps so far of keys and of values, which are one less for each run.
template <class Kv, int kDims, int kTeam>
TL_DEVICE void attend_steps(const Cta &cta, HalfState<kDims> &state, float *total, const uint32_t (&q)[kDims / 16][4], const Keys (&keys)[2],
                            Pages &pages, bool requests, Steps steps, int n_keys, int n_values) {
  constexpr int kOther = 1 - kTeam, kHalf = kDims / 2;
  const int k_nbytes = cta.a.place.kv.k_nbytes, v_nbytes = cta.a.place.kv.v_nbytes, thread = threadIdx.x % kTileThreads;
  const float scale = cta.a.scale;
  float x[2][kPagesOfChunk * 4], o[kTeams][kHalf / 2];
  const auto begin_scoring = [&] {
    barrier_wait(cta.keys_full(n_keys), n_keys / kSlots % 2);
    begin_scores<Kv, kDims>(x, q, cta.keys(n_keys) + kTeam * kPagesOfChunk * k_nbytes, k_nbytes);
  };
  begin_scoring();
#pragma unroll 1
  for (int step = steps.first; step < steps.end;) {
    const int end = min(steps.end, (step / kGroupSteps + 1) * kGroupSteps);  // of the group
#pragma unroll 1
    for (; step < end; step++) {
      const int first[kTeams] = {step * kTeams * TL_KEY_CHUNK, (step * kTeams + 1) * TL_KEY_CHUNK};
      wgmma_wait<0>();
      accumulators_ready(x[0]);
      accumulators_ready(x[1]);
      float s[kPagesOfChunk][2][4], own_m[2];
      uint32_t p[kTeams][kPagesOfChunk][4];
      take_scores(s, x);
      soften_chunk<Kv>(p[kTeam], own_m, s, keys, first[kTeam], sight_of(keys, first[kTeam]), scale);
      Softened &own = cta.softened(n_values, kTeam), &other = cta.softened(n_values, kOther);
      const float4 own_ml = make_float4(own_m[0], own_m[1], sum_of_p<Kv>(p[kTeam], 0), sum_of_p<Kv>(p[kTeam], 1));
#pragma unroll
      for (int j = 0; j < kPagesOfChunk; j++) own.p[j][thread] = make_uint4(p[kTeam][j][0], p[kTeam][j][1], p[kTeam][j][2], p[kTeam][j][3]);
      own.ml[thread] = own_ml;
      sync_threads(1, kCtaThreads);  // and all have done with these keys, and with the values before
      if (requests) pages.request(cta, step + 2 <= steps.end ? n_keys + 2 : -1, step + 1 < steps.end ? n_values + 1 : -1);
#pragma unroll
      for (int j = 0; j < kPagesOfChunk; j++) {
        const uint4 w = other.p[j][thread];
        p[kOther][j][0] = w.x, p[kOther][j][1] = w.y, p[kOther][j][2] = w.z, p[kOther][j][3] = w.w;
      }
      const float4 other_ml = other.ml[thread], ml[kTeams] = {kTeam ? other_ml : own_ml, kTeam ? own_ml : other_ml};
      barrier_wait(cta.values_full(n_values), n_values / kSlots % 2);
#pragma unroll
      for (int t = 0; t < kTeams; t++)
        begin_weighing<Kv, kHalf>(o[t], p[t], cta.values(n_values) + t * kPagesOfChunk * v_nbytes + kTeam * (kHalf / 16) * 512, v_nbytes);
      n_keys++;
      n_values++;
      sync_threads(2, kCtaThreads);  // a team's scores stand behind both teams' O, which are waited for first
      begin_scoring();  // of the next step, or after the last one of whatever is there
      MergeFactors f[kTeams][2];
      bool alive[kTeams][2];
#pragma unroll
      for (int t = 0; t < kTeams; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          alive[t][h] = keys[h].first < first[t] + TL_KEY_CHUNK && keys[h].end > first[t];
          absorb(state, f[t][h], h ? ml[t].y : ml[t].x, h ? ml[t].w : ml[t].z, alive[t][h], h);
        }
      wgmma_wait<2>();
      accumulators_ready(o[0]);
      absorb_chunk<kDims>(state, o[0], f[0], alive[0]);
      wgmma_wait<1>();
      accumulators_ready(o[1]);
      absorb_chunk<kDims>(state, o[1], f[1], alive[1]);
    }
    if (step < steps.end) close_group(state, total);  // the last one is merged on its way out
  }
  wgmma_wait<0>();
  accumulators_ready(x[0]);
  accumulators_ready(x[1]);
}

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
