// Weight types of a product: how a 16 x 16 block of a panel becomes the left operand of mma.sync.
#pragma once

#include "math.cuh"

namespace tl {

constexpr int kChunkBlocks = TL_K_CHUNK / 16;

template <class T>
struct FloatWeights {
  using Op = T;
  static constexpr bool kInt8 = false;
  static constexpr int kBlockBytes = 512;
  static constexpr int kLaneBytes = 16;  // a lane's address in a block is block + lane * kLaneBytes
  TL_DEVICE void load(uint32_t (&a)[4], shared_t lane_address) { ldmatrix4(a, lane_address); }
  static constexpr int kLaneWords = 4;  // of a block
  TL_DEVICE void load_words(uint32_t (&words)[4], shared_t lane_address) { ldmatrix4(words, lane_address); }
  TL_DEVICE void widen_words(uint32_t (&a)[4], const uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = words[i];
  }
};

// int8 values become bfloat16 by one multiply-add: u = q + 128, alone in a word, reads as u 2^-133, as subnormal and the first normal numbers
// are equally far apart. Times 2^127 less 2 that is q / 64, exactly; scales are kept 64 times as large (layout.cuh).
struct Int8Weights {
  using Op = Bf16;
  static constexpr bool kInt8 = true;
  static constexpr int kBlockBytes = 256;
  // Bytes 0 and 2 (half 0), or 1 and 3.
  TL_DEVICE uint32_t widen(uint32_t bytes, int half) {
    return multiply_add_bf16(select_bytes(bytes, 0, 0x4240u + 0x0101u * half), 0x7f007f00u, 0xc000c000u);
  }
  static constexpr int kLaneBytes = 8;
  static constexpr int kLaneWords = 2;
  TL_DEVICE void load_words(uint32_t (&words)[2], shared_t lane_address) {
    const uint2 q = load_shared8(lane_address);
    words[0] = q.x, words[1] = q.y;
  }
  TL_DEVICE void widen_words(uint32_t (&a)[4], const uint32_t (&words)[2]) {
    a[0] = widen(words[0], 0);
    a[1] = widen(words[0], 1);
    a[2] = widen(words[1], 0);
    a[3] = widen(words[1], 1);
  }
  TL_DEVICE void load(uint32_t (&a)[4], shared_t lane_address) {
    uint32_t words[2];
    load_words(words, lane_address);
    widen_words(a, words);
  }
  // The upper (half 0) or lower eight rows of two panels' blocks, one above the other.
  TL_DEVICE void load_halves(uint32_t (&a)[4], shared_t upper, shared_t lower, int half) {
    const uint2 p = load_shared8(upper), q = load_shared8(lower);
    a[0] = widen(p.x, half);
    a[1] = widen(q.x, half);
    a[2] = widen(p.y, half);
    a[3] = widen(q.y, half);
  }
};

// d += kCount blocks times the row; `block` and `right` are this lane's addresses in the first of them. Loads come first, so
// that only the chain of products remains.
template <class W, int kCount>
TL_DEVICE void add_run(float (&d)[4], shared_t block, shared_t right) {
  uint32_t a[kCount][4];
  uint2 b[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    W::load(a[i], block + i * W::kBlockBytes);
    b[i] = load_shared8(right + i * 32);
  }
#pragma unroll
  for (int i = 0; i < kCount; i++) W::Op::mma(d, a[i], b[i].x, b[i].y);
}

// The same of kWhole blocks, kRun at a time, or of the few that are left.
template <class W, int kWhole, int kRun>
TL_DEVICE void add_blocks(float (&d)[4], shared_t block, shared_t right, int n_blocks) {
  if (n_blocks >= kWhole) {
#pragma unroll
    for (int i = 0; i < kWhole; i += kRun) add_run<W, kRun>(d, block + i * W::kBlockBytes, right + i * 32);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < n_blocks; i++) add_run<W, 1>(d, block + i * W::kBlockBytes, right + i * 32);
}

// A whole chunk, or two of int8.
template <class W>
struct Chunks {
  static constexpr int kChunks = W::kInt8 ? 2 : 1, kBlocks = kChunks * kChunkBlocks;
  // d += the chunks' products, those of two chunks side by side: a product need not wait for the one before it. `left` and `right` are this
  // lane's addresses in the first block.
  TL_DEVICE void multiply(float (&d)[kChunks][4], shared_t left, shared_t right) {
    constexpr int kRun = kChunkBlocks / 2 / kChunks;
#pragma unroll
    for (int first = 0; first < kChunkBlocks; first += kRun) {
      uint32_t a[kRun][kChunks][4];
      uint2 b[kRun][kChunks];
#pragma unroll
      for (int i = 0; i < kRun; i++)
#pragma unroll
        for (int k = 0; k < kChunks; k++) {
          const int block = k * kChunkBlocks + first + i;
          W::load(a[i][k], left + block * W::kBlockBytes);
          b[i][k] = load_shared8(right + block * 32);
        }
#pragma unroll
      for (int i = 0; i < kRun; i++)
#pragma unroll
        for (int k = 0; k < kChunks; k++) W::Op::mma(d[k], a[i][k], b[i][k].x, b[i][k].y);
    }
  }
};

// The same with weights that a warp has in registers, from before the row was there.
template <class W>
struct HeldChunks {
  static constexpr int kChunks = Chunks<W>::kChunks;
  uint32_t words[kChunks * kChunkBlocks][W::kLaneWords];
  TL_DEVICE_MEMBER void load(shared_t left) {
#pragma unroll
    for (int i = 0; i < kChunks * kChunkBlocks; i++) W::load_words(words[i], left + i * W::kBlockBytes);
  }
  TL_DEVICE_MEMBER void multiply(float (&d)[kChunks][4], shared_t right) const {
    constexpr int kRun = kChunkBlocks / 2 / kChunks;
#pragma unroll
    for (int first = 0; first < kChunkBlocks; first += kRun) {
      uint2 b[kRun][kChunks];
#pragma unroll
      for (int i = 0; i < kRun; i++)
#pragma unroll
        for (int k = 0; k < kChunks; k++) b[i][k] = load_shared8(right + (k * kChunkBlocks + first + i) * 32);
#pragma unroll
      for (int i = 0; i < kRun; i++)
#pragma unroll
        for (int k = 0; k < kChunks; k++) {
          uint32_t a[4];
          W::widen_words(a, words[k * kChunkBlocks + first + i]);
          W::Op::mma(d[k], a, b[i][k].x, b[i][k].y);
        }
    }
  }
  // The same and another chunk, from shared memory, side by side: a product need not wait for the one before it. Of floats.
  TL_DEVICE_MEMBER void multiply_beside(float (&d)[4], shared_t right, float (&other)[4], shared_t other_left, shared_t other_right) const {
    constexpr int kRun = kChunkBlocks / 2;
#pragma unroll
    for (int first = 0; first < kChunkBlocks; first += kRun) {
      uint32_t a[kRun][4];
      uint2 b[kRun][2];
#pragma unroll
      for (int i = 0; i < kRun; i++) {
        W::load(a[i], other_left + (first + i) * W::kBlockBytes);
        b[i][0] = load_shared8(right + (first + i) * 32);
        b[i][1] = load_shared8(other_right + (first + i) * 32);
      }
#pragma unroll
      for (int i = 0; i < kRun; i++) {
        W::Op::mma(d, words[first + i], b[i][0].x, b[i][0].y);
        W::Op::mma(other, a[i], b[i][1].x, b[i][1].y);
      }
    }
  }
};

// The same where groups of int8 columns have scales: kScaleColumns are summed from zero, then scaled and added in order.
template <class W>
TL_DEVICE void add_scaled_blocks(float (&d)[4], shared_t block, shared_t right, int n_blocks, const Matrix &m, int panel, int first_block) {
  constexpr int kRun = kScaleColumns / 16;
#pragma unroll 1
  for (int i = 0; i < n_blocks; i += kRun) {
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kRun; j++)
      if (i + j < n_blocks) add_run<W, 1>(s, block + (i + j) * W::kBlockBytes, right + (i + j) * 32);
    const float *scale = m.scales + scale_offset(m, panel * kPanelRows, (first_block + i) * 16 / m.group_size) + lane_id() / 4;
#pragma unroll
    for (int j = 0; j < 4; j++) d[j] = fmaf(s[j], scale[j / 2 * 8], d[j]);
  }
}

}  // namespace tl
