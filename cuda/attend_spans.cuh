// How attention for some rows is spread over the device (attend_states.cu): which queries go together, and which pieces of their keys are
// units of work. One kernel finds that from positions, at the beginning of a batch, for all of its layers.
#pragma once

#include "attend_wgmma.cuh"

namespace tl {

constexpr int kSpanRows = 128, kSpanQueries = 2048;  // most rows, and most queries of a KV head
constexpr int kMaxSpans = kSpanRows + kSpanQueries / kWideQueries;

// States of a head of a plan that there is memory for.
#if defined(TL_EMULATOR)
constexpr int kHeldStates = 64 * 4;  // so that tests see both chunks and groups
#else
constexpr int kHeldStates = 64 * 48;
#endif

// Up to kWideQueries queries of one sequence that follow each other, for all KV heads. A unit is those of one KV head and a segment of
// keys, at absolute positions: a chunk, or a group of chunks where the states of all chunks would be too many.
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

// A unit, but for its KV head.
struct alignas(16) UnitPlan {
  int32_t seq, begin, n;
  int32_t chunk, end;           // its chunks
  int32_t first_key, end_key;   // that any query reads
  int32_t state, head_states;   // its first one of the first KV head; states from one KV head to the next
  int32_t early;                // whether its first chunk was written before this batch
  int32_t unused[2];
};

struct alignas(16) QueryPlan {  // of a KV head
  int32_t state;                // in segment 0, as if there were one, of the first KV head
  int32_t n, head_states;       // states from one segment to the next, and from one KV head to the next
  int32_t unused;
};

struct alignas(16) SpanPlan {
  int32_t n_units, segment_chunks;  // units of a KV head; chunks of a segment
  int32_t unused[2];
  QueryPlan query[kSpanQueries];
  UnitPlan unit[2 * kHeldStates];
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

}  // namespace tl
