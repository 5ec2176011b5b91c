// How attention for some rows is spread over the device (attend_states.cu): which queries go together, and which pieces of their keys are
// units of work. One kernel finds that from positions, at the beginning of a batch, for all of its layers.
#pragma once

#include <algorithm>

#include "attend_wgmma.cuh"

namespace tl {

constexpr int kSpanRows = 128, kSpanQueries = 2048;  // most rows, and most queries of a KV head
constexpr int kTeamsOfCta = 2, kMaxTeams = 1024;  // of attention
constexpr int kMaxSpans = kSpanRows + kSpanQueries / kWideQueries;

// States of a head of a plan that there is memory for.
#if defined(TL_EMULATOR)
constexpr int kHeldStates = 64 * 4;  // so that tests see both chunks and groups
#else
constexpr int kHeldStates = 64 * 72;
#endif

// A unit of work is up to kWideQueries queries of one sequence that follow each other, of one KV head, and a segment of keys at absolute
// positions: a chunk, or a group of chunks where the states of all chunks would be too many. This is a unit, but for its KV head.
struct alignas(16) UnitPlan {
  int32_t seq, begin, n;
  int32_t chunk, end;           // its chunks
  int32_t first_key, end_key;   // that any query reads
  int32_t state, head_states;   // its first one of the first KV head; states from one KV head to the next
  int32_t written;              // the first position of its sequence that this batch writes
  const int32_t *table;         // page_table[seq]
};

// Where a team (attend_states.cu) begins: units of all KV heads, head after head, are cut into as many runs as there are teams.
struct alignas(16) TeamPlan {
  UnitPlan unit;     // the first one
  int32_t kv_head;
  int32_t index, n;  // among the head's units; and how many there are from it on, none where n is 0
  int32_t unused;
};

struct alignas(16) QueryPlan {  // of a KV head
  int32_t state;                // in segment 0, as if there were one, of the first KV head
  int32_t n, head_states;       // states from one segment to the next, and from one KV head to the next
  int32_t unused;
};

struct alignas(16) SpanPlan {
  int32_t n_units, segment_chunks;  // units of a KV head; chunks of a segment
  int32_t unused[2];
  TeamPlan team[kMaxTeams];
  QueryPlan query[kSpanQueries];
  UnitPlan unit[2 * kHeldStates];
};

// Two CTAs a multiprocessor.
inline int span_ctas(const tl_context &context) { return std::min(2 * context.n_multiprocessors, kMaxTeams / kTeamsOfCta); }

#if TL_WGMMA
TL_DEVICE int n_chunks_before(int key) { return (key + TL_KEY_CHUNK - 1) / TL_KEY_CHUNK; }
#endif

}  // namespace tl
