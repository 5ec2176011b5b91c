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

#include "tile_registers.cuh"

namespace tl {
namespace {

constexpr int kRows = kTileRows, kSide = 2;  // two tiles side by side have the same outputs, two below each other the same rows
constexpr int kCtaThreads = kConsumers + 128;  // the producer's warpgroup gives its registers to the others
constexpr int kStagesOfTwo = 64;               // that each CTA multiplies, from which on two kernels share a product
constexpr int kPassRows = 64;                  // of an epilogue by rows
constexpr int kScratchBytes = kConsumers / 32 * kMaxHeadDim * 4, kPassBytes = kPassRows * kSumStride * 4;
constexpr int kPlacesBytes = 2 * kRows * (int)sizeof(RowPlace);  // of a tile's rows, and the next one's

enum Order { kAlone, kLeads, kFollows };  // of kernels that share a product

struct TilesArgs {
  GemmArgs gemm;
  int32_t n_stages;                // of the ring
  int32_t n_row_pairs, n_squares;  // the tiles of a cluster are a square, or a pair: those side by side, and all
  int32_t order, first_square;     // kFollows: pairs are the halves of squares, from this one on
};

#if TL_WGMMA

// A CTA's tile of a square; kDown: how many are below each other.
template <int kDown>
TL_DEVICE Tile tile_of(const TilesArgs &a, int square, int rank) {
  if (kDown == 1 && a.order == kFollows) return tile_of<2>(a, a.first_square + square / kSide, square % kSide * kSide + rank);
  return {(square / a.n_row_pairs * kDown + rank / kSide) * kTilePanels, (square % a.n_row_pairs * kSide + rank % kSide) * kRows};
}
// Who shares a CTA's weights, and its rows: bits of ranks. Who fills its stages: itself, and these.
TL_DEVICE uint32_t same_weights(int rank) { return 3u << rank / kSide * kSide; }
template <int kDown>
TL_DEVICE uint32_t same_rows(int rank) {
  return (kDown == 1 ? 1u : 5u) << rank % kSide;
}
TL_DEVICE int sender(int rank, int i) { return i == 0 ? rank : i == 1 ? rank ^ 1 : rank ^ kSide; }

// After it, what earlier kernels wrote may be read.
TL_DEVICE void await_input(const TilesArgs &a) {
  if (a.order == kFollows) return;
  wait_for_previous_kernel();
  if (a.order == kLeads) let_next_kernel_start();
}

// The producer warp: lanes 0..3 their half of the panels, lane 4 its share of the rows, for all CTAs that multiply them. The
// weights of the first stages do not wait for the kernel before this one.
template <class W, int kDown>
TL_DEVICE void produce(const TilesArgs &a, Ring ring, int distance) {
  using S = Stage<W, kRows>;
  constexpr int kOwnPanels = kTilePanels / kSide, kCluster = kSide * kDown;
  const GemmArgs &g = a.gemm;
  const int rank = cluster_rank(), lane = lane_id(), n_stages = (pad16(g.weight.n_in) + kStageColumns - 1) / kStageColumns;
  const int64_t panel_bytes = panel_nbytes(g.weight.dtype, g.weight.n_in), row_step = (int64_t)g.source.n_groups * kGroupBytes;
  const int own_panel = rank % kSide * kOwnPanels + lane, own_place = panel_place(own_panel, distance) * S::kPanelBytes;
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
        copy_bulk_to(ring.memory + slot * S::kBytes + own_place, weights + (int64_t)stage * S::kPanelBytes, nbytes, ring.full + slot * 8,
                     same_weights(rank));
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
      await_input(a);
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

// What a tile's end needs to know of its rows, by a warp of its own that is one tile ahead of the products. A place is read before the
// consumers meet this warp for the tile after the next one.
template <int kDown>
TL_DEVICE void find_places(const TilesArgs &a, RowPlace *places) {
  constexpr int kCluster = kSide * kDown;
  const Rows &rows = a.gemm.place.rows;
  const int rank = cluster_rank();
#pragma unroll 1
  for (int square = blockIdx.x / kCluster, n = 0; square < a.n_squares; square += gridDim.x / kCluster, n++) {
    const int first_row = tile_of<kDown>(a, square, rank).first_row;
    int pos[kRows / 32], page[kRows / 32];
#pragma unroll
    for (int i = 0; i < kRows / 32; i++) {
      const int row = first_row + lane_id() + i * 32;
      pos[i] = row < a.gemm.n_rows ? rows.pos[row] : -1;
    }
#pragma unroll
    for (int i = 0; i < kRows / 32; i++) page[i] = pos[i] < 0 ? -1 : page_of(rows, rows.seq[first_row + lane_id() + i * 32], pos[i]);
#pragma unroll
    for (int i = 0; i < kRows / 32; i++) places[n % 2 * kRows + lane_id() + i * 32] = {pos[i], page[i]};
    sync_threads(2, kConsumers + 32);
  }
}

// The end of a tile row by row, through shared memory.
template <class W>
TL_DEVICE void finish_by_row(const GemmArgs &g, const TileSums &total, Tile tile, int warp, float *sums, float *scratch) {
#pragma unroll
  for (int first = 0; first < kRows; first += kPassRows) {
    sync_threads(1, kConsumers);
    leave_sums<kRows, kPassRows>(sums, total, warp, first);
    sync_threads(1, kConsumers);
    const int end = min(kPassRows, g.n_rows - tile.first_row - first);
    const TileRows<W::kInt8> rows{g, tile.first_panel, tile.first_row + first, warp, end, kConsumers / 32, scratch + warp * kMaxHeadDim};
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
  Ring ring{shared_of(memory), barriers, barriers + kMaxStages * 8, a.n_stages};
  if (threadIdx.x == 0) {
    for (int s = 0; s < a.n_stages; s++) {
      barrier_init(ring.full + s * 8, 1);
      barrier_init(ring.empty + s * 8, kSenders * kConsumers / 32);
    }
    barrier_init_done();
  }
  cluster_sync();
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
  cluster_sync();  // no CTA leaves while another fills its stages or gives some back
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
