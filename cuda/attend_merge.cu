// Attention for some rows: the states of a query, merged in order, and rounded to the operand of the next product. See attend_states.cu.
#include "attend_states.cuh"

namespace tl {
namespace {

constexpr int kMergeThreads = 128, kMergeDims = 64;  // dims of a query that a warp merges
constexpr int kBatchStates = 3 * TL_CHUNK_GROUP;     // that it has at a time
constexpr int kBatchBytes = kBatchStates * (kMergeDims * 4 + 16);
static_assert(kBatchStates > 32 && kBatchStates <= 64, "a lane has m and l of two");

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

TL_DEVICE void absorb_chunk(Merged &group, const Batch &batch, int c) {
  const float4 f = batch.factors[c];
  group.absorb({f.x, f.y}, f.z, *(const float2 *)(batch.o[c] + lane_id() * 2));
}
TL_DEVICE void absorb_group(Merged &total, const Batch &batch, Merged group, int first) {
  group.m = batch.factors[first + TL_CHUNK_GROUP - 1].w;
  if (group.m != kMasked) total.absorb(group.m, group.l, make_float2(group.o[0], group.o[1]));
}

// Takes in the chunks begin .. end - 1 of a batch, of whole groups but for the first and the last. Two whole groups go side by side.
TL_DEVICE void absorb_chunks(Merged &total, const Batch &batch, int begin, int end) {
  int first = begin / TL_CHUNK_GROUP * TL_CHUNK_GROUP;
  if (begin == first && first + 2 * TL_CHUNK_GROUP <= end) {
    Merged group[2];
#pragma unroll 4
    for (int c = first; c < first + TL_CHUNK_GROUP; c++) {
      absorb_chunk(group[0], batch, c);
      absorb_chunk(group[1], batch, c + TL_CHUNK_GROUP);
    }
    absorb_group(total, batch, group[0], first);
    absorb_group(total, batch, group[1], first + TL_CHUNK_GROUP);
    first += 2 * TL_CHUNK_GROUP;
  }
#pragma unroll 1
  for (; first < end; first += TL_CHUNK_GROUP) {
    Merged group;
#pragma unroll 4
    for (int c = max(begin, first); c < min(end, first + TL_CHUNK_GROUP); c++) absorb_chunk(group, batch, c);
    absorb_group(total, batch, group, first);
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

template <int kDims>
void launch_dims(const Launcher &launcher, const StatesArgs &args) {
  const PlaceArgs &place = args.attend.place;
  const int n_warps = place.rows.n_rows * place.n_heads * (kDims / kMergeDims), of_cta = kMergeThreads / 32;
  launcher.launch(merge_states<kDims>, Shape{dim3((n_warps + of_cta - 1) / of_cta), kMergeThreads, of_cta * kBatchBytes, 1}, args);
}

}  // namespace

void launch_merge_states(const Launcher &launcher, const StatesArgs &args) {
  args.attend.place.kv.head_pad == 128 ? launch_dims<128>(launcher, args) : launch_dims<64>(launcher, args);
}

}  // namespace tl
