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
constexpr int kSlots = 2;  // chunks of a team in shared memory

TL_BOTH int team_nbytes(int chunk_bytes) { return kSlots * (chunk_bytes + (int)sizeof(UnitPlan) + 16); }  // of it, whole words of sixteen

#if TL_WGMMA

// This lane's two queries of a unit, as rows of the warp's tile.
struct OwnQueries {
  Keys keys[2];
  int index[2];  // in the unit; not below its n where there is none
};

TL_DEVICE OwnQueries own_queries(const AttendArgs &a, const UnitPlan &u, int group) {
  OwnQueries own;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    own.index[h] = warp_id() % 4 * kTileQueries + lane_id() / 4 + 8 * h;
    const int pos = own.index[h] < u.n ? a.place.rows.pos[(u.begin + own.index[h]) / group] : -1;
    own.keys[h] = pos < 0 ? Keys{0, 0} : keys_of(pos, a.window);
  }
  return own;
}

// The warp's queries of a KV head as left operands; those that are not there are zero.
template <int kDims>
TL_DEVICE void load_own_queries(uint32_t (&q)[kDims / 16][4], const AttendArgs &a, const UnitPlan &u, const OwnQueries &own, int group, int kv_head) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int flat = u.begin + min(own.index[h], u.n - 1), head = kv_head * group + flat % group;
    const uint16_t *from = (const uint16_t *)a.place.q + ((int64_t)(flat / group) * a.place.n_heads + head) * kDims + lane_id() % 4 * 2;
#pragma unroll
    for (int b = 0; b < kDims / 16; b++)
#pragma unroll
      for (int half = 0; half < 2; half++) q[b][half * 2 + h] = own.index[h] < u.n ? *(const uint32_t *)(from + b * 16 + half * 8) : 0;
  }
}

template <int n>
TL_DEVICE void clear(uint32_t (&x)[n][4]) {
#pragma unroll
  for (int i = 0; i < n * 4; i++) x[i / 4][i % 4] = 0;
}

// What a lane's queries have of a unit so far.
struct OwnState {
  float m[2] = {kMasked, kMasked}, l[2] = {0.0f, 0.0f};
};

// A chunk's state, or what a unit's state becomes with it, to memory. kMerges: units are groups of chunks.
template <int kDims, bool kMerges>
TL_DEVICE void leave_state(const StatesArgs &s, OwnState &state, const float (&o)[kDims / 2], const float (&m)[2], const float (&l)[2],
                           const OwnQueries &own, const Sight &sight, int64_t first) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if (!sight.alive[h]) continue;
    const MergeFactors f = merge_factors(state.m[h], m[h]);
    const bool begins = state.m[h] == kMasked;
    state.l[h] = kMerges ? merge_value(state.l[h], l[h], f) : l[h];
    state.m[h] = kMerges ? fmaxf(state.m[h], m[h]) : m[h];
    const int64_t at = first + own.index[h];
    if (lane_id() % 4 == 0) s.ml[at] = make_float2(state.m[h], state.l[h]);
    float *to = s.o + at * kDims + lane_id() % 4 * 2;
#pragma unroll
    for (int i = 2 * h; i < kDims / 2; i += 4) {
      float2 y = make_float2(o[i], o[i + 1]);
      if (kMerges) {
        const float2 before = begins ? make_float2(0.0f, 0.0f) : *(const float2 *)(to + i / 4 * 8);
        y = make_float2(merge_value(before.x, y.x, f), merge_value(before.y, y.y, f));
      }
      *(float2 *)(to + i / 4 * 8) = y;
    }
  }
}

#endif

#if TL_WGMMA

// Chunks of a team, one after another: of units that follow each other, head after head.
struct Cursor {
  UnitPlan unit;
  int kv_head, index, left;  // left: units, this one too
  int chunk;
  TL_DEVICE_MEMBER void begin(const TeamPlan &t) { unit = t.unit, kv_head = t.kv_head, index = t.index, left = t.n, chunk = unit.chunk; }
  // Whether another unit comes next.
  TL_DEVICE_MEMBER bool step() {
    if (++chunk < unit.end) return false;
    left--;
    return left > 0;
  }
  TL_DEVICE_MEMBER void follow(const SpanPlan *plan, int n_units) {
    if (++index == n_units) index = 0, kv_head++;
    load_fresh(unit, plan->unit + index);
    chunk = unit.chunk;
  }
};

// Shared memory of a team: the pages of two chunks, one of which comes while the other is attended to, and whose chunks they are.
struct TeamMemory {
  shared_t pages, full;
  UnitPlan *unit;
  int chunk_bytes;
};

// By the team's first warp: asks for the chunk that the cursor is at, and moves it on. (What follows a unit is kept with its pages, so that
// others need not look it up.)
TL_DEVICE void request_next(const AttendArgs &a, const SpanPlan *plan, int n_units, const TeamMemory &memory, Cursor &at, int slot) {
  if (at.left <= 0) return;
  const UnitPlan &u = at.unit;
  const int32_t *table = u.table + (int64_t)a.place.rows.stage * a.place.rows.table_stride;
  const int page = page_for_lane(table, at.chunk, {u.first_key, u.end_key});
  if (elected()) memory.unit[slot] = u;
  __syncwarp();
  request_chunk(a, memory.pages + slot * memory.chunk_bytes, page, at.kv_head, memory.full + slot * 8);
  if (at.step()) at.follow(plan, n_units);
}

#endif

template <class Kv, int kDims>
__global__ void __launch_bounds__(kCtaThreads, 2) attend_states(const StatesArgs s) {
#if TL_WGMMA
  const AttendArgs &a = s.attend;
  const int group = a.place.n_heads / a.place.n_kv_heads, page_bytes = a.place.kv.k_nbytes + a.place.kv.v_nbytes;
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0), team = warp / 4;  // the same for the warp, and known to be
  const bool requests = warp % 4 == 0;
  TeamMemory memory;
  memory.chunk_bytes = kPagesOfChunk * page_bytes;
  uint8_t *own_memory = shared_memory<uint8_t>() + team * team_nbytes(memory.chunk_bytes);
  memory.pages = shared_of(own_memory);
  memory.unit = (UnitPlan *)(own_memory + kSlots * memory.chunk_bytes);
  memory.full = shared_of(memory.unit + kSlots);
  let_next_kernel_start();
  touch_arguments(s);
  TeamPlan begin;
  load_fresh(begin, s.plan->team + blockIdx.x * kTeams + team);
  const int n_units = load_fresh(&s.plan->n_units);
  const bool merges = load_fresh(&s.plan->segment_chunks) > 1;
  if (threadIdx.x % kTeamThreads == 0) {
    for (int i = 0; i < kSlots; i++) barrier_init(memory.full + i * 8, 1);
    barrier_init_done();
  }
  __syncthreads();
  Cursor asked;  // of the team's first warp
  asked.begin(begin);
  int n_asked = 0;
  if (requests)
    while (n_asked < kSlots && asked.left > 0 && (asked.chunk + 1) * TL_KEY_CHUNK <= asked.unit.written)
      request_next(a, s.plan, n_units, memory, asked, n_asked++);
  wait_for_previous_kernel();
  if (requests)
    for (; n_asked < kSlots; n_asked++) request_next(a, s.plan, n_units, memory, asked, n_asked);
  UnitPlan unit = begin.unit;
  int kv_head = begin.kv_head, index = begin.index, left = begin.n, slot = 0, parity = 0;
#pragma unroll 1
  while (left > 0) {
    const OwnQueries own = own_queries(a, unit, group);
    const bool works = warp % 4 * kTileQueries < unit.n;  // whether any of the warp's queries is there
    const int64_t first_state = unit.state + (int64_t)kv_head * unit.head_states;
    OwnState state;
#pragma unroll 1
    for (int chunk = unit.chunk, next = 0; !next; chunk++) {
      const Sight sight = sight_of(own.keys, chunk * TL_KEY_CHUNK);
      const shared_t pages = memory.pages + slot * memory.chunk_bytes;
      float scores[kPagesOfChunk][2][4], m[2] = {kMasked, kMasked}, l[2] = {0.0f, 0.0f}, o[kDims / 2];
      uint32_t q[kDims / 16][4], p[kPagesOfChunk][4];  // q again for each chunk: its registers are needed for the output
      if (works)
        load_own_queries<kDims>(q, a, unit, own, group, kv_head);
      else
        clear(q);
      barrier_wait(memory.full + slot * 8, parity);
      score_chunk<Kv, kDims>(scores, q, pages, page_bytes);
      if (works)
        soften_chunk<Kv>(p, m, scores, own.keys, chunk * TL_KEY_CHUNK, sight, a.scale);
      else
        clear(p);
      begin_weighing<Kv, kDims>(o, p, pages + a.place.kv.k_nbytes, page_bytes);
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (works) l[h] = sum_of_p<Kv>(p, h);
      wgmma_wait<0>();
      accumulators_ready(o);
      sync_threads(1 + team, kTeamThreads);  // the pages have been read
      if (requests) request_next(a, s.plan, n_units, memory, asked, slot);
      if (merges)
        leave_state<kDims, true>(s, state, o, m, l, own, sight, first_state);
      else
        leave_state<kDims, false>(s, state, o, m, l, own, sight, first_state);
      if (++slot == kSlots) slot = 0, parity ^= 1;
      next = chunk + 1 >= unit.end;
    }
    if (--left == 0) break;
    if (++index == n_units) index = 0, kv_head++;
    barrier_wait(memory.full + slot * 8, parity);  // and so is what they are of
    unit = memory.unit[slot];
  }
#endif
}

template <class Kv, int kDims>
void launch_with(const Launcher &launcher, const StatesArgs &args) {
  const PlaceArgs &place = args.attend.place;
  const int nbytes = kTeams * team_nbytes(kPagesOfChunk * (place.kv.k_nbytes + place.kv.v_nbytes));
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
