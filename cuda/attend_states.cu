// Attention for some rows on wgmma, an even share to every multiprocessor: a warpgroup takes up to 64 queries of one KV head through a
// chunk of keys and leaves its state in memory; a second kernel merges every query's states, in order. Where the chunks are too many
// for that, a warpgroup takes a group of chunks and merges it itself.
//
// No CTA waits for another. Keys and values that earlier batches wrote are asked for before the kernel before this one has ended.
#include <algorithm>

#include "attend_spans.cuh"

namespace tl {
namespace {

constexpr int kTeams = kSpanTeams, kTeamThreads = 128, kCtaThreads = kTeams * kTeamThreads;
constexpr int kMergeThreads = 128, kMergeDims = 64;  // dims of a query that a warp merges
constexpr int kBatchStates = 3 * TL_CHUNK_GROUP;     // that it has at a time
constexpr int kBatchBytes = kBatchStates * (kMergeDims * 4 + 16);
static_assert(kBatchStates > 32 && kBatchStates <= 64, "a lane has m and l of two");

struct StatesArgs {
  AttendArgs attend;
  const SpanPlan *plan;
  float *o;    // (n_states, head_pad)
  float2 *ml;  // (n_states,)
};

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

template <class Kv, int kDims>
__global__ void __launch_bounds__(kCtaThreads, 2) attend_states(const StatesArgs s) {
#if TL_WGMMA
  const AttendArgs &a = s.attend;
  const int n_kv_heads = a.place.n_kv_heads, group = a.place.n_heads / n_kv_heads, page_bytes = a.place.kv.k_nbytes + a.place.kv.v_nbytes;
  const int chunk_bytes = kPagesOfChunk * page_bytes;
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0), team = warp / 4;  // the same for the warp, and known to be
  const shared_t memory = shared_of(shared_memory<uint8_t>()), pages = memory + team * chunk_bytes, full = memory + kTeams * chunk_bytes + team * 8;
  let_next_kernel_start();
  touch_arguments(s);
  if (threadIdx.x % kTeamThreads == 0) {
    barrier_init(full, 1);
    barrier_init_done();
  }
  __syncthreads();
  const int n_units = load_fresh(&s.plan->n_units) * n_kv_heads, step = kTeams * gridDim.x;
  const bool merges = load_fresh(&s.plan->segment_chunks) > 1;
  const int64_t stage_entries = (int64_t)a.place.rows.stage * a.place.rows.table_stride;
  int index = blockIdx.x + team * gridDim.x, parity = 0;
  UnitPlan unit;
  load_fresh(unit, s.plan->unit + index / n_kv_heads);  // beside n_units: there are that many, see plan_spans
  // By the team's first warp.
  const auto request = [&](int index, int chunk) {
    if (warp % 4) return;
    const int page = page_for_lane(unit.table + stage_entries, chunk, {unit.first_key, unit.end_key});
    request_chunk(a, pages, page, index % n_kv_heads, full);
  };
  if (index < n_units && unit.early) request(index, unit.chunk);
  wait_for_previous_kernel();
  if (index < n_units && !unit.early) request(index, unit.chunk);
#pragma unroll 1
  while (index < n_units) {
    const OwnQueries own = own_queries(a, unit, group);
    const int kv_head = index % n_kv_heads, end = unit.end;
    const bool works = warp % 4 * kTileQueries < unit.n;  // whether any of the warp's queries is there
    const int64_t first_state = unit.state + (int64_t)kv_head * unit.head_states;
    OwnState state;
#pragma unroll 1
    for (int chunk = unit.chunk; chunk < end; chunk++) {
      uint32_t q[kDims / 16][4];  // again for each chunk: its registers are needed for the output
      if (works)
        load_own_queries<kDims>(q, a, unit, own, group, kv_head);
      else
        clear(q);
      const Sight sight = sight_of(own.keys, chunk * TL_KEY_CHUNK);
      float scores[kPagesOfChunk][2][4], m[2] = {kMasked, kMasked}, l[2] = {0.0f, 0.0f}, o[kDims / 2];
      uint32_t p[kPagesOfChunk][4];
      barrier_wait(full, parity);
      parity ^= 1;
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
      if (chunk + 1 < end) {
        request(index, chunk + 1);
      } else {
        index += step;
        if (index < n_units) {
          load_fresh(unit, s.plan->unit + index / n_kv_heads);
          request(index, unit.chunk);
        }
      }
      if (merges)
        leave_state<kDims, true>(s, state, o, m, l, own, sight, first_state);
      else
        leave_state<kDims, false>(s, state, o, m, l, own, sight, first_state);
    }
  }
#endif
}

#if TL_WGMMA

// A query's state of two dims a lane.
struct Merged {
  float m = kMasked, l = 0.0f, o[2] = {0.0f, 0.0f};
  TL_DEVICE_MEMBER void absorb(MergeFactors f, float later_l, float2 later) {
    l = merge_value(l, later_l, f);
    o[0] = merge_value(o[0], later.x, f);
    o[1] = merge_value(o[1], later.y, f);
  }
  TL_DEVICE_MEMBER void absorb(float later_m, float later_l, float2 later) {
    absorb(merge_factors(m, later_m), later_l, later);
    m = fmaxf(m, later_m);
  }
};

// States of a query that a warp has in shared memory: some dims of O, and what merges them. All of them come at once, so that a merge is one
// way to memory, and the loop over them is short code: what is run once has to be fetched, too.
struct Batch {
  float o[kBatchStates][kMergeDims];
  float4 factors[kBatchStates];  // of earlier chunks and of this one, l, and the largest m of the group up to here; of a group m and l
};
static_assert(sizeof(Batch) == kBatchBytes, "of shared memory");

// Factors of a batch's chunks that exist (32 j + lane of it is `ml[j]`, masked where there is none), by a warp.
TL_DEVICE void find_factors(Batch &batch, const float2 (&ml)[2]) {
  const int place = lane_id() % TL_CHUNK_GROUP;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float top = ml[j].x;
#pragma unroll
    for (int d = 1; d < TL_CHUNK_GROUP; d *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, top, d, TL_CHUNK_GROUP);
      if (place >= d) top = fmaxf(top, other);
    }
    const float left = __shfl_up_sync(0xffffffffu, top, 1, TL_CHUNK_GROUP);
    const MergeFactors f = merge_factors(place ? left : kMasked, ml[j].x);
    if (j * 32 + lane_id() < kBatchStates) batch.factors[j * 32 + lane_id()] = make_float4(f.earlier, f.later, ml[j].y, top);
  }
}

// Takes in the chunks begin .. end - 1 of a batch, of whole groups but for the first and the last.
TL_DEVICE void absorb_chunks(Merged &total, const Batch &batch, int begin, int end) {
#pragma unroll 1
  for (int first = begin / TL_CHUNK_GROUP * TL_CHUNK_GROUP; first < end; first += TL_CHUNK_GROUP) {
    Merged group;
#pragma unroll 4
    for (int c = max(begin, first); c < min(end, first + TL_CHUNK_GROUP); c++) {
      const float4 f = batch.factors[c];
      group.absorb({f.x, f.y}, f.z, *(const float2 *)(batch.o[c] + lane_id() * 2));
    }
    group.m = batch.factors[first + TL_CHUNK_GROUP - 1].w;
    if (group.m != kMasked) total.absorb(group.m, group.l, make_float2(group.o[0], group.o[1]));
  }
}

// The same of groups.
TL_DEVICE void absorb_groups(Merged &total, const Batch &batch, int begin, int end) {
#pragma unroll 1
  for (int c = begin; c < end; c++) {
    const float2 ml = *(const float2 *)&batch.factors[c];
    if (ml.x != kMasked) total.absorb(ml.x, ml.y, *(const float2 *)(batch.o[c] + lane_id() * 2));
  }
}

#endif

// A warp merges some dims of one head of a row.
template <int kDims>
__global__ void __launch_bounds__(kMergeThreads) merge_states(const StatesArgs s) {
#if TL_WGMMA
  constexpr int kParts = kDims / kMergeDims, kCopiers = kMergeDims / 4;  // lanes that copy a state
  const AttendArgs &a = s.attend;
  Batch &batch = shared_memory<Batch>()[warp_id()];
  let_next_kernel_start();
  touch_arguments(s);
  const int item = blockIdx.x * (kMergeThreads / 32) + warp_id(), part = item % kParts, n_heads = a.place.n_heads;
  const int head = item / kParts % n_heads, row = item / kParts / n_heads, lane = lane_id(), head_dim = a.place.head_dim;
  if (row >= a.place.rows.n_rows) return;
  const int group = n_heads / a.place.n_kv_heads, pos = a.place.rows.pos[row], length = load_fresh(&s.plan->segment_chunks);
  QueryPlan query;
  load_fresh(query, s.plan->query + row * group + head % group);
  const Keys keys = pos < 0 ? Keys{0, 0} : keys_of(pos, a.window);
  const int first = keys.first / TL_KEY_CHUNK / length, end = (n_chunks_before(keys.end) + length - 1) / length;
  const int64_t state = query.state + (int64_t)(head / group) * query.head_states;
  const float *from = s.o + state * kDims + part * kMergeDims + lane % kCopiers * 4;
  const float2 *own = s.ml + state;
  wait_for_previous_kernel();
  Merged total;
#pragma unroll 1
  for (int base = first / TL_CHUNK_GROUP * TL_CHUNK_GROUP; base < end; base += kBatchStates) {
    const int n = min(end - base, kBatchStates), begin = max(first - base, 0);
#pragma unroll 4
    for (int c = begin + lane / kCopiers; c < n; c += 32 / kCopiers)
      copy16_async(batch.o[c] + lane % kCopiers * 4, from + (int64_t)(base + c) * query.n * kDims);
    commit_copies();
    float2 ml[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int c = j * 32 + lane;
      ml[j] = c >= begin && c < n ? own[(int64_t)(base + c) * query.n] : make_float2(kMasked, 0.0f);
      if (length > 1 && c < n) *(float2 *)&batch.factors[c] = ml[j];
    }
    if (length == 1) find_factors(batch, ml);
    wait_copies<0>();
    __syncwarp();
    if (length == 1)
      absorb_chunks(total, batch, begin, n);
    else
      absorb_groups(total, batch, begin, n);
    __syncwarp();
  }
  const float inverse = total.l != 0.0f ? 1.0f / total.l : 0.0f;
  const int dim = part * kMergeDims + lane * 2;
  if (dim < head_dim) store_operand_pair(a.out, row, head * head_dim + dim, total.o[0] * inverse, total.o[1] * inverse);
  if (head != n_heads - 1 || part) return;
  for (int k = n_heads * head_dim + lane; k < a.out.n_in; k += 32) store_operand(a.out, row, k, 0.0f);
#endif
}

template <class Kv, int kDims>
void launch_with(const Launcher &launcher, const StatesArgs &args) {
  const PlaceArgs &place = args.attend.place;
  const int nbytes = kTeams * (kPagesOfChunk * (place.kv.k_nbytes + place.kv.v_nbytes) + 8);
  launcher.launch(attend_states<Kv, kDims>, Shape{dim3(span_ctas(launcher.context)), kCtaThreads, nbytes, 1}, args);
  const int n_warps = place.rows.n_rows * place.n_heads * (kDims / kMergeDims), of_cta = kMergeThreads / 32;
  launcher.launch(merge_states<kDims>, Shape{dim3((n_warps + of_cta - 1) / of_cta), kMergeThreads, of_cta * kBatchBytes, 1}, args);
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
