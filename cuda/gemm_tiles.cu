// Matrix product for many batch rows on wgmma: tiles of 128 outputs x 128 rows, two or four to a cluster. Fused: int8 scales, bias
// and the epilogue.
//
// At this size not memory but the way from L2 to the multiprocessors bounds a tile by itself. So a cluster's tiles share what
// they read: two with the same outputs their weights, and of four those with the same rows these. Each CTA asks for half of it,
// and the copy engine puts that into both. Clusters stay for the whole product and take tile after tile; the producer runs ahead
// over a tile's end. Chunks are summed and added as in gemm_wgmma.cu, with the same bits.
//
// Squares do not fit some multiprocessors. Where these would save a turn, a second kernel takes the last squares as pairs there: it
// starts when every CTA of the first one has seen the end of the kernel before them, and ends after the first one.
#include <algorithm>

#include "tile_producer.cuh"

namespace tl {
namespace {

constexpr int kCtaThreads = kConsumers + 128;  // the producer's warpgroup gives its registers to the others
constexpr int kStagesOfTwo = 64;               // that each CTA multiplies, from which on two kernels share a product
constexpr int kPassRows = 64;                  // of an epilogue by rows
constexpr int kScratchBytes = kConsumers / 32 * kMaxHeadDim * 4, kPassBytes = kPassRows * kSumStride * 4;

#if TL_WGMMA

// The end of a tile row by row, through shared memory.
template <class W>
TL_DEVICE void finish_by_row(const GemmArgs &g, const TileSums &total, Tile tile, int warp, float *sums, float *scratch) {
#pragma unroll
  for (int first = 0; first < kRows; first += kPassRows) {
    sync_threads(1, kConsumers);
    leave_sums<kRows, kPassRows>(sums, total, warp, first);
    sync_threads(1, kConsumers);
    const int end = min(kPassRows, g.n_rows - tile.first_row - first);
    const TileRows<W::kInt8> rows{g, tile.first_panel, kTilePanels, tile.first_row + first, warp, end, kConsumers / 32, scratch + warp * kMaxHeadDim};
    rows.finish([&](int row) { return *(const float4 *)(sums + row * kSumStride + lane_id() * 4); });
  }
}

// The consumers' view of their work.
template <class W, int kDown>
struct Consumer {
  static constexpr int kCluster = kSide * kDown;
  const TilesArgs &a;
  Ring &ring;
  int warp, rank, n_blocks;

  TL_DEVICE_MEMBER Tile tile(int square) const { return tile_of<kDown>(a, square, rank); }
  TL_DEVICE_MEMBER int first() const { return blockIdx.x / kCluster; }
  TL_DEVICE_MEMBER int step() const { return gridDim.x / kCluster; }

  template <class Meanwhile>
  TL_DEVICE_MEMBER void add_chunk(TileSums &sum, const Meanwhile &meanwhile) const {
    sum_chunk<W, kRows>(sum, ring, warp, releaser(), meanwhile);
  }
  // Adds the last `left` blocks of the columns to the total.
  TL_DEVICE_MEMBER void add_rest(TileSums &total, TileSums &sum, int left) const {
#pragma unroll 1
    for (; left > 0; left -= kChunkBlocks) {
      if (left >= kChunkBlocks)
        add_chunk(sum, [](int) {});
      else
        sum_short_chunk<W, kRows>(sum, ring, warp, left, releaser());
#pragma unroll
      for (int i = 0; i < kRows / 2; i++) total[i] = total[i] + sum[i];
    }
  }

 private:
  TL_DEVICE_MEMBER auto releaser() const {
    return [this](int slot) {
      if (lane_id() < 1 + kDown) barrier_arrive_at(ring.empty + slot * 8, sender(rank, lane_id()));
    };
  }
};

TL_DEVICE void clear(TileSums &y) {
#pragma unroll
  for (int i = 0; i < kRows / 2; i++) y[i] = 0.0f;
}

// Tile after tile, the end of each under the first products of the next.
template <class W, int kDown, TileEnd kEnd>
TL_DEVICE void multiply_and_end_later(const Consumer<W, kDown> &own, const RowPlace *places_of) {
  using End = TileRegisters<kEnd, W::kInt8>;
  End end(own.a.gemm, own.warp);
  TileSums total, sum;
  clear(total);
  clear(sum);
  typename End::Early early;
  int square = own.first(), left = own.n_blocks;
#pragma unroll 1
  for (int n = 0;; n++) {
    own.add_rest(total, sum, left);
    if (places(kEnd)) sync_threads(2, kConsumers + 32);
    end.begin(own.tile(square), places_of + n % 2 * kRows);
    square += own.step();
    if (square >= own.a.n_squares) break;
    end.load(early, 0);
    own.add_chunk(sum, [&](int j) {
      end.finish(total, early, j);
      if (j + 1 < kEndParts) end.load(early, j + 1);
    });
#pragma unroll
    for (int i = 0; i < kRows / 2; i++) total[i] = 0.0f + sum[i];
    left = own.n_blocks - kChunkBlocks;
  }
  typename End::Early all[kEndParts];
#pragma unroll
  for (int part = 0; part < kEndParts; part++) end.load(all[part], part);
#pragma unroll
  for (int part = 0; part < kEndParts; part++) end.finish(total, all[part], part);
}

// Tile after tile, where most CTAs have one: what is added to the rows comes under the last products.
template <class W, int kDown>
TL_DEVICE void multiply_to_rows(const Consumer<W, kDown> &own) {
  using End = TileRegisters<TileEnd::kRows, W::kInt8>;
  End end(own.a.gemm, own.warp);
  TileSums total, sum;
  clear(sum);
#pragma unroll 1
  for (int square = own.first(); square < own.a.n_squares; square += own.step()) {
    end.begin(own.tile(square), nullptr);
    clear(total);
    const int last = (own.n_blocks - 1) % kChunkBlocks + 1;  // blocks of the last chunk
    own.add_rest(total, sum, own.n_blocks - last);
    typename End::Early early[kEndParts];
#pragma unroll
    for (int part = 0; part < kEndParts; part++) end.load(early[part], part);
    own.add_rest(total, sum, last);
#pragma unroll
    for (int part = 0; part < kEndParts; part++) end.finish(total, early[part], part);
  }
}

template <class W, int kDown>
TL_DEVICE void multiply_by_row(const Consumer<W, kDown> &own, float *sums) {
  float *scratch = sums + kPassBytes / 4;
  TileSums total, sum;
  clear(sum);
#pragma unroll 1
  for (int square = own.first(); square < own.a.n_squares; square += own.step()) {
    clear(total);
    own.add_rest(total, sum, own.n_blocks);
    finish_by_row<W>(own.a.gemm, total, own.tile(square), own.warp, sums, scratch);
  }
}

#endif

template <class W, int kDown, TileEnd kEnd>
__global__ void __launch_bounds__(kCtaThreads, 1) gemm_tiles(const TilesArgs a) {
#if TL_WGMMA
  constexpr int kSenders = 1 + kDown;
  using S = Stage<W, kRows>;
  uint8_t *memory = shared_memory<uint8_t>(), *behind = memory + a.n_stages * S::kBytes + kBarrierBytes;
  const shared_t barriers = shared_of(memory) + a.n_stages * S::kBytes;
  Ring ring{shared_of(memory), barriers, barriers + kMaxStages * 8, a.n_stages, S::kBytes, S::kWeightBytes};
  if (threadIdx.x == 0) {
    for (int s = 0; s < a.n_stages; s++) {
      barrier_init(ring.full + s * 8, 1);
      barrier_init(ring.empty + s * 8, kSenders * kConsumers / 32);
    }
    barrier_init_done();
  }
  cluster_arrive();
  cluster_wait();
  if (a.order != kLeads) let_next_kernel_start();
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0);  // the same for the warp, and known to be
  if (warp >= kConsumers / 32) {
    give_registers<40>();
    if (warp == kConsumers / 32) produce<W, kDown>(a, ring, panel_distance(a.gemm, kEnd));
    if (places(kEnd) && warp == kConsumers / 32 + 1) find_places<kDown>(a, (RowPlace *)behind);
    if (warp > kConsumers / 32) await_input(a);
    __syncwarp();
  } else {
    take_registers<232>();
    await_input(a);
    const Consumer<W, kDown> consumer{a, ring, warp, cluster_rank(), pad16(a.gemm.weight.n_in) / 16};
    if constexpr (kEnd == TileEnd::kRows)
      multiply_to_rows(consumer);
    else if constexpr (kEnd == TileEnd::kByRow)
      multiply_by_row(consumer, (float *)behind);
    else
      multiply_and_end_later<W, kDown, kEnd>(consumer, (const RowPlace *)behind);
  }
  if (a.order == kFollows) wait_for_previous_kernel();
#endif
}

template <class W, TileEnd kEnd>
void launch_ending(const Launcher &launcher, const GemmArgs &args) {
  const int behind = kBarrierBytes + (kEnd == TileEnd::kByRow ? kPassBytes + kScratchBytes : places(kEnd) ? kPlacesBytes : 0);
  const int n_stages = std::min(kMaxStages, (launcher.context.max_shared_nbytes - behind) / Stage<W, kRows>::kBytes);
  const int n_row_tiles = (args.n_rows + kRows - 1) / kRows, n_output_tiles = (args.weight.n_out / kPanelRows + kTilePanels - 1) / kTilePanels;
  const int n_row_pairs = (n_row_tiles + kSide - 1) / kSide, nbytes = n_stages * Stage<W, kRows>::kBytes + behind;
  const auto kernel = [](int down) { return down == 1 ? gemm_tiles<W, 1, kEnd> : gemm_tiles<W, 2, kEnd>; };
  const auto shape = [&](int down, int n_clusters) { return Shape{dim3(n_clusters * kSide * down), kCtaThreads, nbytes, kSide * down}; };
  const auto n_squares = [&](int down) { return n_row_pairs * ((n_output_tiles + down - 1) / down); };
  const auto at_once = [&](int down) { return launcher.clusters_at_once(kernel(down), shape(down, 1)); };
  const auto n_turns = [&](int down) { return (n_squares(down) + at_once(down) - 1) / at_once(down); };
  const auto launch = [&](int down, int n, int order, int first) {
    launcher.launch(kernel(down), shape(down, std::min(n, at_once(down))), TilesArgs{args, n_stages, n_row_pairs, n, order, first});
  };
  // Squares read less, but fewer multiprocessors have room for them. Pairs on the others take a share where that saves a turn, unless so
  // little is to do that the second kernel's start would cost more.
  const int n = n_squares(2), n_pairs_beside = std::max(0, at_once(1) - 2 * at_once(2)), n_at_once = 2 * at_once(2) + n_pairs_beside;
  const int turns = (2 * n + n_at_once - 1) / n_at_once, n_first = turns * at_once(2);
  if (n <= n_first) return launch(2, n, kAlone, 0);
  const bool pays = turns * n_stages_of(args.weight.n_in) >= kStagesOfTwo;
  if (!launcher.context.overlaps || turns > n_turns(1) || !pays)
    return n_turns(2) <= n_turns(1) ? launch(2, n, kAlone, 0) : launch(1, n_squares(1), kAlone, 0);
  launch(2, n_first, kLeads, 0);
  launcher.launch(kernel(1), shape(1, std::min(2 * (n - n_first), n_pairs_beside)),
                  TilesArgs{args, n_stages, n_row_pairs, 2 * (n - n_first), kFollows, n_first});
}

template <class W>
void launch_with(const Launcher &launcher, const GemmArgs &args) {
  switch (tile_end(args)) {
    case TileEnd::kRows: return launch_ending<W, TileEnd::kRows>(launcher, args);
    case TileEnd::kGated: return launch_ending<W, TileEnd::kGated>(launcher, args);
    case TileEnd::kPlaceBf16: return launch_ending<W, TileEnd::kPlaceBf16>(launcher, args);
    case TileEnd::kPlaceF16: return launch_ending<W, TileEnd::kPlaceF16>(launcher, args);
    default: return launch_ending<W, TileEnd::kByRow>(launcher, args);
  }
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
