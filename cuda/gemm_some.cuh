// What the products of some batch rows on wgmma share that cut their work evenly over the device (gemm_sums.cu, gemm_gated.cu): tiles times
// K-chunks, of which each CTA takes a run; a ring of stages as deep as shared memory allows, since bytes under way are what hides the way to
// memory; and one lane that asks for them, for weights before the kernel before this one has ended.
#pragma once

#include <algorithm>

#include "gemm_stages.cuh"

namespace tl {

constexpr int kSomeThreads = kConsumers + 32;

struct SomeArgs {
  Matrix weight;
  Operand source;
  int32_t n_rows, n_stages, tile_panels;
  int32_t n_items;  // tiles times chunks
  int32_t whole_tiles;  // a CTA takes all chunks of its tiles
};

// The items of a CTA: chunk after chunk, tile after tile.
struct Items {
  int first, end;
};
TL_DEVICE Items items_of(const SomeArgs &a, int n_chunks, int cta, int n_ctas) {
  const int unit = a.whole_tiles ? n_chunks : 1, n = a.n_items / unit;
  return {(int)((int64_t)n * cta / n_ctas) * unit, (int)((int64_t)n * (cta + 1) / n_ctas) * unit};
}

#if TL_WGMMA

// The stages of a matrix, tile after tile.
template <class W>
struct Walk {
  const SomeArgs &a;
  int n_stages, tile, stage;
  int64_t panel_bytes, row_step;
  StageSource from;
  TL_DEVICE_MEMBER Walk(const SomeArgs &args, int N, int first_tile, int first_stage) : a(args), tile(first_tile), stage(first_stage) {
    n_stages = (pad16(a.weight.n_in) + kStageColumns - 1) / kStageColumns;
    panel_bytes = pad16(a.weight.n_in) / 16 * (int64_t)W::kBlockBytes;
    row_step = (int64_t)a.source.n_groups * kGroupBytes;
    from.panel_bytes = panel_bytes;
    from.row_bytes = min(N / 8, a.source.n_groups) * kGroupBytes;
    find();
  }
  TL_DEVICE_MEMBER void find() {
    constexpr int kPanelBytes = kStageBlocks * W::kBlockBytes;
    from.weights = a.weight.data + tile * a.tile_panels * panel_bytes + stage * kPanelBytes;
    from.rows = (const uint8_t *)a.source.data + stage * row_step;
    from.n_panels = min(a.tile_panels, a.weight.n_out / kPanelRows - tile * a.tile_panels);
    from.weight_bytes = min((int)panel_bytes - stage * kPanelBytes, kPanelBytes);
  }
  TL_DEVICE_MEMBER void next() {
    if (++stage == n_stages) stage = 0, tile++;
    find();
  }
};

// By one lane of the producer warp.
template <class W, int N>
TL_DEVICE void produce(const SomeArgs &a, Ring ring, const Items &items, int n_chunks) {
  Walk<W> walk(a, N, items.first / n_chunks, items.first % n_chunks * kChunkStages), rows = walk;
  const auto before = [&](int item) { return item / n_chunks * walk.n_stages + item % n_chunks * kChunkStages; };
  const int n = before(items.end) - before(items.first), n_early = min(ring.n_slots, n);
#pragma unroll 1
  for (int s = 0; s < n_early; s++, walk.next()) request_weights<W>(ring, walk.from, s);
  wait_for_previous_kernel();
#pragma unroll 1
  for (int s = 0; s < n_early; s++, rows.next()) request_rows(ring, rows.from, s);
#pragma unroll 1
  for (int s = n_early; s < n; s++, walk.next()) {
    barrier_wait(ring.empty + ring.slot * 8, ring.parity);
    request_weights<W>(ring, walk.from, ring.slot);
    request_rows(ring, walk.from, ring.slot);
    ring.next();
  }
}

// The ring in a CTA's shared memory; by all its threads, who meet.
template <class W, int N>
TL_DEVICE Ring begin_ring(const SomeArgs &a) {
  using S = Stage<W, N>;
  const int weight_bytes = a.tile_panels * S::kPanelBytes, stage_bytes = weight_bytes + S::kRowBytes;
  const shared_t memory = shared_of(shared_memory<uint8_t>()), barriers = memory + a.n_stages * stage_bytes;
  const Ring ring{memory, barriers, barriers + kMaxStages * 8, a.n_stages, stage_bytes, weight_bytes};
  if (threadIdx.x == 0) {
    for (int s = 0; s < a.n_stages; s++) {
      barrier_init(ring.full + s * 8, 1);
      barrier_init(ring.empty + s * 8, kConsumers / 32);
    }
    barrier_init_done();
  }
  __syncthreads();
  return ring;
}

#endif

// Cuts a product: panels of a tile, stages, and the launch's shape.
template <class W, int N>
Shape cut_some(const tl_context &context, SomeArgs &a) {
  using S = Stage<W, N>;
  constexpr int kSharedBytes = 160 * 1024;  // with room for a CTA of attention beside it
  const int n_panels = a.weight.n_out / kPanelRows, n_chunks = n_chunks_of(a.weight.n_in), n_ctas = context.n_multiprocessors;
  const int unit = a.whole_tiles ? n_chunks : 1;
  const auto n_items = [&](int panels) { return (n_panels + panels - 1) / panels * n_chunks; };
  // Panels' chunks of the busiest CTA, with what a stage costs beside them: its rows, and each item.
  const auto most = [&](int panels) { return (n_items(panels) / unit + n_ctas - 1) / n_ctas * (panels + 2 + N / 16); };
  a.tile_panels = kTilePanels;
  for (int panels = kTilePanels - 2; panels >= 2; panels -= 2)
    if (most(panels) < most(a.tile_panels)) a.tile_panels = panels;
  a.n_items = n_items(a.tile_panels);
  const int stage_bytes = a.tile_panels * S::kPanelBytes + S::kRowBytes;
  const int beyond = kBarrierBytes + (kTilePanels - a.tile_panels) * S::kPanelBytes;  // of the last stage the tensor cores read whole tiles
  const int most_stages = (a.n_items / unit + n_ctas - 1) / n_ctas * unit * kChunkStages;  // of a CTA
  a.n_stages = std::min({kMaxStages, most_stages, (std::min(kSharedBytes, context.max_shared_nbytes) - beyond) / stage_bytes});
  return {dim3(std::min(a.n_items / unit, n_ctas)), kSomeThreads, a.n_stages * stage_bytes + beyond, 1};
}

}  // namespace tl
