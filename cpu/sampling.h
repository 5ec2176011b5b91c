#pragma once

#include "kernels.h"

namespace tl {

// Floats of scratch that draw_token needs.
uint64_t sampling_work_floats(int vocab_size);

// Draws one token from (vocab_size,) logits, which stay as they are.
int draw_token(const Kernels &k, int vocab_size, const tl_sampling &s, const float *logits, float *work);

}  // namespace tl
