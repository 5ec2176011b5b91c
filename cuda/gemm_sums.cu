// Matrix product for some batch rows on wgmma whose chunks' sums go to memory as they are: the kernel after it adds them up, in index
// order (sums.cuh), where it reads whole rows or heads anyway.
//
// So no CTA waits for another, and any cut of the work will do: tiles times K-chunks, an even share to every multiprocessor. The
// rest is as in gemm_wgmma.cu, whose bits these are: a producer warp keeps a ring of stages full and asks for weights before the kernel
// before this one has ended; two CTAs fit a multiprocessor, so that one fills its ring while the other still works.
#include <algorithm>

#include "gemm_stages.cuh"

namespace tl {
namespace {

constexpr int kCtaThreads = kConsumers + 32;

struct SumsArgs {
  Matrix weight;
  Operand source;
  float *sums;  // (n_chunks, n_rows, n_out)
  int32_t n_rows, n_stages, tile_panels;
  int32_t n_items;  // tiles times chunks
};

// The items of a CTA: chunk after chunk, tile after tile.
struct Items {
  int first, end;
};
TL_BOTH Items items_of(int n_items, int cta, int n_ctas) {
  return {(int)((int64_t)n_items * cta / n_ctas), (int)((int64_t)n_items * (cta + 1) / n_ctas)};
}

#if TL_WGMMA

// The stages of a matrix, tile after tile.
template <class W>
struct Walk {
  const SumsArgs &a;
  int n_stages, tile, stage;
  int64_t panel_bytes, row_step;
  StageSource from;
  TL_DEVICE_MEMBER Walk(const SumsArgs &args, int N, int first_tile, int first_stage) : a(args), tile(first_tile), stage(first_stage) {
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
TL_DEVICE void produce(const SumsArgs &a, Ring ring, const Items &items, int n_chunks) {
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

// A consumer thread's sums of a chunk, of the outputs and rows that exist.
template <int N>
TL_DEVICE void leave_sums(const SumsArgs &a, const float (&sum)[N / 2], int warp, int tile, int chunk) {
  const int first = tile * a.tile_panels * kPanelRows, end = min(a.tile_panels * kPanelRows, a.weight.n_out - first), output = output_of(warp, 0);
  float *to = a.sums + (int64_t)chunk * a.n_rows * a.weight.n_out + first + output;
  const bool exists[2] = {output < end, output + kPanelRows < end};
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    const int row = row_of(i);
    if (row < a.n_rows && exists[i % 4 / 2]) to[row * a.weight.n_out + i % 4 / 2 * kPanelRows] = sum[i];
  }
}

#endif

template <class W, int N>
__global__ void __launch_bounds__(kCtaThreads, 2) gemm_sums(const SumsArgs a) {
#if TL_WGMMA
  using S = Stage<W, N>;
  const int weight_bytes = a.tile_panels * S::kPanelBytes, stage_bytes = weight_bytes + S::kRowBytes;
  const shared_t memory = shared_of(shared_memory<uint8_t>()), barriers = memory + a.n_stages * stage_bytes;
  Ring ring{memory, barriers, barriers + kMaxStages * 8, a.n_stages, stage_bytes, weight_bytes};
  const int n_blocks = pad16(a.weight.n_in) / 16, n_chunks = (n_blocks + kChunkBlocks - 1) / kChunkBlocks;
  const Items items = items_of(a.n_items, blockIdx.x, gridDim.x);
  if (threadIdx.x == 0) {
    for (int s = 0; s < a.n_stages; s++) {
      barrier_init(ring.full + s * 8, 1);
      barrier_init(ring.empty + s * 8, kConsumers / 32);
    }
    barrier_init_done();
  }
  __syncthreads();
  let_next_kernel_start();
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0);  // the same for the warp, and known to be
  if (warp == kConsumers / 32) {
    if (elected()) produce<W, N>(a, ring, items, n_chunks);
    return;
  }
  const auto release = [&](int slot) {
    if (lane_id() == 0) barrier_arrive(ring.empty + slot * 8);
  };
  wait_for_previous_kernel();  // what was in memory has been read
  float sum[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) sum[i] = 0.0f;
  int tile = items.first / n_chunks, chunk = items.first % n_chunks;
#pragma unroll 1
  for (int item = items.first; item < items.end; item++) {
    const int left = n_blocks - chunk * kChunkBlocks;
    if (left >= kChunkBlocks)
      sum_chunk<W, N>(sum, ring, warp, release);
    else
      sum_short_chunk<W, N>(sum, ring, warp, left, release);
    leave_sums<N>(a, sum, warp, tile, chunk);
    if (++chunk == n_chunks) chunk = 0, tile++;
  }
#endif
}

template <class W, int N>
void launch_tile(const Launcher &launcher, SumsArgs a) {
  using S = Stage<W, N>;
  const int n_panels = a.weight.n_out / kPanelRows, n_chunks = n_chunks_of(a.weight.n_in), n_ctas = launcher.context.n_multiprocessors;
  const auto n_items = [&](int panels) { return (n_panels + panels - 1) / panels * n_chunks; };
  // Panels' chunks of the busiest CTA, with what a stage costs beside them: its rows, and each item.
  const auto most = [&](int panels) { return (n_items(panels) + n_ctas - 1) / n_ctas * (panels + 2 + N / 16); };
  a.tile_panels = kTilePanels;
  for (int panels = kTilePanels / 2; panels >= 2; panels /= 2)
    if (most(panels) < most(a.tile_panels)) a.tile_panels = panels;
  a.n_items = n_items(a.tile_panels);
  const int stage_bytes = a.tile_panels * S::kPanelBytes + S::kRowBytes;
  const int beyond = kBarrierBytes + (kTilePanels - a.tile_panels) * S::kPanelBytes;  // of the last stage the tensor cores read whole tiles
  a.n_stages = std::min(kMaxStages, (launcher.context.max_shared_nbytes / 2 - 1024 - beyond) / stage_bytes);
  launcher.launch(gemm_sums<W, N>, Shape{dim3(std::min(a.n_items, n_ctas)), kCtaThreads, a.n_stages * stage_bytes + beyond, 1}, a);
}

template <class W>
void launch_with(const Launcher &launcher, const SumsArgs &args) {
  if (args.n_rows <= 16) return launch_tile<W, 16>(launcher, args);
  if (args.n_rows <= 32) return launch_tile<W, 32>(launcher, args);
  return launch_tile<W, 64>(launcher, args);
}

}  // namespace

bool gemm_leaves_sums(const tl_context &context, const Matrix &weight, int n_rows) {
  return n_rows <= kMaxSumRows && gemm_takes_wgmma(context, weight);
}

ChunkSums launch_gemm_sums(const Launcher &launcher, const Matrix &weight, const float *bias, int n_rows, const Operand &source, float *sums) {
  const SumsArgs args{weight, source, sums, n_rows, 0, 0, 0};
  switch (weight.dtype) {
    case TL_BF16: launch_with<FloatWeights<Bf16>>(launcher, args); break;
    case TL_F16: launch_with<FloatWeights<F16>>(launcher, args); break;
    default: launch_with<Int8Weights>(launcher, args);
  }
  return {sums, n_chunks_of(weight.n_in), n_rows, weight.n_out, weight.scales, bias};
}

}  // namespace tl
