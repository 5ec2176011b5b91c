// The tasks of a step as one kernel (step.cu): what the host works out for each, and where a CTA's part of it lies.
#pragma once

#include "attend.cuh"
#include "gemv.cuh"

namespace tl {

constexpr int kMaxChannels = 8;
constexpr int kSpanChunks = 64;   // key chunks whose states a unit of attention hands over at a time; whole groups
constexpr int kMaxRanks = kSpanChunks;  // CTAs of a unit: each has a chunk in a whole span
static_assert(kSpanChunks % TL_CHUNK_GROUP == 0, "groups do not cross spans");

// Where values come from or go to: flagged words of a channel, or memory alone. Those read were left by the task `back` ones ago.
struct Channel {
  int32_t index, back;  // index below 0: none
};
constexpr Channel kMemory = {-1, 0};

// A flag tells a task's words from all others': from the lowest bit the number of the task in its step, the number of the step, and
// what a task counts for itself.
constexpr int kTaskBits = 20, kFlagBits = 52;

struct StepProduct {
  Matrix weight;
  const float *bias;
  int32_t unit_panels;             // panels that stay together: 2 where gated
  int32_t units_each, units_more;  // units of every CTA, and CTAs that have one more
  int32_t n_ctas;                  // that have a share
  int32_t n_chunks, n_blocks;      // of a panel
  int32_t item_chunks, n_items;    // chunks of an item of the stream, and items of a panel
  int32_t round_panels;            // panels whose sums are held at a time
  Operand source;                  // where the program is empty
  Channel operand;
  RowProgram program;
  Channel op[kMaxRowOps];
  Epilogue epilogue;
  Channel addend, out;
};

struct StepAttention {
  AttendArgs attend;
  int32_t n_units, n_ranks;  // heads of K with up to kTileQueries queries; CTAs of each
  Channel qkv, out;
};

struct alignas(16) StepTask {
  int32_t attends;
  union {
    StepProduct product;
    StepAttention attention;
  };
};
static_assert(sizeof(StepTask) % 16 == 0, "tasks are copied in pieces of sixteen bytes");

// The order of a step's tasks: the first ones, then some that repeat, then the rest.
struct StepOrder {
  int32_t n_first, n_repeated, n_rounds, n_tasks;  // n_tasks: of all three; n_rounds: how often the second run
  int32_t n_stages;                                // by how many a round's K and V lie behind those of the one before
  TL_DEVICE_MEMBER void next(int &task, int &round) const {
    if (++task != n_first + n_repeated) return;
    round = round + 1 < n_rounds ? round + 1 : 0;
    if (round) task = n_first;
  }
};

// The panels of one CTA.
struct CtaShare {
  int first_panel, n_panels;
};
TL_DEVICE CtaShare share_of(const StepProduct &p, int cta) {
  if (cta >= p.n_ctas) return {0, 0};
  return {(cta * p.units_each + min(cta, p.units_more)) * p.unit_panels, (p.units_each + (cta < p.units_more)) * p.unit_panels};
}

// The key chunks of one CTA for a unit: first, first + n_ranks, ..., below end.
struct CtaChunks {
  int first, end;
};
TL_DEVICE CtaChunks chunks_of(const StepAttention &a, const Keys &keys, int rank) {
  return {keys.first / TL_KEY_CHUNK + rank, keys.end ? (keys.end + TL_KEY_CHUNK - 1) / TL_KEY_CHUNK : 0};
}

TL_DEVICE bool page_is_read(const Keys &keys, int chunk, int page) {
  const int first = chunk * TL_KEY_CHUNK + page * TL_PAGE_POSITIONS;
  return first < keys.end && first + TL_PAGE_POSITIONS > keys.first;
}

}  // namespace tl
