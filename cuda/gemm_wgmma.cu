// Matrix product for some batch rows on wgmma: 128 outputs x 16, 32 or 64 rows a CTA. Fused: int8 scales, bias and the epilogue.
//
// The weights' bytes are the cost, so two CTAs fit a multiprocessor: those of the next product begin to read its weights while
// the last sums of this one are still merged. A producer warp keeps a ring of stages full; two consumer warpgroups sum. Where
// tiles are too few for the device, a cluster shares out a tile's K-chunks: every CTA sends the sums of each of its chunks to
// those that finish the rows, row by row. Either way every chunk of TL_K_CHUNK columns is summed from zero and the sums are added in
// index order, with the bits of gemv.cu. Many rows: gemm_tiles.cu.
#include <algorithm>

#include "gemm_stages.cuh"

namespace tl {
namespace {

constexpr int kCtaThreads = kConsumers + 32;
constexpr int kMaxCluster = 8;
constexpr int kFewestStages = 3;  // a stage is held while the next one is begun

struct WgmmaArgs {
  GemmArgs gemm;
  int32_t n_stages;     // of the ring
  int32_t tile_panels;  // kTilePanels, or fewer, an even number
};

// Floats between rows of chunk sums: a warp's stores meet every bank once.
TL_BOTH int row_floats(int n_chunks) { return n_chunks * kTileOutputs + 4; }

#if TL_WGMMA

constexpr int kReads = 8;  // chunk sums that a thread reads at a time

// The K-chunks that a CTA of the cluster sums.
struct Chunks {
  int first, end;
};
TL_DEVICE Chunks chunks_of(int n_chunks, int rank, int n_ctas) { return {n_chunks * rank / n_ctas, n_chunks * (rank + 1) / n_ctas}; }

// One lane of the producer warp requests the stages first .. end - 1. What may be read before the kernel before this one has ended, the
// weights, is asked for first.
template <class W, int N>
TL_DEVICE void produce(const GemmArgs &g, Ring ring, int first_panel, int tile_panels, int first_group, int first, int end) {
  using S = Stage<W, N>;
  const int panel_bytes = pad16(g.weight.n_in) / 16 * W::kBlockBytes;
  const int64_t row_step = (int64_t)g.source.n_groups * kGroupBytes;
  StageSource from;
  from.panel_bytes = panel_bytes;
  from.n_panels = min(tile_panels, g.weight.n_out / kPanelRows - first_panel);
  from.row_bytes = min(N / 8, g.source.n_groups - first_group) * kGroupBytes;
  const auto find = [&](int stage) {
    from.weights = g.weight.data + (int64_t)first_panel * panel_bytes + stage * S::kPanelBytes;
    from.weight_bytes = min(S::kPanelBytes, panel_bytes - stage * S::kPanelBytes);
    from.rows = (const uint8_t *)g.source.data + (int64_t)first_group * kGroupBytes + stage * row_step;
  };
  const int n_early = min(ring.n_slots, end - first);
#pragma unroll 1
  for (int s = 0; s < n_early; s++) {
    find(first + s);
    request_weights<W>(ring, from, s);
  }
  wait_for_previous_kernel();
#pragma unroll 1
  for (int s = 0; s < n_early; s++) {
    find(first + s);
    request_rows(ring, from, s);
  }
#pragma unroll 1
  for (int s = first + n_early; s < end; s++) {
    barrier_wait(ring.empty + ring.slot * 8, ring.parity);
    find(s);
    request_weights<W>(ring, from, ring.slot);
    request_rows(ring, from, ring.slot);
    ring.next();
  }
}

// A consumer thread's sums of a chunk, of the rows that exist, to the CTAs that finish them; `sums` is where each of these
// collects them.
template <int N>
TL_DEVICE void send_sums(float *sums, const float (&sum)[N / 2], int warp, int chunk, int n_chunks, int n_ctas, int n_rows) {
  const int n_each = N / n_ctas, first = chunk * kTileOutputs + output_of(warp, 0);
#pragma unroll
  for (int i = 0; i < N / 2; i += i % 2 ? 3 : 1) {
    const int row = row_of(i);
    if (row >= n_rows) continue;
    float *to = const_cast<float *>(of_cluster_rank(sums, row / n_each)) + row % n_each * row_floats(n_chunks) + first;
    to[0] = sum[i];
    to[kPanelRows] = sum[i + 2];
  }
}

// Four outputs of a row: the sums of all chunks in index order.
TL_DEVICE float4 add_chunks(const float *sums, int n_chunks) {
  float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int first = 0; first < n_chunks; first += kReads) {
    float4 q[kReads];
#pragma unroll
    for (int i = 0; i < kReads; i++)
      if (first + i < n_chunks) q[i] = *(const float4 *)(sums + (first + i) * kTileOutputs);
#pragma unroll
    for (int i = 0; i < kReads; i++)
      if (first + i < n_chunks) y = make_float4(y.x + q[i].x, y.y + q[i].y, y.z + q[i].z, y.w + q[i].w);
  }
  return y;
}

#endif

template <class W, int N>
__global__ void __launch_bounds__(kCtaThreads, 2) gemm_wgmma(const WgmmaArgs a) {
#if TL_WGMMA
  using S = Stage<W, N>;
  const GemmArgs &g = a.gemm;
  uint8_t *memory = shared_memory<uint8_t>();
  const int weight_bytes = a.tile_panels * S::kPanelBytes, stage_bytes = weight_bytes + S::kRowBytes;
  const shared_t barriers = shared_of(memory) + a.n_stages * stage_bytes;
  Ring ring{shared_of(memory), barriers, barriers + kMaxStages * 8, a.n_stages, stage_bytes, weight_bytes};
  const int n_ctas = cluster_size(), rank = cluster_rank(), first_row = blockIdx.x / n_ctas * N;
  const int first_panel = blockIdx.y * a.tile_panels;
  const int n_blocks = pad16(g.weight.n_in) / 16, n_chunks = (n_blocks + kChunkBlocks - 1) / kChunkBlocks;
  const Chunks chunks = chunks_of(n_chunks, rank, n_ctas);
  float *sums = n_ctas == 1 ? (float *)memory : (float *)(memory + a.n_stages * stage_bytes + kBarrierBytes);  // alone: when the ring has been read
  const int n_each = N / n_ctas;  // rows that a CTA finishes
  float *scratch = sums + (n_ctas == 1 ? N * kSumStride : n_each * row_floats(n_chunks));
  if (threadIdx.x == 0) {
    for (int s = 0; s < a.n_stages; s++) {
      barrier_init(ring.full + s * 8, 1);
      barrier_init(ring.empty + s * 8, kConsumers / 32);
    }
    barrier_init_done();
  }
  __syncthreads();
  let_next_kernel_start();
  if (n_ctas > 1) cluster_arrive();
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0);  // the same for the warp, and known to be
  if (warp == kConsumers / 32) {
    const int end_stage = min(chunks.end * kChunkStages, (n_blocks + kStageBlocks - 1) / kStageBlocks);
    if (elected()) produce<W, N>(g, ring, first_panel, a.tile_panels, first_row / 8, chunks.first * kChunkStages, end_stage);
    if (n_ctas == 1) return;
    __syncwarp();
    cluster_wait();
    cluster_sync();
    return;
  }
  const auto release = [&](int slot) {
    if (lane_id() == 0) barrier_arrive(ring.empty + slot * 8);
  };
  float total[N / 2], sum[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) total[i] = sum[i] = 0.0f;
#pragma unroll 1
  for (int c = chunks.first; c < chunks.end; c++) {
    const int left = n_blocks - c * kChunkBlocks;
    if (left >= kChunkBlocks)
      sum_chunk<W, N>(sum, ring, warp, release);
    else
      sum_short_chunk<W, N>(sum, ring, warp, left, release);
    if (n_ctas == 1) {
#pragma unroll
      for (int i = 0; i < N / 2; i++) total[i] = total[i] + sum[i];
    } else {
      if (c == chunks.first) cluster_wait();
      send_sums<N>(sums, sum, warp, c, n_chunks, n_ctas, g.n_rows - first_row);
    }
  }
  wait_for_previous_kernel();
  if (n_ctas == 1) {
    sync_threads(1, kConsumers);  // the ring has been read
    leave_sums<N>(sums, total, warp);
    sync_threads(1, kConsumers);
  } else {
    cluster_sync();
  }
  const int begin = n_each * rank, end = min(begin + n_each, g.n_rows - first_row);
  const TileRows<W::kInt8> rows{g, first_panel, a.tile_panels, first_row, begin + warp, end, kConsumers / 32, scratch + warp * kMaxHeadDim};
  rows.finish([&](int row) {
    if (n_ctas == 1) return *(const float4 *)(sums + row * kSumStride + lane_id() * 4);
    return add_chunks(sums + (row - begin) * row_floats(n_chunks) + lane_id() * 4, n_chunks);
  });
#endif
}

// How a product is cut: panels of a tile, CTAs of a cluster, and what each keeps in shared memory.
struct Cut {
  int tile_panels, cluster, n_stages, nbytes;
};

int n_tiles_of(const GemmArgs &args, int tile_panels) { return (args.weight.n_out / kPanelRows + tile_panels - 1) / tile_panels; }

template <class W, int N>
Cut cut_of(const tl_context &context, const GemmArgs &args, int n_row_tiles) {
  using S = Stage<W, N>;
  constexpr int kSumBytes = N * kSumStride * 4;
  const int n_chunks = n_chunks_of(args.weight.n_in), scratch = args.epilogue.kind == kPlace ? kConsumers / 32 * kMaxHeadDim * 4 : 0;
  const int half = context.max_shared_nbytes / 2 - 1024;  // so that two CTAs share a multiprocessor
  Cut best{};
  float least = 0.0f;
  const auto consider = [&](int tile_panels, int c) {
    const int stage_bytes = tile_panels * S::kPanelBytes + S::kRowBytes, most_chunks = (n_chunks + c - 1) / c;
    const int behind = kBarrierBytes + (c == 1 ? 0 : N / c * row_floats(n_chunks) * 4 + scratch);
    const int beyond = (kTilePanels - tile_panels) * S::kPanelBytes;  // of the last stage the tensor cores read whole tiles
    const int most = (behind + beyond + kFewestStages * stage_bytes <= half ? half : context.max_shared_nbytes) - behind - beyond;
    const int n_stages = std::min(kMaxStages, most / stage_bytes);
    if (n_stages < kFewestStages) return;
    // Chunks of whole tiles that the busiest multiprocessor sums, with what a CTA costs beside its chunks, and a wider cluster.
    const int n_each = (n_row_tiles * n_tiles_of(args, tile_panels) * c + context.n_multiprocessors - 1) / context.n_multiprocessors;
    const float cost = n_each * (most_chunks * (float)tile_panels / kTilePanels + 0.75f) + 0.2f * c;
    if (best.cluster && cost >= least) return;
    best = {tile_panels, c, n_stages, std::max(n_stages * stage_bytes + behind + beyond, kSumBytes + scratch)};
    least = cost;
  };
  for (int c = 1; c <= std::min(kMaxCluster, n_chunks); c *= 2) consider(kTilePanels, c);
  for (int panels = kTilePanels - 2; panels && args.epilogue.kind != kPlace; panels -= 2) consider(panels, 1);  // heads are not cut
  if (!best.cluster) throw std::length_error("a product needs more shared memory than this device has");
  return best;
}

template <class W, int N>
void launch_tile(const Launcher &launcher, const GemmArgs &args) {
  const int n_row_tiles = (args.n_rows + N - 1) / N;
  const Cut cut = cut_of<W, N>(launcher.context, args, n_row_tiles);
  launcher.launch(gemm_wgmma<W, N>, Shape{dim3(n_row_tiles * cut.cluster, n_tiles_of(args, cut.tile_panels)), kCtaThreads, cut.nbytes, cut.cluster},
                  WgmmaArgs{args, cut.n_stages, cut.tile_panels});
}

template <class W>
void launch_with(const Launcher &launcher, const GemmArgs &args) {
  if (args.n_rows <= 16) return launch_tile<W, 16>(launcher, args);
  if (args.n_rows <= 32) return launch_tile<W, 32>(launcher, args);
  return launch_tile<W, 64>(launcher, args);
}

}  // namespace

void launch_gemm_wgmma(const Launcher &launcher, const GemmArgs &args) {
  if (gemm_takes_tiles(launcher.context, args)) return launch_gemm_tiles(launcher, args);
  if (gemm_takes_gates(args)) return launch_gemm_gated(launcher, args);
  switch (args.weight.dtype) {
    case TL_BF16: return launch_with<FloatWeights<Bf16>>(launcher, args);
    case TL_F16: return launch_with<FloatWeights<F16>>(launcher, args);
    default: return launch_with<Int8Weights>(launcher, args);
  }
}

}  // namespace tl
