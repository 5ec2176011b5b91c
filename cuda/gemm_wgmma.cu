// Matrix product for many batch rows on wgmma: 128 outputs x 32, 64 or 128 rows a CTA, weights in registers as the left
// operand, float32 accumulators. Fused: int8 scales, bias and the epilogue.
//
// A producer warp keeps a ring of 64-column stages full by bulk copies; two consumer warpgroups each own 64 outputs. Their
// sums go to shared memory, row by row, and from there to where they belong. Where tiles are too few for the device, a
// cluster shares out a tile's K-chunks: every CTA leaves the sums of each of its chunks, then each finishes some rows.
// Either way every chunk of TL_K_CHUNK columns is summed from zero and the sums are added in index order, with the bits of
// gemv.cu.
#include <algorithm>

#include "gemm.cuh"
#include "tile_epilogue.cuh"
#include "weights.cuh"
#include "wgmma.cuh"

namespace tl {
namespace {

constexpr int kTilePanels = 8;  // 128 outputs
constexpr int kConsumers = 256, kCtaThreads = kConsumers + 128;  // the producer's warpgroup gives its registers to the others
constexpr int kStageColumns = 64, kStageBlocks = kStageColumns / 16;
constexpr int kGroupBytes = kStageColumns * 8 * 2;  // eight batch rows of a stage
constexpr int kMaxStages = 8, kMaxCluster = 8, kBarrierBytes = 2 * kMaxStages * 8;
constexpr int kSumStride = kTileOutputs + 4;  // floats between rows of sums: a warp's stores meet every bank once

struct WgmmaArgs {
  GemmArgs gemm;
  int32_t n_stages;     // of the ring
  int32_t most_chunks;  // of a CTA, where a cluster shares them out
};

template <class W, int N>
struct Stage {
  static constexpr int kPanelBytes = kStageBlocks * W::kBlockBytes;
  static constexpr int kWeightBytes = kTilePanels * kPanelBytes;
  static constexpr int kBytes = kWeightBytes + N / 8 * kGroupBytes;
};

#if TL_WGMMA

constexpr int kChunkStages = TL_K_CHUNK / kStageColumns;

// The K-chunks that a CTA of the cluster sums.
struct Chunks {
  int first, end;
};
TL_DEVICE Chunks chunks_of(int n_chunks, int rank, int n_ctas) { return {n_chunks * rank / n_ctas, n_chunks * (rank + 1) / n_ctas}; }

// The producer warp requests the stages of the CTA's chunks: each lane a panel, the one after them the rows. What may be
// read before the kernel before this one has ended, the weights, is asked for first.
template <class W, int N>
TL_DEVICE void produce(const WgmmaArgs &a, shared_t ring, shared_t full, shared_t empty, int first_panel, int first_group, int first, int end) {
  using S = Stage<W, N>;
  const GemmArgs &g = a.gemm;
  const int64_t panel_bytes = panel_nbytes(g.weight.dtype, g.weight.n_in);
  const int n_panels = min(kTilePanels, g.weight.n_out / kPanelRows - first_panel), n_groups = min(N / 8, g.source.n_groups - first_group);
  const int lane = lane_id(), row_bytes = n_groups * kGroupBytes;
  const uint8_t *weights = g.weight.data + (first_panel + lane) * panel_bytes;
  const uint8_t *rows = (const uint8_t *)g.source.data + (int64_t)first_group * kGroupBytes;
  const int64_t row_step = (int64_t)g.source.n_groups * kGroupBytes;
  const auto request_weights = [&](int stage, int slot) {
    const int nbytes = (int)min((int64_t)S::kPanelBytes, panel_bytes - (int64_t)stage * S::kPanelBytes);
    if (lane == 0) barrier_arrive_expecting(full + slot * 8, n_panels * nbytes + row_bytes);
    __syncwarp();
    if (lane < n_panels)
      copy_bulk(ring + slot * S::kBytes + lane * S::kPanelBytes, weights + (int64_t)stage * S::kPanelBytes, nbytes, full + slot * 8);
  };
  const auto request_rows = [&](int stage, int slot) {
    if (lane == kTilePanels) copy_bulk(ring + slot * S::kBytes + S::kWeightBytes, rows + stage * row_step, row_bytes, full + slot * 8);
  };
  const int n_early = min(a.n_stages, end - first);
  for (int s = 0; s < n_early; s++) request_weights(first + s, s);
  wait_for_previous_kernel();
  for (int s = 0; s < n_early; s++) request_rows(first + s, s);
  int slot = 0, parity = 0;
  for (int s = first + n_early; s < end; s++) {
    barrier_wait(empty + slot * 8, parity);
    request_weights(s, slot);
    request_rows(s, slot);
    if (++slot == a.n_stages) slot = 0, parity ^= 1;
  }
}

// Where in the ring a consumer is.
struct Ring {
  int slot = 0, parity = 0;
  TL_DEVICE_MEMBER void next(int n_stages) {
    if (++slot == n_stages) slot = 0, parity ^= 1;
  }
};

// Consumes the stages of one chunk into `sum`. While a stage's products run, the next one's weights go to registers; a
// stage is free when the products after it have begun.
template <class W, int N>
TL_DEVICE void sum_chunk(float (&sum)[N / 2], const WgmmaArgs &a, shared_t ring, shared_t full, shared_t empty, int panel, Ring &at) {
  using S = Stage<W, N>;
  const int own_panel = panel * S::kPanelBytes + lane_id() * W::kLaneBytes;
  uint32_t w[2][kStageBlocks][4];
  int held = 0;
#pragma unroll
  for (int j = 0; j < kChunkStages; j++) {
    barrier_wait(full + at.slot * 8, at.parity);
    const shared_t stage = ring + at.slot * S::kBytes;
#pragma unroll
    for (int b = 0; b < kStageBlocks; b++) W::load(w[j % 2][b], stage + own_panel + b * W::kBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < kStageBlocks; b++)
      wgmma<typename W::Op>(sum, w[j % 2][b], wgmma_columns(stage + S::kWeightBytes + b * 256, kGroupBytes), j + b > 0);
    wgmma_commit();
    if (j > 0) {
      wgmma_wait<1>();
      if (lane_id() == 0) barrier_arrive(empty + held * 8);
    }
    held = at.slot;
    at.next(a.n_stages);
  }
  wgmma_wait<0>();
  accumulators_ready(sum);
  if (lane_id() == 0) barrier_arrive(empty + held * 8);
}

// The same for a last chunk of n_blocks blocks, one product at a time.
template <class W, int N>
TL_DEVICE void sum_short_chunk(float (&sum)[N / 2], const WgmmaArgs &a, shared_t ring, shared_t full, shared_t empty, int panel, int n_blocks,
                               Ring &at) {
  using S = Stage<W, N>;
  const int own_panel = panel * S::kPanelBytes + lane_id() * W::kLaneBytes;
#pragma unroll 1
  for (int b = 0; b < n_blocks; b++) {
    const int in_stage = b % kStageBlocks;
    if (in_stage == 0) barrier_wait(full + at.slot * 8, at.parity);
    const shared_t stage = ring + at.slot * S::kBytes;
    uint32_t w[4];
    W::load(w, stage + own_panel + in_stage * W::kBlockBytes);
    accumulators_ready(sum);
    wgmma_fence();
    wgmma<typename W::Op>(sum, w, wgmma_columns(stage + S::kWeightBytes + in_stage * 256, kGroupBytes), b > 0);
    wgmma_commit();
    wgmma_wait<0>();
    accumulators_ready(sum);
    if (in_stage + 1 < kStageBlocks && b + 1 < n_blocks) continue;
    if (lane_id() == 0) barrier_arrive(empty + at.slot * 8);
    at.next(a.n_stages);
  }
}

// A consumer thread's sums to shared memory, rows kSumStride apart.
template <int N>
TL_DEVICE void leave_sums(float *sums, const float (&sum)[N / 2], int panel) {
  float *to = sums + panel * kPanelRows + lane_id() / 4 + lane_id() % 4 * 2 * kSumStride;
#pragma unroll
  for (int i = 0; i < N / 2; i++) to[(i / 4 * 8 + i % 2) * kSumStride + i % 4 / 2 * 8] = sum[i];
}

#endif

template <class W, int N>
__global__ void __launch_bounds__(kCtaThreads, 1) gemm_wgmma(const WgmmaArgs a) {
#if TL_WGMMA
  using S = Stage<W, N>;
  constexpr int kSumFloats = N * kSumStride;
  const GemmArgs &g = a.gemm;
  uint8_t *memory = shared_memory<uint8_t>();
  const shared_t ring = shared_of(memory), full = ring + a.n_stages * S::kBytes, empty = full + kMaxStages * 8;
  float *sums = (float *)(memory + a.n_stages * S::kBytes + kBarrierBytes), *scratch;
  const int n_ctas = cluster_size(), rank = cluster_rank(), first_row = blockIdx.x / n_ctas * N;
  const int first_panel = blockIdx.y * kTilePanels;
  const int n_blocks = pad16(g.weight.n_in) / 16, n_chunks = (n_blocks + TL_K_CHUNK / 16 - 1) / (TL_K_CHUNK / 16);
  const Chunks chunks = chunks_of(n_chunks, rank, n_ctas);
  const int first_stage = chunks.first * kChunkStages, end_stage = min(chunks.end * kChunkStages, (n_blocks + kStageBlocks - 1) / kStageBlocks);
  if (n_ctas == 1) sums = (float *)memory;  // when the ring has been read
  scratch = sums + (n_ctas == 1 ? 1 : a.most_chunks) * kSumFloats;
  if (threadIdx.x == 0) {
    for (int s = 0; s < a.n_stages; s++) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, kConsumers / 32);
    }
    barrier_init_done();
  }
  __syncthreads();
  let_next_kernel_start();
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0);  // the same for the warp, and known to be
  if (warp >= kConsumers / 32) {
    give_registers<40>();
    if (warp == kConsumers / 32) produce<W, N>(a, ring, full, empty, first_panel, first_row / 8, first_stage, end_stage);
    if (n_ctas == 1) return;
    cluster_sync();
    cluster_sync();
  } else {
    take_registers<232>();
    float total[N / 2], sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) total[i] = sum[i] = 0.0f;
    Ring at;
#pragma unroll 1
    for (int c = chunks.first; c < chunks.end; c++) {
      const int left = n_blocks - c * (TL_K_CHUNK / 16);
      if (left >= TL_K_CHUNK / 16)
        sum_chunk<W, N>(sum, a, ring, full, empty, warp, at);
      else
        sum_short_chunk<W, N>(sum, a, ring, full, empty, warp, left, at);
      if (n_ctas == 1) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) total[i] = total[i] + sum[i];
      } else {
        leave_sums<N>(sums + (c - chunks.first) * kSumFloats, sum, warp);
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
    const int begin = N * rank / n_ctas, end = min(N * (rank + 1) / n_ctas, g.n_rows - first_row);
    const TileRows<W::kInt8> rows{g, first_panel, first_row, begin + warp, end, kConsumers / 32, scratch + warp * kMaxHeadDim};
    rows.finish([&](int row) {
      const float *own = sums + row * kSumStride + lane_id() * 4;
      if (n_ctas == 1) return *(const float4 *)own;
      float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
      for (int owner = 0; owner < n_ctas; owner++) {
        const Chunks of = chunks_of(n_chunks, owner, n_ctas);
        const float *p = of_cluster_rank(own, owner);
#pragma unroll 1
        for (int k = 0; k < of.end - of.first; k++) {
          const float4 q = *(const float4 *)(p + k * kSumFloats);
          y = make_float4(y.x + q.x, y.y + q.y, y.z + q.z, y.w + q.w);
        }
      }
      return y;
    });
    if (n_ctas > 1) cluster_sync();  // no CTA leaves while another reads its sums
  }
#endif
}

template <class W, int N>
void launch_tile(const Launcher &launcher, const GemmArgs &args) {
  constexpr int kScratchBytes = kConsumers / 32 * kMaxHeadDim * 4, kSumBytes = N * kSumStride * 4;
  const int n_panels = args.weight.n_out / kPanelRows, n_row_tiles = (args.n_rows + N - 1) / N;
  const int n_tiles = (n_panels + kTilePanels - 1) / kTilePanels * n_row_tiles, n_chunks = (args.weight.n_in + TL_K_CHUNK - 1) / TL_K_CHUNK;
  const auto most_chunks = [&](int cluster) { return (n_chunks + cluster - 1) / cluster; };
  const auto behind_ring = [&](int cluster) { return kBarrierBytes + (cluster == 1 ? 0 : most_chunks(cluster) * kSumBytes + kScratchBytes); };
  const auto n_stages = [&](int cluster) {
    return std::min(kMaxStages, (launcher.context.max_shared_nbytes - behind_ring(cluster)) / Stage<W, N>::kBytes);
  };
  int cluster = 1;
  for (int c = 2; c <= std::min(kMaxCluster, n_chunks) && n_tiles * c / 2 < launcher.context.n_multiprocessors / 2; c *= 2)
    if (n_stages(c) >= 3) cluster = c;
  const WgmmaArgs a{args, n_stages(cluster), most_chunks(cluster)};
  const int ring = a.n_stages * Stage<W, N>::kBytes;
  static_assert(kSumBytes + kScratchBytes <= 4 * Stage<W, N>::kBytes, "the sums of a tile fit the ring");
  launcher.launch(gemm_wgmma<W, N>,
                  Shape{dim3(n_row_tiles * cluster, (n_panels + kTilePanels - 1) / kTilePanels), kCtaThreads, ring + behind_ring(cluster), cluster},
                  a);
}

template <class W>
void launch_with(const Launcher &launcher, const GemmArgs &args) {
  if (args.n_rows <= 32) return launch_tile<W, 32>(launcher, args);
  if (args.n_rows <= 128) return launch_tile<W, 64>(launcher, args);
  return launch_tile<W, 128>(launcher, args);
}

}  // namespace

void launch_gemm_wgmma(const Launcher &launcher, const GemmArgs &args) {
  switch (args.weight.dtype) {
    case TL_BF16: return launch_with<FloatWeights<Bf16>>(launcher, args);
    case TL_F16: return launch_with<FloatWeights<F16>>(launcher, args);
    default: return launch_with<Int8Weights>(launcher, args);
  }
}

}  // namespace tl
