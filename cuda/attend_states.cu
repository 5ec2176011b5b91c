// Attention for some rows on wgmma, an even share to every multiprocessor: a warpgroup takes up to 64 queries of one KV head through a
// chunk of keys and leaves its state in memory; a second kernel merges every query's states, in order. Where the chunks are too many
// for that, a warpgroup takes a group of chunks and merges it itself.
//
// No CTA waits for another. Keys and values that earlier batches wrote are asked for before the kernel before this one has ended.
#include <algorithm>

#include "attend_states.cuh"

namespace tl {
namespace {

constexpr int kTeams = kTeamsOfCta, kTeamThreads = 128, kCtaThreads = kTeams * kTeamThreads;

// A warp's shared memory: its queries on their way to registers, then their O on its way to memory. Rows are a little apart, so that those of
// eight meet all banks.
template <int kDims>
struct Passage {
  static constexpr int kQueryBytes = kDims * 2 + 16, kBytes = kTileQueries * kQueryBytes;
};

#if TL_WGMMA

// This lane's two queries of a unit, as rows of the warp's tile: in the unit.
TL_DEVICE int own_index(int h) { return warp_id() % 4 * kTileQueries + lane_id() / 4 + 8 * h; }

// Their keys; none where there is no query.
TL_DEVICE void find_keys(Keys (&keys)[2], const AttendArgs &a, int begin, int n, int group) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int pos = own_index(h) < n ? a.place.rows.pos[(begin + own_index(h)) / group] : -1;
    keys[h] = pos < 0 ? Keys{0, 0} : keys_of(pos, a.window);
  }
}

// The warp's queries of a KV head as left operands; those that are not there are zero.
template <int kDims>
TL_DEVICE void load_own_queries(uint32_t (&q)[kDims / 16][4], const AttendArgs &a, int begin, int n, int group, int kv_head, shared_t passage) {
  constexpr int kStride = Passage<kDims>::kQueryBytes, kLanes = kDims / 8, kRows = 32 / kLanes;  // a lane has eight dims of a query
  const int lane = lane_id(), first = warp_id() % 4 * kTileQueries;
  uint4 v[kTileQueries / kRows];
#pragma unroll
  for (int i = 0; i < kTileQueries / kRows; i++) {
    const int index = first + i * kRows + lane / kLanes, flat = begin + min(index, n - 1), head = kv_head * group + flat % group;
    const uint16_t *from = (const uint16_t *)a.place.q + ((int64_t)(flat / group) * a.place.n_heads + head) * kDims;
    v[i] = index < n ? *(const uint4 *)(from + lane % kLanes * 8) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kTileQueries / kRows; i++) store_shared16(passage + (i * kRows + lane / kLanes) * kStride + lane % kLanes * 16, v[i]);
  __syncwarp();
  const shared_t row = passage + (lane % 16) * kStride + lane / 16 * 16;
#pragma unroll
  for (int b = 0; b < kDims / 16; b++) ldmatrix4(q[b], row + b * 32);
  __syncwarp();
}

template <int n>
TL_DEVICE void clear(uint32_t (&x)[n][4]) {
#pragma unroll
  for (int i = 0; i < n * 4; i++) x[i / 4][i % 4] = 0;
}

// The state of a chunk, which is a whole unit: O goes through shared memory, so that whole rows of it are stored at once. By a warp.
template <int kDims>
TL_DEVICE void leave_state(const StatesArgs &s, const float (&o)[kDims / 2], const float (&m)[2], const float (&l)[2], const Sight &sight, int first,
                           shared_t passage) {
  constexpr int kFloats = kDims + 8, kLanes = kDims / 4, kRows = 32 / kLanes;  // a lane has four dims of a query
  static_assert(8 * kFloats * 4 <= Passage<kDims>::kBytes, "eight queries at a time");
  const int lane = lane_id();
  const shared_t to = passage + (lane / 4 * kFloats + lane % 4 * 2) * 4;
  float *out = s.o + (int64_t)(first + warp_id() % 4 * kTileQueries + lane / kLanes) * kDims + lane % kLanes * 4;
#pragma unroll
  for (int h = 0; h < 2; h++, out += 8 * kDims) {
    const uint32_t alive = __ballot_sync(0xffffffffu, sight.alive[h]);
    if (!alive) continue;
    if (sight.alive[h] && lane % 4 == 0) s.ml[first + own_index(h)] = make_float2(m[h], l[h]);
#pragma unroll
    for (int i = 2 * h; i < kDims / 2; i += 4) store_shared8(to + i / 4 * 32, make_float2(o[i], o[i + 1]));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i += kRows) {
      const int row = i + lane / kLanes;
      if (alive >> (row * 4) & 1) *(uint4 *)(out + i * kDims) = load_shared16(passage + (row * kFloats + lane % kLanes * 4) * 4);
    }
    __syncwarp();
  }
}

// What a unit's state, of chunks before, becomes with a chunk; `begins`: which is its first one.
template <int kDims>
TL_DEVICE void merge_state(const StatesArgs &s, const float (&o)[kDims / 2], const float (&m)[2], const float (&l)[2], const Keys (&keys)[2],
                           const Sight &sight, int first, int chunk, bool begins) {
  float2 before[2];  // read by all four lanes of a query, before one of them writes
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const bool is_first = begins || keys[h].first >= chunk * TL_KEY_CHUNK;  // of the query's in this unit
    before[h] = is_first || !sight.alive[h] ? make_float2(kMasked, 0.0f) : s.ml[first + own_index(h)];
  }
  __syncwarp();
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if (!sight.alive[h]) continue;
    const MergeFactors f = merge_factors(before[h].x, m[h]);
    if (lane_id() % 4 == 0) s.ml[first + own_index(h)] = make_float2(fmaxf(before[h].x, m[h]), merge_value(before[h].y, l[h], f));
    float *to = s.o + (int64_t)(first + own_index(h)) * kDims + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 2 * h; i < kDims / 2; i += 4) {
      const float2 y = before[h].x == kMasked ? make_float2(0.0f, 0.0f) : *(const float2 *)(to + i / 4 * 8);
      *(float2 *)(to + i / 4 * 8) = make_float2(merge_value(y.x, o[i], f), merge_value(y.y, o[i + 1], f));
    }
  }
}

#endif

template <class Kv, int kDims>
__global__ void __launch_bounds__(kCtaThreads, 2) attend_states(const StatesArgs s) {
#if TL_WGMMA
  const AttendArgs &a = s.attend;
  const int group = a.place.n_heads / a.place.n_kv_heads, page_bytes = a.place.kv.k_nbytes + a.place.kv.v_nbytes;
  const int chunk_bytes = kPagesOfChunk * page_bytes;
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0), team = warp / 4;  // the same for the warp, and known to be
  const shared_t memory = shared_of(shared_memory<uint8_t>()), pages = memory + team * chunk_bytes;
  const shared_t passage = memory + kTeams * chunk_bytes + warp * Passage<kDims>::kBytes;
  const int behind = kTeams * chunk_bytes + kCtaThreads / 32 * Passage<kDims>::kBytes;
  UnitPlan *held = (UnitPlan *)(shared_memory<uint8_t>() + behind) + team;  // for its first warp's requests
  const shared_t full = memory + behind + kTeams * (int)sizeof(UnitPlan) + team * 8;
  let_next_kernel_start();
  touch_arguments(s);
  TeamPlan team_plan;
  load_fresh(team_plan, s.plan->team + blockIdx.x * kTeams + team);
  const bool merges = load_fresh(&s.plan->segment_chunks) > 1;
  if (threadIdx.x % kTeamThreads == 0) {
    barrier_init(full, 1);
    barrier_init_done();
  }
  __syncthreads();
  int kv_head = team_plan.kv_head, index = team_plan.index, left = team_plan.n, parity = 0;
  // By the team's first warp.
  const auto page_of_unit = [&](const UnitPlan &u, int chunk) {
    const int32_t *table = u.table + (int64_t)a.place.rows.stage * a.place.rows.table_stride;
    return page_for_lane(table, chunk, {u.first_key, u.end_key});
  };
  const auto request = [&](const UnitPlan &u, int chunk) { request_chunk(a, pages, page_of_unit(u, chunk), kv_head, full); };
  const bool requests = warp % 4 == 0, early = (team_plan.unit.chunk + 1) * TL_KEY_CHUNK <= team_plan.unit.written;
  const int first_page = requests && left ? page_of_unit(team_plan.unit, team_plan.unit.chunk) : 0;
  if (requests && left && early) request_chunk(a, pages, first_page, kv_head, full);
  if (requests && elected()) *held = team_plan.unit;
  Keys keys[2];
  find_keys(keys, a, team_plan.unit.begin, team_plan.unit.n, group);
  wait_for_previous_kernel();
  if (requests && left && !early) request_chunk(a, pages, first_page, kv_head, full);
  int begin = team_plan.unit.begin, n = team_plan.unit.n, chunk = team_plan.unit.chunk, end = team_plan.unit.end;
  int first_state = team_plan.unit.state + kv_head * team_plan.unit.head_states;
#pragma unroll 1
  while (left > 0) {
    const bool works = warp % 4 * kTileQueries < n;  // whether any of the warp's queries is there
#pragma unroll 1
    for (bool last = false, begins = true; !last; chunk++, begins = false) {
      last = chunk + 1 >= end;
      uint32_t q[kDims / 16][4], p[kPagesOfChunk][4];  // q again for each chunk: its registers are needed for the output
      if (works)
        load_own_queries<kDims>(q, a, begin, n, group, kv_head, passage);
      else
        clear(q);
      const Sight sight = sight_of(keys, chunk * TL_KEY_CHUNK);
      float scores[kPagesOfChunk][2][4], m[2] = {kMasked, kMasked}, l[2] = {0.0f, 0.0f}, o[kDims / 2];
      barrier_wait(full, parity);
      parity ^= 1;
      score_chunk<Kv, kDims>(scores, q, pages, page_bytes);
      if (works)
        soften_chunk<Kv>(p, m, scores, keys, chunk * TL_KEY_CHUNK, sight, a.scale);
      else
        clear(p);
      begin_weighing<Kv, kDims>(o, p, pages + a.place.kv.k_nbytes, page_bytes);
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (works) l[h] = sum_of_p<Kv>(p, h);
      wgmma_wait<0>();
      accumulators_ready(o);
      sync_threads(1 + team, kTeamThreads);  // the pages have been read
      if (requests && !last) request(*held, chunk + 1);
      if (merges)
        merge_state<kDims>(s, o, m, l, keys, sight, first_state, chunk, begins);
      else if (works)
        leave_state<kDims>(s, o, m, l, sight, first_state, passage);
    }
    if (--left == 0) break;
    if (++index == load_fresh(&s.plan->n_units)) index = 0, kv_head++;
    UnitPlan unit;
    load_fresh(unit, s.plan->unit + index);
    if (requests) request(unit, unit.chunk);
    if (requests && elected()) *held = unit;
    begin = unit.begin, n = unit.n, chunk = unit.chunk, end = unit.end;
    first_state = unit.state + kv_head * unit.head_states;
    find_keys(keys, a, begin, n, group);
  }
#endif
}

template <class Kv, int kDims>
void launch_with(const Launcher &launcher, const StatesArgs &args) {
  const PlaceArgs &place = args.attend.place;
  const int nbytes =
      kTeams * (kPagesOfChunk * (place.kv.k_nbytes + place.kv.v_nbytes) + (int)sizeof(UnitPlan) + 8) + kCtaThreads / 32 * Passage<kDims>::kBytes;
  launcher.launch(attend_states<Kv, kDims>, Shape{dim3(span_ctas(launcher.context)), kCtaThreads, nbytes, 1}, args);
  launch_merge_states(launcher, args);
}

constexpr uint64_t kPlanBytes = (kMaxWindows * sizeof(SpanPlan) + 255) / 256 * 256;

// The longest context in groups of chunks.
int n_groups_of(const tl_plan_desc &d) { return (d.table_stride * TL_PAGE_POSITIONS - 1) / (TL_CHUNK_GROUP * TL_KEY_CHUNK) + 1; }

bool holds_states(const tl_context &context, const tl_plan_desc &d) {
  const int pad = pad16(d.head_dim);
  return context.code == kCodeSm90a && (d.kv_dtype == TL_BF16 || d.kv_dtype == TL_F16) && (pad == 64 || pad == 128);
}

}  // namespace

uint64_t attend_states_nbytes(const tl_context &context, const tl_plan_desc &d) {
  return holds_states(context, d) ? kPlanBytes + (uint64_t)kHeldStates * d.n_heads * (pad16(d.head_dim) + 2) * 4 : 0;
}

bool attends_by_states(const tl_context &context, const tl_plan_desc &d, int n_rows) {
  return holds_states(context, d) && n_rows <= kSpanRows && n_rows * (d.n_heads / d.n_kv_heads) <= kSpanQueries &&
         n_rows * n_groups_of(d) <= kHeldStates;
}

void launch_attend_states(const Launcher &launcher, const AttendArgs &args, int window, uint8_t *memory) {
  const KvLayer &kv = args.place.kv;
  float *o = (float *)(memory + kPlanBytes);
  const StatesArgs states{args, (const SpanPlan *)memory + window, o, (float2 *)(o + (int64_t)kHeldStates * args.place.n_heads * kv.head_pad)};
  const bool wide = kv.head_pad == 128;
  if (kv.dtype == TL_BF16)
    wide ? launch_with<Bf16, 128>(launcher, states) : launch_with<Bf16, 64>(launcher, states);
  else
    wide ? launch_with<F16, 128>(launcher, states) : launch_with<F16, 64>(launcher, states);
}

}  // namespace tl
