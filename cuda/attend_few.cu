// Attention for some rows on wgmma: a cluster takes up to 64 queries of one KV head (rows, and within a row the heads that share it)
// through their key chunks, an absolute group of chunks at a time: every CTA two of them, one a warpgroup. A chunk's state of a
// query goes to the CTA that merges this query, in order.
#include "attend_wgmma.cuh"

namespace tl {
namespace {

constexpr int kTeams = 2, kTeamThreads = 128, kConsumers = kTeams * kTeamThreads, kCtaThreads = kConsumers + 32;
constexpr int kCluster = TL_CHUNK_GROUP / kTeams;  // a group at a time
constexpr int kSlots = 1;                          // a team's chunks in shared memory: the next one comes while states are merged
constexpr int kMergedQueries = kWideQueries / kCluster;
static_assert(kMergedQueries == kConsumers / 32, "a warp merges one query");

// States of one group that a CTA merges: of each of its queries those of the chunks, O, then m and l. There are two, as the next
// group's come while these are merged.
template <int kDims>
struct States {
  static constexpr int kStride = kDims + 4, kFloats = kMergedQueries * TL_CHUNK_GROUP * kStride;
};

template <int kDims>
TL_BOTH int shared_nbytes(const KvLayer &kv) {
  const int chunk_bytes = kPagesOfChunk * (kv.k_nbytes + kv.v_nbytes);
  return kTeams * (kSlots * chunk_bytes + kSlots * 16) + 2 * States<kDims>::kFloats * 4 + kWideQueries * (int)sizeof(Query);
}

#if TL_WGMMA

// A team's chunk: its queries' states, of those that exist, to the CTAs that merge them, every eighth query to the same one.
// `states` is where each of these collects them.
template <class Kv, int kDims>
TL_DEVICE void attend_chunk(float *states, const AttendArgs &a, const uint32_t (&q)[kDims / 16][4], const Keys (&keys)[2], shared_t pages,
                            shared_t empty,
                            int chunk) {  // a query without keys does not exist, or has no row in this run
  constexpr int kStride = States<kDims>::kStride;
  const int page_bytes = a.place.kv.k_nbytes + a.place.kv.v_nbytes, first = chunk * TL_KEY_CHUNK, lane = lane_id();
  float s[kPagesOfChunk][2][4], m[2], o[kDims / 2];
  uint32_t p[kPagesOfChunk][4];
  score_chunk<Kv, kDims>(s, q, pages, page_bytes);
  soften_chunk<Kv>(p, m, s, keys, first, sight_of(keys, first), a.scale);
  begin_weighing<Kv, kDims>(o, p, pages + a.place.kv.k_nbytes, page_bytes);
  static_assert(kCluster == 8 && kTileQueries == 16, "the eight queries of a lane's eighth go to as many CTAs");
  float *to[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float l = sum_of_p<Kv>(p, h);
    to[h] = const_cast<float *>(of_cluster_rank(states, lane / 4)) + ((warp_id() % 4 * 2 + h) * TL_CHUNK_GROUP + chunk % TL_CHUNK_GROUP) * kStride;
    if (lane % 4 == 0 && keys[h].end) *(float2 *)(to[h] + kDims) = make_float2(m[h], l);
  }
  wgmma_wait<0>();
  accumulators_ready(o);
  if (lane == 0) barrier_arrive(empty);
#pragma unroll
  for (int i = 0; i < kDims / 2; i += 2)
    if (keys[i % 4 / 2].end) *(float2 *)(to[i % 4 / 2] + i / 4 * 8 + lane % 4 * 2) = make_float2(o[i], o[i + 1]);
}

// A query's state over chunks, of a lane's four dims.
struct Merged {
  float m = kMasked, l = 0.0f, o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  TL_DEVICE_MEMBER void absorb(float later_m, float later_l, const float (&later)[4]) {
    const MergeFactors f = merge_factors(m, later_m);
    l = merge_value(l, later_l, f);
    m = fmaxf(m, later_m);
#pragma unroll
    for (int i = 0; i < 4; i++) o[i] = merge_value(o[i], later[i], f);
  }
};

// Takes the group's chunks that the query sees into `group`, in order; `states`: of the query.
template <int kDims>
TL_DEVICE void merge_group(Merged &group, const float *states, const Query &q, int first_chunk) {
  constexpr int kStride = States<kDims>::kStride;
  const int dim = lane_id() * 4 % kDims;
  float4 o[TL_CHUNK_GROUP];
  float2 ml[TL_CHUNK_GROUP];
#pragma unroll
  for (int c = 0; c < TL_CHUNK_GROUP; c++) {
    o[c] = *(const float4 *)(states + c * kStride + dim);
    ml[c] = *(const float2 *)(states + c * kStride + kDims);
  }
#pragma unroll
  for (int c = 0; c < TL_CHUNK_GROUP; c++) {
    const int first = (first_chunk + c) * TL_KEY_CHUNK;
    if (q.first >= first + TL_KEY_CHUNK || q.end <= first) continue;
    const float later[4] = {o[c].x, o[c].y, o[c].z, o[c].w};
    group.absorb(ml[c].x, ml[c].y, later);
  }
}

template <int kDims>
TL_DEVICE void store_query(const AttendArgs &a, const Merged &total, const Query &q) {
  const int dim = lane_id() * 4, head_dim = a.place.head_dim;
  const float inverse = total.l != 0.0f ? 1.0f / total.l : 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i += 2)
    if (dim + i < min(kDims, head_dim)) store_operand_pair(a.out, q.row, q.head * head_dim + dim + i, total.o[i] * inverse, total.o[i + 1] * inverse);
  store_padding(a, q);
}

#endif

template <class Kv, int kDims>
__global__ void __launch_bounds__(kCtaThreads, 1) attend_few(const AttendArgs a) {
#if TL_WGMMA
  const int group = a.place.n_heads / a.place.n_kv_heads, chunk_bytes = kPagesOfChunk * (a.place.kv.k_nbytes + a.place.kv.v_nbytes);
  const int unit = blockIdx.x / kCluster, kv_head = unit % a.place.n_kv_heads, tile = unit / a.place.n_kv_heads, rank = cluster_rank();
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0), team = warp / 4;  // the same for the warp, and known to be
  uint8_t *memory = shared_memory<uint8_t>();
  float *states = (float *)(memory + kTeams * kSlots * chunk_bytes);
  Query *query = (Query *)(states + 2 * States<kDims>::kFloats);
  const shared_t chunks = shared_of(memory), full = shared_of(query + kWideQueries), empty = full + kTeams * kSlots * 8;
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kTeams * kSlots; s++) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, kTeamThreads / 32);
    }
    barrier_init_done();
  }
  if (threadIdx.x < kWideQueries) {
    const int flat = tile * kWideQueries + threadIdx.x;
    query[threadIdx.x] = query_at(a, flat / group, kv_head * group + flat % group, flat / group < a.place.rows.n_rows);
  }
  __syncthreads();
  cluster_arrive();
  wait_for_previous_kernel();
  const bool produces = team == kTeams;
  const int own_at = warp % kMergedQueries * kCluster + rank;  // the query that this warp merges
  const Query merged_query = query[own_at];
  uint32_t q[kDims / 16][4];
  if (!produces) load_queries<kDims>(q, a, query);
  int n_used[kTeams] = {}, n_groups = 0;  // chunks and groups so far
  cluster_wait();  // there is shared memory to send to
#pragma unroll 1
  for (int begin = 0; begin < kWideQueries;) {
    const Run run = wide_run_from(query, begin);
    begin = run.end;
    if (run.seq < 0) continue;
    const int first_chunk = run.keys.first / TL_KEY_CHUNK, end_chunk = (run.keys.end + TL_KEY_CHUNK - 1) / TL_KEY_CHUNK;
    const int32_t *table = table_of(a.place.rows, run.seq);
    Keys keys[2];
    if (!produces) keys_of_run(keys, query, run);
    Merged total;
    const bool merges = !produces && own_at >= run.begin && own_at < run.end && merged_query.row >= 0;
    // The producer warp is a group ahead of the teams.
    const auto request = [&](int first) {
#pragma unroll
      for (int t = 0; t < kTeams; t++) {
        const int chunk = first + rank * kTeams + t, n = n_used[t], slot = t * kSlots + n % kSlots;
        if (chunk < first_chunk || chunk >= end_chunk) continue;
        const int page = page_for_lane(table, chunk, run.keys);
        if (n >= kSlots) barrier_wait(empty + slot * 8, (n / kSlots - 1) % 2);
        request_chunk(a, chunks + slot * chunk_bytes, page, kv_head, full + slot * 8);
        n_used[t]++;
      }
    };
    const int first_group = first_chunk / TL_CHUNK_GROUP * TL_CHUNK_GROUP;
    if (produces && first_group < end_chunk) request(first_group);
#pragma unroll 1
    for (int first = first_group; first < end_chunk; first += TL_CHUNK_GROUP, n_groups++) {
      float *collected = states + n_groups % 2 * States<kDims>::kFloats;
      if (produces) {
        if (first + TL_CHUNK_GROUP < end_chunk) request(first + TL_CHUNK_GROUP);
        __syncwarp();
      } else {
        const int chunk = first + rank * kTeams + team;
        if (chunk >= first_chunk && chunk < end_chunk) {
          const int n = n_used[0]++, slot = team * kSlots + n % kSlots;
          barrier_wait(full + slot * 8, n / kSlots % 2);
          attend_chunk<Kv, kDims>(collected, a, q, keys, chunks + slot * chunk_bytes, empty + slot * 8, chunk);
        }
      }
      cluster_sync();
      if (merges) {
        Merged of_group;
        merge_group<kDims>(of_group, collected + warp * TL_CHUNK_GROUP * States<kDims>::kStride, merged_query, first);
        if (of_group.m != kMasked) total.absorb(of_group.m, of_group.l, of_group.o);
      }
    }
    if (merges) store_query<kDims>(a, total, merged_query);
  }
#endif
}

template <class Kv, int kDims>
void launch_with(const Launcher &launcher, const AttendArgs &args, int n_units) {
  launcher.launch(attend_few<Kv, kDims>, Shape{dim3(n_units * kCluster), kCtaThreads, shared_nbytes<kDims>(args.place.kv), kCluster}, args);
}

}  // namespace

bool launch_attend_few(const Launcher &launcher, const AttendArgs &args) {
  const KvLayer &kv = args.place.kv;
  if (!attends_by_wgmma(launcher.context, args) || shared_nbytes<128>(kv) > launcher.context.max_shared_nbytes) return false;
  const int n_queries = args.place.rows.n_rows * (args.place.n_heads / args.place.n_kv_heads);
  const int n_units = (n_queries + kWideQueries - 1) / kWideQueries * args.place.n_kv_heads;
  const bool wide = kv.head_pad == 128;
  if (kv.dtype == TL_BF16)
    wide ? launch_with<Bf16, 128>(launcher, args, n_units) : launch_with<Bf16, 64>(launcher, args, n_units);
  else
    wide ? launch_with<F16, 128>(launcher, args, n_units) : launch_with<F16, 64>(launcher, args, n_units);
  return true;
}

}  // namespace tl
