// What the products of some batch rows on wgmma share that cut their work evenly over the device (gemm_sums.cu, gemm_gated.cu): tiles times
// K-chunks, of which each CTA takes a run; a ring of stages as deep as shared memory allows, since bytes under way are what hides the way to
// memory; and one lane that asks for them, for weights before the kernel before this one has ended.
#pragma once

#include <algorithm>

#include "gemm_stages.cuh"

namespace tl {

constexpr int kProducers = 2;  // warps that ask for weights; one more asks for rows
constexpr int kSomeThreads = kConsumers + 32 * (kProducers + 1);
constexpr int kWeightSlots = 24, kRowSlots = 6, kSomeBarrierBytes = 2 * (kWeightSlots + kRowSlots) * 8;

struct SomeArgs {
  Matrix weight;
  Operand source;
  int32_t n_rows, tile_panels;
  int32_t n_slots, n_row_slots;
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

// Stages of weights, and of rows: weights may be asked for before rows are there, so that most of shared memory is theirs.
struct SomeRing {
  shared_t memory, full, empty;
  int n_slots, stage_bytes;
  shared_t rows, rows_full, rows_empty;
  int n_row_slots, row_bytes;
  int slot = 0, parity = 0, row_slot = 0, row_parity = 0;
  TL_DEVICE_MEMBER shared_t stage() const { return memory + slot * stage_bytes; }
  TL_DEVICE_MEMBER shared_t row_stage() const { return rows + row_slot * row_bytes; }
  TL_DEVICE_MEMBER void wait() const {
    barrier_wait(full + slot * 8, parity);
    barrier_wait(rows_full + row_slot * 8, row_parity);
  }
  TL_DEVICE_MEMBER void next() {
    if (++slot == n_slots) slot = 0, parity ^= 1;
    if (++row_slot == n_row_slots) row_slot = 0, row_parity ^= 1;
  }
  TL_DEVICE_MEMBER int held() const { return slot | row_slot << 8; }
  TL_DEVICE_MEMBER void release(int held) const {
    if (lane_id()) return;
    barrier_arrive(empty + (held & 255) * 8);
    barrier_arrive(rows_empty + (held >> 8) * 8);
  }
};

// A CTA's stages.
struct Stages {
  int first_tile, first_stage, n;
};
TL_DEVICE Stages stages_of(const SomeArgs &a, const Items &items, int n_chunks) {
  const int n_stages = n_stages_of(a.weight.n_in);
  const auto before = [&](int item) { return item / n_chunks * n_stages + item % n_chunks * kChunkStages; };
  return {items.first / n_chunks, items.first % n_chunks * kChunkStages, before(items.end) - before(items.first)};
}

// A producer's stages, every kProducers-th of the CTA's: where the weights begin.
template <class W>
struct Walk {
  static constexpr int kPanelBytes = kStageBlocks * W::kBlockBytes;
  const SomeArgs &a;
  int n_stages, last_bytes, tile, stage, n_panels;  // last_bytes: of the last stage of a panel
  int64_t panel_bytes;
  const uint8_t *weights;
  TL_DEVICE_MEMBER Walk(const SomeArgs &args, int first_tile, int first_stage) : a(args), tile(first_tile), stage(first_stage) {
    n_stages = n_stages_of(a.weight.n_in);
    panel_bytes = pad16(a.weight.n_in) / 16 * (int64_t)W::kBlockBytes;
    last_bytes = (int)panel_bytes - (n_stages - 1) * kPanelBytes;
    weights = a.weight.data + tile * a.tile_panels * panel_bytes + stage * kPanelBytes;
    settle();
  }
  TL_DEVICE_MEMBER void settle() {
#pragma unroll 1
    while (stage >= n_stages) {
      stage -= n_stages, tile++;
      weights += a.tile_panels * panel_bytes - n_stages * kPanelBytes;
    }
    n_panels = min(a.tile_panels, a.weight.n_out / kPanelRows - tile * a.tile_panels);
  }
  TL_DEVICE_MEMBER void next() {
    stage += kProducers, weights += kProducers * kPanelBytes;
    settle();
  }
  TL_DEVICE_MEMBER int nbytes() const { return stage + 1 < n_stages ? kPanelBytes : last_bytes; }
  TL_DEVICE_MEMBER void request(const SomeRing &ring, int slot, uint64_t policy) const {
    const shared_t full = ring.full + slot * 8;
    shared_t to = ring.memory + slot * ring.stage_bytes;
    const uint8_t *from = weights;
    barrier_arrive_expecting(full, n_panels * nbytes());
#pragma unroll 1
    for (int i = 0; i < n_panels; i++, to += kPanelBytes, from += panel_bytes) copy_bulk(to, from, nbytes(), full, policy);
  }
};

// Weights, by one lane of a producer warp, which has every kProducers-th stage.
template <class W>
TL_DEVICE void produce_weights(const SomeArgs &a, SomeRing ring, const Stages &stages, int producer) {
  Walk<W> walk(a, stages.first_tile, stages.first_stage + producer);
  const uint64_t policy = pass_policy();  // what is read once does not drive out what kernels hand to each other
  ring.slot = producer;
#pragma unroll 1
  for (int s = producer; s < stages.n; s += kProducers, walk.next()) {
    if (s >= ring.n_slots) barrier_wait(ring.empty + ring.slot * 8, ring.parity ^ 1);
    walk.request(ring, ring.slot, policy);
    ring.slot += kProducers;
    if (ring.slot >= ring.n_slots) ring.slot -= ring.n_slots, ring.parity ^= 1;
  }
}

// Rows, by one lane.
TL_DEVICE void produce_rows(const SomeArgs &a, SomeRing ring, const Stages &stages, int nbytes) {
  const int n_stages = n_stages_of(a.weight.n_in);
  const int64_t step = (int64_t)a.source.n_groups * kGroupBytes;
  int stage = stages.first_stage;
  const uint8_t *from = (const uint8_t *)a.source.data + stage * step;
  wait_for_previous_kernel();
#pragma unroll 1
  for (int s = 0; s < stages.n; s++, stage++, from += step) {
    if (stage == n_stages) stage = 0, from = (const uint8_t *)a.source.data;
    if (s >= ring.n_row_slots) barrier_wait(ring.rows_empty + ring.row_slot * 8, ring.row_parity ^ 1);
    const shared_t full = ring.rows_full + ring.row_slot * 8;
    barrier_arrive_expecting(full, nbytes);
    copy_bulk(ring.row_stage(), from, nbytes, full);
    if (++ring.row_slot == ring.n_row_slots) ring.row_slot = 0, ring.row_parity ^= 1;
  }
}

// By the warps behind the consumers.
template <class W, int N>
TL_DEVICE void produce(const SomeArgs &a, const SomeRing &ring, const Items &items, int n_chunks, int producer) {
  if (!elected()) return;
  const Stages stages = stages_of(a, items, n_chunks);
  if (producer == kProducers)
    produce_rows(a, ring, stages, min(N / 8, a.source.n_groups) * kGroupBytes);
  else
    produce_weights<W>(a, ring, stages, producer);
}

// The ring in a CTA's shared memory; by all its threads, who meet.
template <class W, int N>
TL_DEVICE SomeRing begin_ring(const SomeArgs &a) {
  using S = Stage<W, N>;
  SomeRing ring;
  ring.memory = shared_of(shared_memory<uint8_t>());
  ring.n_slots = a.n_slots, ring.stage_bytes = a.tile_panels * S::kPanelBytes;
  ring.rows = ring.memory + ring.n_slots * ring.stage_bytes;
  ring.n_row_slots = a.n_row_slots, ring.row_bytes = S::kRowBytes;
  ring.full = ring.rows + ring.n_row_slots * ring.row_bytes;
  ring.empty = ring.full + kWeightSlots * 8;
  ring.rows_full = ring.empty + kWeightSlots * 8;
  ring.rows_empty = ring.rows_full + kRowSlots * 8;
  if (const int s = threadIdx.x; s < kWeightSlots) {  // a warp's, side by side
    if (s < a.n_slots) barrier_init(ring.full + s * 8, 1), barrier_init(ring.empty + s * 8, kConsumers / 32);
    if (s < a.n_row_slots) barrier_init(ring.rows_full + s * 8, 1), barrier_init(ring.rows_empty + s * 8, kConsumers / 32);
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
#if !defined(TL_SHARED_KB)
#define TL_SHARED_KB 208
#endif
  constexpr int kSharedBytes = TL_SHARED_KB * 1024;  // with room for a CTA of rows beside it
  const int n_panels = a.weight.n_out / kPanelRows, n_chunks = n_chunks_of(a.weight.n_in), n_ctas = context.n_multiprocessors;
  const int unit = a.whole_tiles ? n_chunks : 1;
  const auto n_items = [&](int panels) { return (n_panels + panels - 1) / panels * n_chunks; };
  // Panels' chunks of the busiest CTA, with what a stage costs beside them: its rows, and each item.
  const auto most = [&](int panels) { return (n_items(panels) / unit + n_ctas - 1) / n_ctas * (panels + 2 + N / 16); };
  a.tile_panels = kTilePanels;
  for (int panels = kTilePanels - 2; panels >= 2; panels -= 2)
    if (most(panels) < most(a.tile_panels)) a.tile_panels = panels;
  a.n_items = n_items(a.tile_panels);
  const int stage_bytes = a.tile_panels * S::kPanelBytes, beyond = (kTilePanels - a.tile_panels) * S::kPanelBytes;  // tensor cores read whole tiles
  const int most_stages = (a.n_items / unit + n_ctas - 1) / n_ctas * unit * kChunkStages;  // of a CTA
  a.n_row_slots = std::min(kRowSlots, most_stages);
  const int behind = std::max(a.n_row_slots * S::kRowBytes + kSomeBarrierBytes, beyond);
  a.n_slots = std::min({kWeightSlots, most_stages, (std::min(kSharedBytes, context.max_shared_nbytes) - behind) / stage_bytes});
  return {dim3(std::min(a.n_items / unit, n_ctas)), kSomeThreads, a.n_slots * stage_bytes + behind, 1};
}

}  // namespace tl
