// What both products on wgmma share: the ring of stages that a producer warp fills by bulk copies, and a warpgroup's sum over
// one K-chunk of it.
//
// A stage is 64 columns of 128 outputs and of N batch rows. Of its two consumer warpgroups, one has the upper eight outputs of
// all panels and the other the lower eight: so the 8 x 8 tiles of a warpgroup's 64 outputs lie evenly apart, which lets the
// tensor cores read weights where the copies put them, and a gate and its up output meet in one thread.
#pragma once

#include "gemm.cuh"
#include "tile_epilogue.cuh"
#include "weights.cuh"
#include "wgmma.cuh"

namespace tl {

constexpr int kTilePanels = kTileOutputs / kPanelRows;
constexpr int kConsumers = 256;
constexpr int kStageColumns = 64, kStageBlocks = kStageColumns / 16;
constexpr int kChunkStages = TL_K_CHUNK / kStageColumns;
constexpr int kGroupBytes = kStageColumns * 8 * 2;  // eight batch rows of a stage
constexpr int kMaxStages = 10, kBarrierBytes = 2 * kMaxStages * 8;
constexpr int kSumStride = kTileOutputs + 4;  // floats between rows of sums: a warp's stores meet every bank once

template <class W, int N>
struct Stage {
  static constexpr int kPanelBytes = kStageBlocks * W::kBlockBytes;
  static constexpr int kWeightBytes = kTilePanels * kPanelBytes;
  static constexpr int kRowBytes = N / 8 * kGroupBytes;
  static constexpr int kBytes = kWeightBytes + kRowBytes;
};

inline int n_stages_of(int n_in) { return (pad16(n_in) + kStageColumns - 1) / kStageColumns; }

#if TL_WGMMA

// A place in the ring.
struct Ring {
  shared_t memory, full, empty;  // stages, and the barriers of each
  int n_slots, stage_bytes, weight_bytes;  // of a stage the weights come first
  int slot = 0, parity = 0;
  TL_DEVICE_MEMBER shared_t stage() const { return memory + slot * stage_bytes; }
  TL_DEVICE_MEMBER void next() {
    if (++slot == n_slots) slot = 0, parity ^= 1;
  }
};

// Where a producer's next stage lies: the first panel's columns, and the rows'.
struct StageSource {
  const uint8_t *weights, *rows;
  int64_t panel_bytes;
  int n_panels, weight_bytes, row_bytes;  // of a stage; weight_bytes: of a panel
  uint64_t policy = pass_policy();        // of weights: what is read once does not drive out what kernels hand to each other
};

// By one lane: the weights of a stage, with a barrier that expects its rows, too.
template <class W>
TL_DEVICE void request_weights(const Ring &ring, const StageSource &from, int slot) {
  constexpr int kPanelBytes = kStageBlocks * W::kBlockBytes;
  const shared_t to = ring.memory + slot * ring.stage_bytes, full = ring.full + slot * 8;
  barrier_arrive_expecting(full, from.n_panels * from.weight_bytes + from.row_bytes);
#pragma unroll
  for (int i = 0; i < kTilePanels; i++)
    if (i < from.n_panels) copy_bulk(to + i * kPanelBytes, from.weights + i * from.panel_bytes, from.weight_bytes, full, from.policy);
}
TL_DEVICE void request_rows(const Ring &ring, const StageSource &from, int slot) {
  copy_bulk(ring.memory + slot * ring.stage_bytes + ring.weight_bytes, from.rows, from.row_bytes, ring.full + slot * 8);
}

// Local index of the output that value i of a lane is, in the tile.
TL_DEVICE int output_of(int warp, int i) { return (warp % 4 * 2 + i % 4 / 2) * kPanelRows + warp / 4 * 8 + lane_id() / 4; }
// The same of its batch row.
TL_DEVICE int row_of(int i) { return i / 4 * 8 + lane_id() % 4 * 2 + i % 2; }

// The left operands of a stage's blocks in registers, where weights are to be widened.
template <class W>
struct LeftBlocks {
  uint32_t w[kStageBlocks][4];
  TL_DEVICE_MEMBER void load(shared_t stage, int warp) {
    if constexpr (W::kInt8) {
      constexpr int kPanelBytes = kStageBlocks * W::kBlockBytes;
      const shared_t at = stage + warp % 4 * 2 * kPanelBytes + lane_id() * W::kLaneBytes;
#pragma unroll
      for (int b = 0; b < kStageBlocks; b++) W::load_halves(w[b], at + b * W::kBlockBytes, at + kPanelBytes + b * W::kBlockBytes, warp / 4);
    }
  }
};

// Where the tensor cores find a stage: the weights of this warpgroup, and the rows.
struct StageTiles {
  uint64_t weights, rows;
};
template <class W, int N>
TL_DEVICE StageTiles tiles_of(const Ring &ring, int warp) {
  const shared_t stage = ring.stage();
  return {W::kInt8 ? 0 : wgmma_tiles(stage + warp / 4 * 128, Stage<W, N>::kPanelBytes, 256), wgmma_tiles(stage + ring.weight_bytes, kGroupBytes)};
}

template <class W, int N>
TL_DEVICE void multiply_block(float (&sum)[N / 2], const LeftBlocks<W> &left, const StageTiles &tiles, int block, bool add) {
  const uint64_t rows = wgmma_tiles_at(tiles.rows, block * 256);
  if constexpr (W::kInt8)
    wgmma<typename W::Op>(sum, left.w[block], rows, add);
  else
    wgmma<typename W::Op>(sum, wgmma_tiles_at(tiles.weights, block * W::kBlockBytes), rows, add);
}

// Sums a whole chunk. While a stage's products run, the next one is waited for and begun; `release(slot)` gives a stage back
// when the products after it have begun. `meanwhile(j)` runs under the products of stage j.
template <class W, int N, class Release, class Meanwhile>
TL_DEVICE void sum_chunk(float (&sum)[N / 2], Ring &ring, int warp, const Release &release, const Meanwhile &meanwhile) {
  LeftBlocks<W> left[2];
  int held = 0;
#pragma unroll
  for (int j = 0; j < kChunkStages; j++) {
    barrier_wait(ring.full + ring.slot * 8, ring.parity);
    const StageTiles tiles = tiles_of<W, N>(ring, warp);
    left[j % 2].load(ring.stage(), warp);
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < kStageBlocks; b++) multiply_block<W, N>(sum, left[j % 2], tiles, b, j + b > 0);
    wgmma_commit();
    meanwhile(j);
    if (j > 0) {
      wgmma_wait<1>();
      release(held);
    }
    held = ring.slot;
    ring.next();
  }
  wgmma_wait<0>();
  accumulators_ready(sum);
  release(held);
}

template <class W, int N, class Release>
TL_DEVICE void sum_chunk(float (&sum)[N / 2], Ring &ring, int warp, const Release &release) {
  sum_chunk<W, N>(sum, ring, warp, release, [](int) {});
}

// The same for a last chunk of n_blocks blocks, one stage at a time.
template <class W, int N, class Release>
TL_DEVICE void sum_short_chunk(float (&sum)[N / 2], Ring &ring, int warp, int n_blocks, const Release &release) {
#pragma unroll 1
  for (int first = 0; first < n_blocks; first += kStageBlocks) {
    barrier_wait(ring.full + ring.slot * 8, ring.parity);
    const StageTiles tiles = tiles_of<W, N>(ring, warp);
    LeftBlocks<W> left;
    left.load(ring.stage(), warp);
    accumulators_ready(sum);
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < kStageBlocks; b++)
      if (first + b < n_blocks) multiply_block<W, N>(sum, left, tiles, b, first + b > 0);
    wgmma_commit();
    wgmma_wait<0>();
    accumulators_ready(sum);
    release(ring.slot);
    ring.next();
  }
}

// `n_rows` rows of a consumer thread's sums from row `first` on to shared memory, rows kSumStride apart.
template <int N, int n_rows = N>
TL_DEVICE void leave_sums(float *sums, const float (&sum)[N / 2], int warp, int first = 0) {
  float *to = sums + output_of(warp, 0) + lane_id() % 4 * 2 * kSumStride;
#pragma unroll
  for (int i = 0; i < N / 2; i++)
    if (i / 4 * 8 >= first && i / 4 * 8 < first + n_rows) to[(i / 4 * 8 - first + i % 2) * kSumStride + i % 4 / 2 * kPanelRows] = sum[i];
}

#endif

}  // namespace tl
