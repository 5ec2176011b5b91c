// How the tiles of a product are shared out among clusters, and what feeds them: the warp that fills the stages, and one that finds where
// rows go. See gemm_tiles.cu.
#pragma once

#include "tile_registers.cuh"

namespace tl {

constexpr int kRows = kTileRows, kSide = 2;  // two tiles side by side have the same outputs, two below each other the same rows
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
  // This CTA's memory stays until all that use its stages have given them back.
  for (int s = 0; s < ring.n_slots; s++) {
    barrier_wait(ring.empty + ring.slot * 8, ring.parity);
    ring.next();
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

#endif

}  // namespace tl
