// An attention's output that is still turned, as codes leave it (docs/kv-modes.md): turned back where a product takes it as its operand, in a
// step as one kernel (step.cu). A block of the turn is whole lanes of a warp, so that no CTA waits for another once more.
#pragma once

#include "step_row.cuh"

namespace tl {

#if TL_HOPPER

// The operand, from words of two dims each. The numbers are turn_head's.
template <class Op>
TL_DEVICE void take_turned(const StepProduct &t, const ProductHead &h, const StepMemory &m, const Handover &hand) {
  const int n = t.weight.n_in, n_pad = h.n_blocks * 16, block = h.turn, lane = hand.lane();
  const float scale = h.turn_scale;
  const uint64_t flag = hand.flag - h.row.back;
#pragma unroll 1
  for (int first = 0; first < n_pad; first += 4 * kThreads * kStepQuads) {
    uint64_t data[2 * kStepQuads];
    const uint8_t *from = h.row.words + (int64_t)(first + hand.quad(0)) * 8;
    static_assert(kStepQuads == 2, "two quads are four words");
    await_words(data,
                first + hand.quad(1) < n   ? 4
                : first + hand.quad(0) < n ? 2
                                           : 0,
                flag, [&](int i) { return from + i / 2 * (kThreads * 32) + i % 2 * 16; });
#pragma unroll
    for (int j = 0; j < kStepQuads; j++) {
      float x[4] = {low_float(data[2 * j]), high_float(data[2 * j]), low_float(data[2 * j + 1]), high_float(data[2 * j + 1])};
      turn_head(x, block, scale, lane);
      if (first + hand.quad(j) < n_pad) put_quad<Op>(shared_of(m.operand) + four_at(first + hand.quad(j)), make_float4(x[0], x[1], x[2], x[3]));
    }
  }
}

#endif

}  // namespace tl
