// Drawing tokens from logits, and the step of a sequence that runs by itself. See sample.cu.
#pragma once

#include "launch.h"

namespace tl {

struct SampleArgs {
  int32_t vocab_size;
  const tl_sampling *sampling;  // (n,), or NULL: `single` for the only row
  const float *logits;          // (n, vocab_size)
  float *work;                  // (n, sample_work_floats(vocab_size))
  int32_t *sampled;             // (n,), or NULL
  tl_decode *decode;            // (n,), or NULL
  int32_t *token, *pos;         // (n,) of the rows, with decode
  tl_sampling single;
  int32_t row_in_shared;        // set at launch
};

TL_BOTH uint64_t sample_work_floats(int vocab_size) { return (uint64_t)vocab_size + (vocab_size + 31) / 32; }

void launch_sample(const Launcher &launcher, int n, const SampleArgs &args);

}  // namespace tl
