// A plan on the CPU: the phases of one model's forward pass, and where its scratch memory lies.
#pragma once

#include <atomic>
#include <vector>

#include "kernels.h"
#include "kv_layout.h"
#include "thread_pool.h"

struct tl_context {
  explicit tl_context(const tl::Kernels &k, int n_threads) : kernels(k), pool(n_threads) {}
  const tl::Kernels &kernels;
  tl::ThreadPool pool;
};

namespace tl {

constexpr int kPrivateRows = 3;   // up to here every thread has x to itself and lays out operands for itself: fewer barriers
constexpr int kPrivatePanels = 64;  // matrix panels of one unit then, at most
constexpr int kBusyPanels = 8;      // fewer would leave a kernel waiting
constexpr int kMaxUnits = 3;        // units that each thread has then, so that one can help the other
constexpr uint64_t kCacheNbytes = 24 << 20;  // weights up to this size are taken to stay in the caches
constexpr int kUnitRows = 96;     // batch rows of one unit of a matrix product
constexpr int kUnitPanels = 4;    // its panels, where nothing else groups them
constexpr int kSplitRows = 8;     // up to here a query's keys are shared out over threads
constexpr int kFewChunks = 4;     // up to here whoever needs a row's attention output merges it
constexpr int kSplitChunks = 2;   // key chunks of one unit then, of all heads or of some
constexpr int kBlockQueries = 24; // queries of one attention unit otherwise

// Byte offsets into the scratch memory. Row buffers are (max_rows, width) float32.
struct Scratch {
  uint64_t x, e, y, z, q, qkv, attn, hidden, operand, logits, partials;
  uint64_t thread, thread_nbytes;                               // per thread:
  uint64_t t_x, t_e, t_operand, t_tile, t_row, t_states, t_sample;  // offsets inside a thread's part
  uint64_t nbytes;
};

}  // namespace tl

struct tl_plan {
  tl_plan(tl_context &c, const tl_plan_desc &d);

  tl_context &context;
  const tl::Kernels &k;
  tl_plan_desc desc;
  std::vector<tl_phase> phases;
  tl::Scratch scratch;
  uint8_t *memory = nullptr;
  std::atomic<uint64_t> n_clamped{0};

  bool from_memory;                  // the weights do not stay in the caches from token to token
  int dim_pad, head_pad, ffn_pad, q_dim, group;
  tl::KvLayout kv;                   // of one layer and KV head in a page
  int rotation;                      // block of the turn that quantised K and V lie in, 1 = none
  uint64_t page_nbytes[3];
  uint64_t operand_page_nbytes[3], operand_nbytes[3];  // in whole lines, and without the rest of the last
  std::vector<uint64_t> operand_offset;  // by phase: where a QKV phase's rows begin in an operand page

  float *buffer(uint64_t offset) const { return (float *)(memory + offset); }
  uint8_t *thread_memory(int thread) const { return memory + scratch.thread + thread * scratch.thread_nbytes; }
  int max_chunks() const { return (desc.max_pos + TL_KEY_CHUNK - 1) / TL_KEY_CHUNK; }
};

namespace tl {

uint64_t page_nbytes(const tl_plan_desc &d, int part);
// A page of operands is, per layer, 16 rows of the QKV product's operand. Fills in the offsets of the part's phases where asked.
uint64_t operand_nbytes(const tl_plan_desc &d, int part, std::vector<uint64_t> *offsets = nullptr);
uint64_t operand_page_nbytes(const tl_plan_desc &d, int part);

// Between a page and the canonical layout (keys and values (n_layers, n_kv_heads, 16) rows); to_page says which way.
void convert_page(const tl_plan &plan, int part, int page, void *keys, void *values, bool to_page);

// Runs a batch that plan_check.h has accepted.
void run_batch(tl_plan &plan, const tl_batch &batch);

}  // namespace tl
