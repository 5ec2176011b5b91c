// What the products of some batch rows on wgmma share that cut their work evenly over the device (gemm_sums.cu, gemm_gated.cu): tiles times
// K-chunks, of which each CTA takes a run; a ring of stages as deep as shared memory allows, since bytes under way are what hides the way to
// memory; and warps of which one lane asks for them, for weights before the kernel before this one has ended.
#pragma once

#include <algorithm>

#include "gemm_stages.cuh"

namespace tl {

constexpr int kProducers = 2;  // warps that ask for weights; one more asks for rows
constexpr int kSomeThreads = kConsumers + 32 * (kProducers + 1);
constexpr int kSomeSlots = 12, kSomeBarrierBytes = 2 * kSomeSlots * 8;

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

// A CTA's stages.
struct Stages {
  int first_tile, first_stage, n;
  int of_tile;
};
TL_DEVICE Stages stages_of(const SomeArgs &a, const Items &items, int n_chunks) {
  const int n_stages = (pad16(a.weight.n_in) + kStageColumns - 1) / kStageColumns;
  const auto before = [&](int item) { return item / n_chunks * n_stages + item % n_chunks * kChunkStages; };
  return {items.first / n_chunks, items.first % n_chunks * kChunkStages, before(items.end) - before(items.first), n_stages};
}

// A producer's stages, every kProducers-th of the CTA's: where the weights begin.
template <class W>
struct Walk {
  static constexpr int kPanelBytes = kStageBlocks * W::kBlockBytes;
  const SomeArgs &a;
  int n_stages, last_bytes, tile, stage, n_panels;  // last_bytes: of the last stage of a panel
  int64_t panel_bytes;
  const uint8_t *weights;
  TL_DEVICE_MEMBER Walk(const SomeArgs &args, const Stages &stages, int producer)
      : a(args), n_stages(stages.of_tile), tile(stages.first_tile), stage(stages.first_stage + producer) {
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
  TL_DEVICE_MEMBER void request(const Ring &ring, int slot, uint64_t policy) const {
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
TL_DEVICE void produce_weights(const SomeArgs &a, Ring ring, const Stages &stages, int producer) {
  Walk<W> walk(a, stages, producer);
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
template <int N>
TL_DEVICE void produce_rows(const SomeArgs &a, Ring ring, const Stages &stages) {
  const int nbytes = min(N / 8, a.source.n_groups) * kGroupBytes;
  const int64_t step = (int64_t)a.source.n_groups * kGroupBytes;
  int stage = stages.first_stage;
  const uint8_t *from = (const uint8_t *)a.source.data + stage * step;
  wait_for_previous_kernel();
#pragma unroll 1
  for (int s = 0; s < stages.n; s++, stage++, from += step, ring.next()) {
    if (stage == stages.of_tile) stage = 0, from = (const uint8_t *)a.source.data;
    const shared_t full = ring.full + ring.slot * 8;
    if (s >= ring.n_slots) barrier_wait(ring.empty + ring.slot * 8, ring.parity ^ 1);
    barrier_arrive_expecting(full, nbytes);
    copy_bulk(ring.stage() + ring.weight_bytes, from, nbytes, full);
  }
}

// By the warps behind the consumers.
template <class W, int N>
TL_DEVICE void produce(const SomeArgs &a, const Ring &ring, const Items &items, int n_chunks, int producer) {
  if (!elected()) return;
  const Stages stages = stages_of(a, items, n_chunks);
  if (producer == kProducers)
    produce_rows<N>(a, ring, stages);
  else
    produce_weights<W>(a, ring, stages, producer);
}

// The ring in a CTA's shared memory; by all its threads, who meet. A stage is full when its weights and its rows are there.
template <class W, int N>
TL_DEVICE Ring begin_ring(const SomeArgs &a) {
  using S = Stage<W, N>;
  const int weight_bytes = a.tile_panels * S::kPanelBytes, stage_bytes = weight_bytes + S::kRowBytes;
  const shared_t memory = shared_of(shared_memory<uint8_t>()), full = memory + a.n_stages * stage_bytes;
  const Ring ring{memory, full, full + kSomeSlots * 8, a.n_stages, stage_bytes, weight_bytes};
  if (const int s = threadIdx.x; s < a.n_stages) {  // side by side
    barrier_init(ring.full + s * 8, 2);
    barrier_init(ring.empty + s * 8, kConsumers / 32);
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
  constexpr int kSharedBytes = 200 * 1024;  // with room for a CTA of rows beside it
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
  const int beyond = kSomeBarrierBytes + (kTilePanels - a.tile_panels) * S::kPanelBytes;  // of the last stage the tensor cores read whole tiles
  const int most_stages = (a.n_items / unit + n_ctas - 1) / n_ctas * unit * kChunkStages;  // of a CTA
  a.n_stages = std::min({kSomeSlots, most_stages, (std::min(kSharedBytes, context.max_shared_nbytes) - beyond) / stage_bytes});
  return {dim3(std::min(a.n_items / unit, n_ctas)), kSomeThreads, a.n_stages * stage_bytes + beyond, 1};
}

// Launches a product's kernel for its weights and rows. Product: Args, whose `some` is cut here, and the kernels that take them.
template <class Product, class W, int N>
void launch_cut(const Launcher &launcher, typename Product::Args args) {
  const Shape shape = cut_some<W, N>(launcher.context, args.some);
  launcher.launch(Product::template kernel<W, N>, shape, args);
}
template <class Product, class W>
void launch_rows_of(const Launcher &launcher, const typename Product::Args &args) {
  if (args.some.n_rows <= 16) return launch_cut<Product, W, 16>(launcher, args);
  if (args.some.n_rows <= 32) return launch_cut<Product, W, 32>(launcher, args);
  if (args.some.n_rows <= 64) return launch_cut<Product, W, 64>(launcher, args);
  return launch_cut<Product, W, 128>(launcher, args);
}
template <class Product>
void launch_some(const Launcher &launcher, const typename Product::Args &args) {
  switch (args.some.weight.dtype) {
    case TL_BF16: return launch_rows_of<Product, FloatWeights<Bf16>>(launcher, args);
    case TL_F16: return launch_rows_of<Product, FloatWeights<F16>>(launcher, args);
    default: return launch_rows_of<Product, Int8Weights>(launcher, args);
  }
}

}  // namespace tl
