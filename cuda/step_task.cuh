// The tasks of a step as one kernel (step.cu): what the host works out for each, and where a CTA's part of it lies.
#pragma once

#include "attend.cuh"
#include "gemv.cuh"
#include "step_words.cuh"

namespace tl {

constexpr int kMaxChannels = 8;
constexpr int kKindBits = 4, kMaxStepOps = 8;  // of an operation of a row program, whose kinds are a word
constexpr int kStepQuads = 2;           // of a thread: rows of up to 2,048 floats
constexpr int kSpanChunks = 32;         // key chunks whose states a unit of attention merges at a time; whole groups
constexpr int kHeldChunks = 8 * kSpanChunks;  // chunks whose states have a place of their own: see run_attention
constexpr int kMaxRanks = kSpanChunks;  // CTAs of a unit: each has a chunk in a whole span
static_assert(kSpanChunks % TL_CHUNK_GROUP == 0, "groups do not cross spans");

// Where values come from or go to: flagged words, or memory alone. Those read were left by the task `back` ones ago.
struct Channel {
  uint8_t *words;  // NULL: none
  int64_t back;
};
constexpr Channel kMemory = {nullptr, 0};

// Bytes from a channel's word to the next one. A word takes 16; it has a sector of L2 to itself.
constexpr int kWordStride = 32;
// Where the word with floats 2 word and 2 word + 1 of a row lies: the first words of 32 quads, then the second ones, so that a warp whose lanes
// read a quad each reads what lies side by side.
TL_BOTH int row_word_at(int word) { return (word / 64 * 64 + word % 2 * 32 + word % 64 / 2) * kWordStride; }
// Where the word with four columns of an operand lies, from `column` on, a multiple of four.
TL_BOTH int operand_word_at(int column) { return column * (kWordStride / 4); }

// A flag tells a task's words from all others': from the lowest bit the number of the task in its step, the number of the step, and
// what a task counts for itself.
constexpr int kTaskBits = 20, kFlagBits = 52;

static_assert(kRowLoad == 0 && kRowStore < 1 << kKindBits && kMaxStepOps * kKindBits <= 32, "no operation after the first is 0");

struct StepOp {  // of RowProgram; the first one loads
  const float *p;
  int32_t kind;
  Channel channel;
};

// What every thread needs of a product before it waits for its row: read at once.
struct alignas(16) ProductHead {
  int32_t unit_panels;             // panels that stay together: 2 where gated
  int32_t units_each, units_more;  // units of every CTA, and CTAs that have one more
  int32_t first_cta, n_ctas;       // that have a share, the first CTA behind the last one
  int32_t n_chunks, n_blocks;      // of a panel
  int32_t n_items;                 // items of a panel in the stream
  uint32_t items_inverse;
  int32_t round_panels;            // panels whose sums are held at a time
  int32_t dtype, kind;             // of the weights and of the epilogue
  int32_t act, out_dtype;          // of an activation
  int32_t dim, n_ops, early;       // of the program: values, operations, and the one among them whose row is there early, or 0
  uint32_t kinds;                  // of the operations after the first, kKindBits each, but for a norm at the end
  int32_t groups;                  // whether groups of columns have scales
  Channel row, addend;             // the operand, or what the program loads
  uint8_t *words;                  // of the outputs, or NULL
  void *out;                       // and where else they go
};

struct StepProduct {
  ProductHead head;
  float eps;
  int32_t item_chunks;  // of an item of the stream
  const float *first_norm, *last_norm;  // weights that are read ahead: of the first norm, and of one at the end; NULL: there is none
  const float *tail;    // appended to the operand: (dim,), or NULL
  StepOp op[kMaxStepOps];
  Matrix weight;
  const float *bias;
  const void *source;   // the row, where it is in memory alone
  Epilogue epilogue;
};

// What all attentions of a step share.
struct AttentionShape {
  int32_t n_kv_heads, group, head_dim, head_pad, k_nbytes;  // group: queries of a KV head
  int32_t turn;              // of codes, and its scale: see PlaceArgs
  float turn_scale;
  int32_t n_units, n_ranks;  // KV heads with up to unit_queries queries; CTAs of each
  int32_t n_strides;         // units that are worked on at once
  int32_t n_mergers;         // of a unit's CTAs, the first ones, that merge
  int32_t n_quads;           // quads of dims that one of them merges
  uint32_t ranks_inverse, dims_inverse;  // of n_ranks, and of head_dim / 4
};

// What every thread needs of an attention before it waits for its queries.
struct alignas(16) AttentionHead {
  Channel qkv;
  uint8_t *words;  // of the outputs, or NULL
  void *out;       // and where else they go
  int32_t window;
  float scale, eps;
  int32_t qk_norm, rotary_dim, interleaved, out_dtype;
};

struct StepAttention {
  AttentionHead head;
  AttendArgs attend;
};

struct alignas(16) StepTask {
  int32_t attends;
  union {
    StepProduct product;
    StepAttention attention;
  };
};
static_assert(sizeof(StepTask) % 16 == 0, "tasks are copied in pieces of sixteen bytes");

// x / n for x below 2^31 / n, and what it takes.
TL_BOTH uint32_t inverse_of(int n) { return (uint32_t)(((1ull << 31) + n - 1) / n); }
TL_BOTH int quotient(int x, uint32_t inverse) { return (int)((uint64_t)(uint32_t)x * inverse >> 31); }

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

// Which unit of every attention a CTA works on first, and as which of its CTAs: first come all that merge. No unit for those that are left.
struct CtaPlace {
  int unit, rank;
};
TL_DEVICE CtaPlace place_of(const AttentionShape &shape, int cta) {
  const int rank = cta / shape.n_strides;
  return {rank < shape.n_ranks ? cta - rank * shape.n_strides : shape.n_units, rank};
}

TL_DEVICE CtaShare share_of(const ProductHead &p, int cta) {
  const int behind = cta - p.first_cta, place = behind < 0 ? behind + (int)gridDim.x : behind;
  return place < p.n_ctas ? share_of(place, p.units_each, p.units_more, p.unit_panels) : CtaShare{0, 0};
}

// The key chunks of a unit, and the pages of one of them that are read: `first` and those after it.
struct KeyChunks {
  int first, end;
};
TL_DEVICE KeyChunks chunks_of(const Keys &keys) { return {keys.first / TL_KEY_CHUNK, (keys.end + TL_KEY_CHUNK - 1) / TL_KEY_CHUNK}; }

struct PagesRead {
  int first, n;
};
TL_DEVICE PagesRead pages_of(const Keys &keys, int chunk) {
  const int begin = max(keys.first - chunk * TL_KEY_CHUNK, 0) / TL_PAGE_POSITIONS;
  const int end = (min(keys.end - chunk * TL_KEY_CHUNK, TL_KEY_CHUNK) + TL_PAGE_POSITIONS - 1) / TL_PAGE_POSITIONS;
  return {begin, end - begin};
}

}  // namespace tl
