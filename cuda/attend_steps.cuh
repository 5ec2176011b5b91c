// The steps of attend_wide.cu: two chunks of keys at a time by two warpgroups. What lies in shared memory, the requests of keys and values,
// and what a team does with them.
#pragma once

#include "attend_wgmma.cuh"

namespace tl {

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

#endif

}  // namespace tl
