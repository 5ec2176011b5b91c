// Weight types of a product: how a 16 x 16 block of a panel becomes the left operand of mma.sync.
#pragma once

#include "math.cuh"

namespace tl {

template <class T>
struct FloatWeights {
  using Op = T;
  static constexpr bool kInt8 = false;
  static constexpr int kBlockBytes = 512;
  static constexpr int kLaneBytes = 16;  // a lane's address in a block is block + lane * kLaneBytes
  TL_DEVICE void load(uint32_t (&a)[4], shared_t lane_address) { ldmatrix4(a, lane_address); }
};

// int8 values become bfloat16 exactly: u = q & 127 under the exponent of 128 reads as 128 + u; taking away 128, or 256
// where q is negative, leaves q.
struct Int8Weights {
  using Op = Bf16;
  static constexpr bool kInt8 = true;
  static constexpr int kBlockBytes = 256;
  TL_DEVICE uint32_t widen(uint32_t bytes) { return subtract_bf16((bytes & 0x007f007fu) | 0x43004300u, (bytes & 0x00800080u) | 0x43004300u); }
  static constexpr int kLaneBytes = 8;
  TL_DEVICE void load(uint32_t (&a)[4], shared_t lane_address) {
    const uint2 q = load_shared8(lane_address);
    a[0] = widen(q.x);
    a[1] = widen(q.x >> 8);
    a[2] = widen(q.y);
    a[3] = widen(q.y >> 8);
  }
  // The upper (half 0) or lower eight rows of two panels' blocks, one above the other.
  TL_DEVICE void load_halves(uint32_t (&a)[4], shared_t upper, shared_t lower, int half) {
    const uint2 p = load_shared8(upper), q = load_shared8(lower);
    a[0] = widen(p.x >> 8 * half);
    a[1] = widen(q.x >> 8 * half);
    a[2] = widen(p.y >> 8 * half);
    a[3] = widen(q.y >> 8 * half);
  }
};

}  // namespace tl
