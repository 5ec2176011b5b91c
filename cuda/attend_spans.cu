// Finds the units of attention for some rows; see attend_spans.cuh.
#include "attend_spans.cuh"

#include <algorithm>

namespace tl {
namespace {

// Queries of one sequence that follow each other, for all KV heads.
struct Span {
  int begin, n;      // of the queries of a KV head: rows, and within a row the heads that share it
  int seq, written;  // written: the first position that this batch writes
  Keys keys;         // that any of them reads
  int first, n_segments;
  int first_unit, first_state;  // of n_segments units of each KV head; a unit has n states
};

struct Spans {
  int n, n_units, segment_chunks;
  int pos[kSpanRows], seq[kSpanRows];
  Span span[kMaxSpans];
};

struct PlanArgs {
  Rows rows;
  int32_t group, n_kv_heads;
  int32_t window[kMaxWindows];
  int32_t n_teams;
  SpanPlan *plan;   // of each window
};

#if TL_WGMMA

// By a warp: the spans of the rows in `s`, without their segments.
TL_DEVICE int cut_rows(Spans &s, int n_rows, int group, int window) {
  const int lane = lane_id();
  int n = 0;
#pragma unroll 1
  for (int first_row = 0; first_row < n_rows;) {
    const int seq = s.seq[first_row];
    int end_row = n_rows, written = 1 << 30;
    for (int r = lane; r < n_rows; r += 32) {
      if (r > first_row && s.seq[r] != seq) end_row = min(end_row, r);
      if (s.seq[r] == seq && s.pos[r] >= 0) written = min(written, s.pos[r]);
    }
    end_row = warp_min(end_row);
    written = warp_min(written);
#pragma unroll 1
    for (int begin = first_row * group; begin < end_row * group; begin += kWideQueries, n++) {
      const int end = min(begin + kWideQueries, end_row * group);
      int first = 1 << 30, last = 0;
      for (int r = begin / group + lane; r < (end + group - 1) / group; r += 32) {
        if (s.pos[r] < 0) continue;
        const Keys keys = keys_of(s.pos[r], window);
        first = min(first, keys.first);
        last = max(last, keys.end);
      }
      first = warp_min(first);
      last = -warp_min(-last);
      if (lane == 0) s.span[n] = Span{begin, end - begin, seq, written, {last ? first : 0, last}, 0, 0, 0, 0};
    }
    first_row = end_row;
  }
  return n;
}

// By one thread: segments of n spans, single chunks if their states are no more than there is memory for.
TL_DEVICE void cut_keys(Spans &s, int n, int group, int n_kv_heads) {
  int64_t all = 0;
  for (int i = 0; i < n; i++) all += (int64_t)s.span[i].n * (n_chunks_before(s.span[i].keys.end) - s.span[i].keys.first / TL_KEY_CHUNK);
  const int length = all <= (int64_t)kHeldStates * group ? 1 : TL_CHUNK_GROUP;
  int units = 0, states = 0;
  for (int i = 0; i < n; i++) {
    Span &span = s.span[i];
    span.first = span.keys.first / TL_KEY_CHUNK / length;
    span.n_segments = (n_chunks_before(span.keys.end) + length - 1) / length - span.first;
    span.first_unit = units;
    span.first_state = states;
    units += span.n_segments;
    states += span.n_segments * n_kv_heads * span.n;
  }
  s.n = n;
  s.n_units = units;
  s.segment_chunks = length;
}

#endif

// A CTA for each window. What it writes is there before any later kernel of the batch begins.
__global__ void __launch_bounds__(kThreads) plan_spans(const PlanArgs a) {
#if TL_WGMMA
  Spans &s = *shared_memory<Spans>();
  SpanPlan &plan = a.plan[blockIdx.x];
  const int n_rows = a.rows.n_rows;
  wait_for_previous_kernel();
  for (int i = threadIdx.x; i < n_rows; i += kThreads) s.pos[i] = a.rows.pos[i], s.seq[i] = a.rows.seq[i];
  __syncthreads();
  if (warp_id() == 0) {
    const int n = cut_rows(s, n_rows, a.group, a.window[blockIdx.x]);
    __syncwarp();
    if (lane_id() == 0) cut_keys(s, n, a.group, a.n_kv_heads);
  }
  __syncthreads();
  const int length = s.segment_chunks;
  if (threadIdx.x == 0) plan.n_units = s.n_units, plan.segment_chunks = length;
#pragma unroll 1
  for (int i = 0; i < s.n; i++) {
    const Span &span = s.span[i];
    const int head_states = span.n_segments * span.n;
    for (int j = threadIdx.x; j < span.n_segments; j += kThreads) {
      const int segment = span.first + j, chunk = max(segment * length, span.keys.first / TL_KEY_CHUNK);
      plan.unit[span.first_unit + j] = UnitPlan{span.seq,
                                                span.begin,
                                                span.n,
                                                chunk,
                                                min((segment + 1) * length, n_chunks_before(span.keys.end)),
                                                span.keys.first,
                                                span.keys.end,
                                                span.first_state + j * span.n,
                                                head_states,
                                                span.written,
                                                a.rows.page_table[span.seq]};
    }
    for (int j = threadIdx.x; j < span.n; j += kThreads)
      plan.query[span.begin + j] = QueryPlan{span.first_state - span.first * span.n + j, span.n, head_states, 0};
  }
  __syncthreads();
  for (int t = threadIdx.x; t < a.n_teams; t += kThreads) {
    const int64_t n = (int64_t)s.n_units * a.n_kv_heads;
    const int first = (int)(n * t / a.n_teams), end = (int)(n * (t + 1) / a.n_teams), index = s.n_units ? first % s.n_units : 0;
    TeamPlan team = {};
    if (end > first) team = {plan.unit[index], first / s.n_units, index, end - first, 0};
    plan.team[t] = team;
  }
  __threadfence();
  __syncthreads();
  let_next_kernel_start();
#endif
}

}  // namespace

void launch_plan_spans(const Launcher &launcher, const Rows &rows, const tl_plan_desc &d, const std::vector<int> &windows, uint8_t *memory) {
  PlanArgs args = {rows, d.n_heads / d.n_kv_heads, d.n_kv_heads, {}, kTeamsOfCta * span_ctas(launcher.context), (SpanPlan *)memory};
  std::copy(windows.begin(), windows.end(), args.window);
  launcher.launch(plan_spans, Shape{dim3((unsigned)windows.size()), kThreads, (int)sizeof(Spans), 1}, args);
}

}  // namespace tl
