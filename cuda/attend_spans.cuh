// How attention for some rows is spread over the device (attend_states.cu): which queries go together, and which pieces of their keys are
// units of work. Every CTA finds that by itself, from positions, before it waits for the kernel before it.
#pragma once

#include "attend_wgmma.cuh"

namespace tl {

constexpr int kSpanRows = 128, kSpanQueries = 2048;  // most rows, and most queries of a KV head
constexpr int kMaxSpans = kSpanRows + kSpanQueries / kWideQueries;

// Up to kWideQueries queries of one sequence that follow each other, for all KV heads. A unit is those of one KV head and a segment of
// keys, at absolute positions: a chunk, or a group of chunks where the states of all chunks would be too many.
struct Span {
  int begin, n;              // of the queries of a KV head: rows, and within a row the heads that share it
  int seq, written;          // written: the first position that this batch writes
  Keys keys;                 // that any of them reads
  int first, n_segments;
  int first_unit, first_state;  // of n_kv_heads * n_segments units; a unit has n states
};

struct Spans {
  int n, n_units, segment_chunks;
  int pos[kSpanRows], seq[kSpanRows];
  Span span[kMaxSpans];
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

TL_DEVICE int n_chunks_before(int key) { return (key + TL_KEY_CHUNK - 1) / TL_KEY_CHUNK; }

// By one thread: segments of n spans, single chunks if their states are at most n_states.
TL_DEVICE void cut_keys(Spans &s, int n, int n_kv_heads, int n_states) {
  int64_t all = 0;
  for (int i = 0; i < n; i++) all += (int64_t)s.span[i].n * (n_chunks_before(s.span[i].keys.end) - s.span[i].keys.first / TL_KEY_CHUNK) * n_kv_heads;
  const int length = all <= n_states ? 1 : TL_CHUNK_GROUP;
  int units = 0, states = 0;
  for (int i = 0; i < n; i++) {
    Span &span = s.span[i];
    span.first = span.keys.first / TL_KEY_CHUNK / length;
    span.n_segments = (n_chunks_before(span.keys.end) + length - 1) / length - span.first;
    span.first_unit = units;
    span.first_state = states;
    units += span.n_segments * n_kv_heads;
    states += span.n_segments * n_kv_heads * span.n;
  }
  s.n = n;
  s.n_units = units;
  s.segment_chunks = length;
}

// By all n_threads of a CTA, which meet at the end.
TL_DEVICE void find_spans(Spans &s, const AttendArgs &a, int n_states, int n_threads) {
  const int n_rows = a.place.rows.n_rows;
  for (int i = threadIdx.x; i < n_rows; i += n_threads) s.pos[i] = a.place.rows.pos[i], s.seq[i] = a.place.rows.seq[i];
  __syncthreads();
  if (warp_id() == 0) {
    const int n = cut_rows(s, n_rows, a.place.n_heads / a.place.n_kv_heads, a.window);
    __syncwarp();
    if (lane_id() == 0) cut_keys(s, n, a.place.n_kv_heads, n_states);
  }
  __syncthreads();
}

// The state of a span's first query in a unit.
TL_DEVICE int64_t first_state(const Span &span, int kv_head, int segment) {
  return span.first_state + (int64_t)(kv_head * span.n_segments + segment - span.first) * span.n;
}

#endif

}  // namespace tl
