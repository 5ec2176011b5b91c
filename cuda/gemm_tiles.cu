// Matrix product for many batch rows on wgmma: tiles of 128 outputs x 128 rows, two or four to a cluster. Fused: int8 scales, bias
// and the epilogue.
//
// At this size not memory but the way from L2 to the multiprocessors bounds a tile by itself. So a cluster's tiles share what
// they read: two with the same outputs their weights, and of four those with the same rows these. Each CTA asks for half of it,
// and the copy engine puts that into both. Clusters stay for the whole product and take tile after tile; the producer runs ahead
// over the epilogue. Chunks are summed and added as in gemm_wgmma.cu, with the same bits.
#include <algorithm>

#include "gemm_stages.cuh"

namespace tl {
namespace {

constexpr int kRows = 128, kSide = 2;  // two tiles side by side have the same outputs, two below each other the same rows
constexpr int kCtaThreads = kConsumers + 128;  // the producer's warpgroup gives its registers to the others
constexpr int kPassRows = 64;                  // of an epilogue by rows
constexpr int kScratchBytes = kConsumers / 32 * kMaxHeadDim * 4, kPassBytes = kPassRows * kSumStride * 4;

struct TilesArgs {
  GemmArgs gemm;
  int32_t n_stages;                // of the ring
  int32_t n_row_pairs, n_squares;  // the tiles of a cluster are a square, or a pair: those side by side, and all
};

#if TL_WGMMA

using Sums = float[kRows / 2];

// A CTA's tile of a square; kDown: how many are below each other.
struct Tile {
  int first_panel, first_row;
};
template <int kDown>
TL_DEVICE Tile tile_of(const TilesArgs &a, int square, int rank) {
  return {(square / a.n_row_pairs * kDown + rank / kSide) * kTilePanels, (square % a.n_row_pairs * kSide + rank % kSide) * kRows};
}
// Who shares a CTA's weights, and its rows: bits of ranks. Who fills its stages: itself, and these.
TL_DEVICE uint32_t same_weights(int rank) { return 3u << rank / kSide * kSide; }
template <int kDown>
TL_DEVICE uint32_t same_rows(int rank) {
  return (kDown == 1 ? 1u : 5u) << rank % kSide;
}
TL_DEVICE int sender(int rank, int i) { return i == 0 ? rank : i == 1 ? rank ^ 1 : rank ^ kSide; }

// The producer warp: lanes 0..3 their half of the panels, lane 4 its share of the rows, for all CTAs that multiply them. The
// weights of the first stages do not wait for the kernel before this one.
template <class W, int kDown>
TL_DEVICE void produce(const TilesArgs &a, Ring ring) {
  using S = Stage<W, kRows>;
  constexpr int kOwnPanels = kTilePanels / kSide, kCluster = kSide * kDown;
  const GemmArgs &g = a.gemm;
  const int rank = cluster_rank(), lane = lane_id(), n_stages = (pad16(g.weight.n_in) + kStageColumns - 1) / kStageColumns;
  const int64_t panel_bytes = panel_nbytes(g.weight.dtype, g.weight.n_in), row_step = (int64_t)g.source.n_groups * kGroupBytes;
  const int own_panel = rank % kSide * kOwnPanels + lane;
  bool waited = false;
  ring.parity = 1;  // of slots that nobody has used yet
#pragma unroll 1
  for (int square = blockIdx.x / kCluster; square < a.n_squares; square += gridDim.x / kCluster) {
    const Tile tile = tile_of<kDown>(a, square, rank);
    const int n_panels = max(0, min(kTilePanels, g.weight.n_out / kPanelRows - tile.first_panel));
    const int n_groups = max(0, min(kRows / 8, g.source.n_groups - tile.first_row / 8));
    const int own_group = n_groups * (rank / kSide) / kDown, own_row_bytes = (n_groups * (rank / kSide + 1) / kDown - own_group) * kGroupBytes;
    const uint8_t *weights = g.weight.data + (tile.first_panel + own_panel) * panel_bytes;
    const uint8_t *rows = (const uint8_t *)g.source.data + (int64_t)(tile.first_row / 8 + own_group) * kGroupBytes;
    const auto request_weights = [&](int stage, int slot) {
      const int nbytes = (int)min((int64_t)S::kPanelBytes, panel_bytes - (int64_t)stage * S::kPanelBytes);
      if (lane == 0) barrier_arrive_expecting(ring.full + slot * 8, n_panels * nbytes + n_groups * kGroupBytes);
      __syncwarp();
      if (lane < kOwnPanels && own_panel < n_panels)
        copy_bulk_to(ring.memory + slot * S::kBytes + own_panel * S::kPanelBytes, weights + (int64_t)stage * S::kPanelBytes, nbytes,
                     ring.full + slot * 8, same_weights(rank));
    };
    const auto request_rows = [&](int stage, int slot) {
      if (lane == kOwnPanels && own_row_bytes)
        copy_bulk_to(ring.memory + slot * S::kBytes + S::kWeightBytes + own_group * kGroupBytes, rows + stage * row_step, own_row_bytes,
                     ring.full + slot * 8, same_rows<kDown>(rank));
    };
    int stage = 0;
    if (!waited) {
      const int n_early = min(ring.n_slots, n_stages);
      for (int s = 0; s < n_early; s++) request_weights(s, s);
      wait_for_previous_kernel();
      waited = true;
      for (; stage < n_early; stage++) {
        request_rows(stage, stage);
        ring.next();
      }
    }
#pragma unroll 1
    for (; stage < n_stages; stage++) {
      barrier_wait(ring.empty + ring.slot * 8, ring.parity);
      request_weights(stage, ring.slot);
      request_rows(stage, ring.slot);
      ring.next();
    }
  }
}

// ---- the end of a tile from registers: a lane's 8 x 8 tiles of sums are stored in whole sectors

template <bool kInt8>
struct TileSums {
  const GemmArgs &g;
  Tile tile;
  int warp;

  // Scales and biases of this lane's outputs.
  TL_DEVICE_MEMBER void complete(Sums &y) const {
    if (!kInt8 && !g.bias) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int at = output(2 * h);
      if (at >= g.weight.n_out) continue;
      const float scale = kInt8 ? g.weight.scales[at] : 1.0f, bias = g.bias ? g.bias[at] : 0.0f;
#pragma unroll
      for (int i = 2 * h; i < kRows / 2; i += i % 2 ? 3 : 1) {
        if (kInt8) y[i] = y[i] * scale;
        if (g.bias) y[i] = y[i] + bias;
      }
    }
  }

  // kWhole: all of the tile exists, so that nothing stands between the loads, which then run side by side.
  template <bool kAdds, bool kWhole>
  TL_DEVICE_MEMBER void store_rows(const Sums &y) const {
    constexpr int kBatch = 32;
    const int stride = g.epilogue.stride;
    const int64_t first_at = (int64_t)(tile.first_row + row_of(0)) * stride + output(0);
    const float *addend = g.epilogue.addend + first_at;
    float *out = g.epilogue.out + first_at;
    const auto at = [&](int i) { return (i / 4 * 8 + i % 2) * stride + i % 4 / 2 * kPanelRows; };
#pragma unroll
    for (int first = 0; first < kRows / 2; first += kBatch) {
      float x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++)
        if (kAdds && (kWhole || exists(first + i))) x[i] = addend[at(first + i)];
#pragma unroll
      for (int i = 0; i < kBatch; i++)
        if (kWhole || exists(first + i)) out[at(first + i)] = kAdds ? x[i] + y[first + i] : y[first + i];
    }
  }

  TL_DEVICE_MEMBER void store_rows(const Sums &y) const {
    const bool whole = tile.first_row + kRows <= g.n_rows && tile.first_panel + kTilePanels <= g.weight.n_out / kPanelRows;
    if (g.epilogue.kind == kAddToRows)
      whole ? store_rows<true, true>(y) : store_rows<true, false>(y);
    else
      whole ? store_rows<false, true>(y) : store_rows<false, false>(y);
  }

 private:
  TL_DEVICE_MEMBER int output(int i) const { return tile.first_panel * kPanelRows + output_of(warp, i); }
  TL_DEVICE_MEMBER bool exists(int i) const { return tile.first_row + row_of(i) < g.n_rows && output(i) < g.weight.n_out; }
};

template <class W>
TL_DEVICE void finish_tile(const GemmArgs &g, Sums &total, Tile tile, int warp, float *sums, float *scratch) {
  const Epilogue &e = g.epilogue;
  const TileSums<W::kInt8> own{g, tile, warp};
  if (e.kind == kToRows || e.kind == kAddToRows) {
    own.complete(total);
    own.store_rows(total);
  } else if (e.kind == kActivate && e.gated && e.operand.dtype != TL_F32 && e.operand.layout == kOperandTiles) {
    own.complete(total);
    store_gated<kRows>(e, total, tile.first_panel, g.weight.n_out / kPanelRows, tile.first_row, g.n_rows, warp);
  } else {
#pragma unroll
    for (int first = 0; first < kRows; first += kPassRows) {
      sync_threads(1, kConsumers);
      leave_sums<kRows, kPassRows>(sums, total, warp, first);
      sync_threads(1, kConsumers);
      const int end = min(kPassRows, g.n_rows - tile.first_row - first);
      const TileRows<W::kInt8> rows{
          g, tile.first_panel, kTilePanels, tile.first_row + first, warp, end, kConsumers / 32, scratch + warp * kMaxHeadDim};
      rows.finish([&](int row) { return *(const float4 *)(sums + row * kSumStride + lane_id() * 4); });
    }
  }
}

#endif

template <class W, int kDown>
__global__ void __launch_bounds__(kCtaThreads, 1) gemm_tiles(const TilesArgs a) {
#if TL_WGMMA
  constexpr int kCluster = kSide * kDown, kSenders = 1 + kDown;
  using S = Stage<W, kRows>;
  const GemmArgs &g = a.gemm;
  uint8_t *memory = shared_memory<uint8_t>();
  const shared_t barriers = shared_of(memory) + a.n_stages * S::kBytes;
  Ring ring{shared_of(memory), barriers, barriers + kMaxStages * 8, a.n_stages, S::kBytes, S::kWeightBytes};
  float *sums = (float *)(memory + a.n_stages * S::kBytes + kBarrierBytes), *scratch = sums + kPassBytes / 4;
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int s = 0; s < a.n_stages; s++) {
      barrier_init(ring.full + s * 8, 1);
      barrier_init(ring.empty + s * 8, kSenders * kConsumers / 32);
    }
    barrier_init_done();
  }
  cluster_sync();
  let_next_kernel_start();
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0);  // the same for the warp, and known to be
  if (warp >= kConsumers / 32) {
    give_registers<40>();
    if (warp == kConsumers / 32) produce<W, kDown>(a, ring);
    __syncwarp();
  } else {
    take_registers<232>();
    const auto release = [&](int slot) {
      if (lane_id() < kSenders) barrier_arrive_at(ring.empty + slot * 8, sender(rank, lane_id()));
    };
    const int n_blocks = pad16(g.weight.n_in) / 16;
    wait_for_previous_kernel();
#pragma unroll 1
    for (int square = blockIdx.x / kCluster; square < a.n_squares; square += gridDim.x / kCluster) {
      Sums total, sum;
#pragma unroll
      for (int i = 0; i < kRows / 2; i++) total[i] = sum[i] = 0.0f;
#pragma unroll 1
      for (int left = n_blocks; left > 0; left -= kChunkBlocks) {
        if (left >= kChunkBlocks)
          sum_chunk<W, kRows>(sum, ring, warp, release);
        else
          sum_short_chunk<W, kRows>(sum, ring, warp, left, release);
#pragma unroll
        for (int i = 0; i < kRows / 2; i++) total[i] = total[i] + sum[i];
      }
      finish_tile<W>(g, total, tile_of<kDown>(a, square, rank), warp, sums, scratch);
    }
  }
  cluster_sync();  // no CTA leaves while another fills its stages or gives some back
#endif
}

template <class W>
void launch_with(const Launcher &launcher, const GemmArgs &args) {
  const int behind = kBarrierBytes + kPassBytes + kScratchBytes;
  const int n_stages = std::min(kMaxStages, (launcher.context.max_shared_nbytes - behind) / Stage<W, kRows>::kBytes);
  const int n_row_tiles = (args.n_rows + kRows - 1) / kRows, n_output_tiles = (args.weight.n_out / kPanelRows + kTilePanels - 1) / kTilePanels;
  const int n_row_pairs = (n_row_tiles + kSide - 1) / kSide, nbytes = n_stages * Stage<W, kRows>::kBytes + behind;
  // Squares read less, but fewer multiprocessors have room for them: they are taken where they need no more turns than pairs do.
  const auto n_squares = [&](int down) { return n_row_pairs * ((n_output_tiles + down - 1) / down); };
  const auto at_once = [&](int down) {
    return launcher.clusters_at_once(down == 1 ? gemm_tiles<W, 1> : gemm_tiles<W, 2>, Shape{dim3(kSide * down), kCtaThreads, nbytes, kSide * down});
  };
  const auto n_turns = [&](int down) { return (n_squares(down) + at_once(down) - 1) / at_once(down); };
  const int down = n_turns(2) <= n_turns(1) ? 2 : 1, n_clusters = std::min(n_squares(down), at_once(down));
  launcher.launch(down == 1 ? gemm_tiles<W, 1> : gemm_tiles<W, 2>, Shape{dim3(n_clusters * kSide * down), kCtaThreads, nbytes, kSide * down},
                  TilesArgs{args, n_stages, n_row_pairs, n_squares(down)});
}

}  // namespace

// Where there is work for half of the device; with less, a tile's K-chunks are better shared out.
bool gemm_takes_tiles(const tl_context &context, const GemmArgs &args) {
  const int n_row_tiles = (args.n_rows + kRows - 1) / kRows;
  return n_row_tiles > 1 && 2 * n_row_tiles * ((args.weight.n_out + kTileOutputs - 1) / kTileOutputs) >= context.n_multiprocessors;
}

void launch_gemm_tiles(const Launcher &launcher, const GemmArgs &args) {
  switch (args.weight.dtype) {
    case TL_BF16: return launch_with<FloatWeights<Bf16>>(launcher, args);
    case TL_F16: return launch_with<FloatWeights<F16>>(launcher, args);
    default: return launch_with<Int8Weights>(launcher, args);
  }
}

}  // namespace tl
