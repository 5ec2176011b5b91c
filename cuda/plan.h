// A plan on a CUDA device: the phases of one model's forward pass, and where its scratch memory lies.
#pragma once

#include <vector>

#include "launch.h"
#include "layout.cuh"

namespace tl {

constexpr int kRowTile = 64;  // row buffers of operands are padded to it

// Byte offsets into the scratch memory. Row buffers are (max rows, width), float32 but for q and the operands.
struct Scratch {
  uint64_t x[2], e, y, qkv, q;
  uint64_t operand, attn, hidden;  // right operands: of products from x, of OUT, of DOWN
  uint64_t logits, sample_work, n_clamped;
  uint64_t sums;   // of K-chunks (sums.cuh)
  uint64_t states;  // of attention (attend_states.cu)
  uint64_t step;  // tasks, and words that they hand over (step.cu)
  uint64_t nbytes;
};

}  // namespace tl

struct tl_plan {
  tl_plan(tl_context &c, const tl_plan_desc &d);

  tl_context &context;
  tl_plan_desc desc;
  std::vector<tl_phase> phases;
  tl::Scratch scratch;
  uint8_t *memory = nullptr;
  int dim_pad, head_pad, q_dim;
  std::vector<std::vector<uint8_t>> step_programs;  // what lies in scratch memory of them

  float *buffer(uint64_t offset) const { return (float *)(memory + offset); }
};

namespace tl {

// Whether a phase's product of some rows, on tiles, may leave sums to the kernel after it.
bool leaves_sums(const tl_plan &plan, const tl_phase &phase, int n_rows);

// Enqueues a batch that tinyloop_check.h has accepted: kernel launches only, so that a stream capture can record it.
void enqueue_batch(tl_plan &plan, const tl_batch &batch, cudaStream_t stream);

}  // namespace tl
