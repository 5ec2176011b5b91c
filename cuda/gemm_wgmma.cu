// Matrix product for many batch rows on wgmma: 128 outputs x 32, 64 or 128 rows a CTA, weights in registers as the left
// operand, float32 accumulators. Fused: int8 scales, bias and the epilogue.
//
// A producer warp keeps a ring of 64-column stages full by bulk copies; two consumer warpgroups each own 64 outputs, the
// first the even panels and the second the odd ones, so that a gate and its up panel meet in threads of the same place.
// Where tiles are too few for the device, a cluster shares out a tile's K-chunks: every CTA leaves the sums of its chunks
// in shared memory, then each finishes a slice of the tile. Either way every chunk of TL_K_CHUNK columns is summed from
// zero and the sums are added in index order, with the bits of gemv.cu.
#include <algorithm>

#include "gemm.cuh"
#include "weights.cuh"
#include "wgmma.cuh"

namespace tl {
namespace {

constexpr int kTilePanels = 8;  // 128 outputs
constexpr int kConsumers = 256, kCtaThreads = kConsumers + 128;  // the producer's warpgroup gives its registers to the others
constexpr int kStageColumns = 64, kStageBlocks = kStageColumns / 16, kChunkStages = TL_K_CHUNK / kStageColumns;
constexpr int kGroupBytes = kStageColumns * 8 * 2;  // eight batch rows of a stage
constexpr int kMaxStages = 8, kMaxCluster = 8;

struct WgmmaArgs {
  GemmArgs gemm;
  int32_t n_stages;  // of the ring
};

template <class W, int N>
struct Stage {
  static constexpr int kPanelBytes = kStageBlocks * W::kBlockBytes;
  static constexpr int kWeightBytes = kTilePanels * kPanelBytes;
  static constexpr int kBytes = kWeightBytes + N / 8 * kGroupBytes;
};

// The K-chunks that a CTA of the cluster sums.
struct Chunks {
  int first, end;
};
TL_BOTH Chunks chunks_of(int n_chunks, int rank, int n_ctas) { return {n_chunks * rank / n_ctas, n_chunks * (rank + 1) / n_ctas}; }

#if TL_WGMMA

template <int N>
struct Place {  // of value i of this consumer thread: an output and a batch row
  int first_panel, first_row;
  TL_DEVICE_MEMBER int output(int i) const {
    return (first_panel + warp_id() % 4 * 2 + warp_id() / 4) * kPanelRows + lane_id() / 4 + i % 4 / 2 * 8;
  }
  TL_DEVICE_MEMBER int row(int i) const { return first_row + i / 4 * 8 + lane_id() % 4 * 2 + i % 2; }
};

// The producer: one lane requests the stages of the CTA's chunks, weights of the first round before the wait.
template <class W, int N>
TL_DEVICE void produce(const WgmmaArgs &a, uint8_t *ring, uint64_t *full, uint64_t *empty, int first_panel, int first_group, int first, int end) {
  using S = Stage<W, N>;
  const GemmArgs &g = a.gemm;
  const int64_t panel_bytes = panel_nbytes(g.weight.dtype, g.weight.n_in);
  const int n_panels = min(kTilePanels, g.weight.n_out / kPanelRows - first_panel), n_groups = min(N / 8, g.source.n_groups - first_group);
  const auto request_weights = [&](int stage, int slot) {
    const int nbytes = (int)min((int64_t)S::kPanelBytes, panel_bytes - (int64_t)stage * S::kPanelBytes);
    barrier_arrive_expecting(full + slot, n_panels * nbytes + n_groups * kGroupBytes);
    for (int p = 0; p < n_panels; p++)
      copy_bulk(ring + slot * S::kBytes + p * S::kPanelBytes, g.weight.data + (first_panel + p) * panel_bytes + (int64_t)stage * S::kPanelBytes, nbytes,
                full + slot);
  };
  const auto request_rows = [&](int stage, int slot) {
    copy_bulk(ring + slot * S::kBytes + S::kWeightBytes, (const uint8_t *)g.source.data + ((int64_t)stage * g.source.n_groups + first_group) * kGroupBytes,
              n_groups * kGroupBytes, full + slot);
  };
  const int n_early = min(a.n_stages, end - first);
  for (int s = 0; s < n_early; s++) request_weights(first + s, s);
  wait_for_previous_kernel();
  for (int s = 0; s < n_early; s++) request_rows(first + s, s);
  for (int s = n_early; s < end - first; s++) {
    const int slot = s % a.n_stages;
    barrier_wait(empty + slot, (s / a.n_stages - 1) % 2);
    request_weights(first + s, slot);
    request_rows(first + s, slot);
  }
}

// Consumes the stages of one chunk into `sum`; `s` counts the CTA's stages. While a stage's products run, the next one's
// weights go to registers; a stage is free when the products after it have begun.
template <class W, int N>
TL_DEVICE void sum_chunk(float (&sum)[N / 2], const WgmmaArgs &a, const uint8_t *ring, uint64_t *full, uint64_t *empty, int panel, int &s) {
  using S = Stage<W, N>;
  uint32_t w[2][kStageBlocks][4];
  int held = 0;
#pragma unroll
  for (int j = 0; j < kChunkStages; j++) {
    const int slot = s % a.n_stages;
    barrier_wait(full + slot, s / a.n_stages % 2);
    const uint8_t *stage = ring + slot * S::kBytes;
#pragma unroll
    for (int b = 0; b < kStageBlocks; b++) W::load(w[j % 2][b], stage + panel * S::kPanelBytes + b * W::kBlockBytes);
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < kStageBlocks; b++)
      wgmma<typename W::Op>(sum, w[j % 2][b], wgmma_columns(stage + S::kWeightBytes + b * 256, kGroupBytes), j + b > 0);
    wgmma_commit();
    if (j > 0) {
      wgmma_wait<1>();
      if (lane_id() == 0) barrier_arrive(empty + held);
    }
    held = slot;
    s++;
  }
  wgmma_wait<0>();
  accumulators_ready(sum);
  if (lane_id() == 0) barrier_arrive(empty + held);
}

// The same for a last chunk of n_blocks blocks, one product at a time.
template <class W, int N>
TL_DEVICE void sum_short_chunk(float (&sum)[N / 2], const WgmmaArgs &a, const uint8_t *ring, uint64_t *full, uint64_t *empty, int panel, int n_blocks,
                               int &s) {
  using S = Stage<W, N>;
  for (int b = 0; b < n_blocks; b++) {
    const int slot = s % a.n_stages, in_stage = b % kStageBlocks;
    if (in_stage == 0) barrier_wait(full + slot, s / a.n_stages % 2);
    const uint8_t *stage = ring + slot * S::kBytes;
    uint32_t w[4];
    W::load(w, stage + panel * S::kPanelBytes + in_stage * W::kBlockBytes);
    accumulators_ready(sum);
    wgmma_fence();
    wgmma<typename W::Op>(sum, w, wgmma_columns(stage + S::kWeightBytes + in_stage * 256, kGroupBytes), b > 0);
    wgmma_commit();
    wgmma_wait<0>();
    accumulators_ready(sum);
    if (in_stage + 1 < kStageBlocks && b + 1 < n_blocks) continue;
    if (lane_id() == 0) barrier_arrive(empty + slot);
    s++;
  }
}

template <bool kScaled>
TL_DEVICE float complete(const GemmArgs &g, int output, float y) {
  if (output >= g.weight.n_out) return y;
  if (kScaled) y = y * g.weight.scales[output];
  return g.bias ? y + g.bias[output] : y;
}

template <int N>
TL_DEVICE void hand_on(const GemmArgs &g, const Place<N> &place, int i, float y) {
  if (place.row(i) < g.n_rows && place.output(i) < g.weight.n_out) finish_output(g.epilogue, place.row(i), place.output(i), y);
}

// A gate and an up value; both threads of a pair may call it, `gate_output` being the gate's.
template <int N>
TL_DEVICE void hand_on_gated(const GemmArgs &g, const Place<N> &place, int i, float gate, float up) {
  const int gate_output = place.output(i) - warp_id() / 4 * kPanelRows;
  if (place.row(i) < g.n_rows && gate_output < g.weight.n_out) finish_gated(g.epilogue, place.row(i), gate_output, gate, up);
}

// A whole tile in one CTA's registers. Gates and ups are exchanged: each warpgroup finishes half of the columns.
template <class W, int N>
TL_DEVICE void finish_tile(const GemmArgs &g, const Place<N> &place, float (&total)[N / 2], float *exchange) {
  constexpr int kHalf = N / 4;
  const int group = warp_id() / 4, thread = threadIdx.x % 128;
#pragma unroll
  for (int i = 0; i < N / 2; i++) total[i] = complete<W::kInt8>(g, place.output(i), total[i]);
  if (g.epilogue.kind != kActivate || !g.epilogue.gated) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) hand_on(g, place, i, total[i]);
    return;
  }
  sync_threads(1, kConsumers);  // the ring is free
#pragma unroll
  for (int i = 0; i < kHalf; i++) exchange[(group * kHalf + i) * 128 + thread] = group ? total[i] : total[kHalf + i];
  sync_threads(1, kConsumers);
#pragma unroll
  for (int i = 0; i < kHalf; i++) {
    const float other = exchange[((1 - group) * kHalf + i) * 128 + thread];
    if (group == 0)
      hand_on_gated(g, place, i, total[i], other);
    else
      hand_on_gated(g, place, kHalf + i, other, total[kHalf + i]);
  }
}

// The tile's outputs from the chunk sums that the cluster's CTAs hold: sums[(chunk of the CTA, value, thread)].
template <class W, int N>
TL_DEVICE void finish_slice(const GemmArgs &g, const Place<N> &place, const float *sums, int n_chunks) {
  const int n_ctas = cluster_size(), rank = cluster_rank(), partner = threadIdx.x % 128 + 128;
  const bool gated = g.epilogue.kind == kActivate && g.epilogue.gated;
  const auto total = [&](int i, int thread) {
    float sum = 0.0f;
    for (int owner = 0; owner < n_ctas; owner++) {
      const Chunks c = chunks_of(n_chunks, owner, n_ctas);
      const float *p = of_cluster_rank(sums + i * kConsumers + thread, owner);
      for (int k = 0; k < c.end - c.first; k++) sum = sum + p[k * N / 2 * kConsumers];
    }
    return sum;
  };
  for (int i = N / 2 * rank / n_ctas; i < N / 2 * (rank + 1) / n_ctas; i++) {
    const float y = complete<W::kInt8>(g, place.output(i), total(i, threadIdx.x));
    if (!gated)
      hand_on(g, place, i, y);
    else if (threadIdx.x < 128)
      hand_on_gated(g, place, i, y, complete<W::kInt8>(g, place.output(i) + kPanelRows, total(i, partner)));
  }
}

#endif

template <class W, int N>
__global__ void __launch_bounds__(kCtaThreads, 1) gemm_wgmma(const WgmmaArgs a) {
#if TL_WGMMA
  using S = Stage<W, N>;
  const GemmArgs &g = a.gemm;
  uint8_t *ring = shared_memory<uint8_t>();
  uint64_t *full = (uint64_t *)(ring + a.n_stages * S::kBytes), *empty = full + kMaxStages;
  float *sums = (float *)(empty + kMaxStages);
  const int n_ctas = cluster_size(), rank = cluster_rank(), tile = blockIdx.x / n_ctas;
  const int first_panel = blockIdx.y * kTilePanels, first_group = tile * (N / 8);
  const int n_blocks = pad16(g.weight.n_in) / 16, n_chunks = (n_blocks + TL_K_CHUNK / 16 - 1) / (TL_K_CHUNK / 16);
  const Chunks chunks = chunks_of(n_chunks, rank, n_ctas);
  const int first_stage = chunks.first * kChunkStages, end_stage = min(chunks.end * kChunkStages, (n_blocks + kStageBlocks - 1) / kStageBlocks);
  if (threadIdx.x == 0) {
    for (int s = 0; s < a.n_stages; s++) {
      barrier_init(full + s, 1);
      barrier_init(empty + s, kConsumers / 32);
    }
    barrier_init_done();
  }
  __syncthreads();
  let_next_kernel_start();
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0);  // the same for the warp, and known to be
  if (warp >= kConsumers / 32) {
    give_registers<40>();
    if (threadIdx.x == kConsumers) produce<W, N>(a, ring, full, empty, first_panel, first_group, first_stage, end_stage);
    __syncwarp();
  } else {
    take_registers<232>();
    const Place<N> place{first_panel, first_group * 8};
    const int panel = warp % 4 * 2 + warp / 4;
    float total[N / 2], sum[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) total[i] = sum[i] = 0.0f;
    int s = 0;
    for (int c = chunks.first; c < chunks.end; c++) {
      const int left = n_blocks - c * (TL_K_CHUNK / 16);
      if (left >= TL_K_CHUNK / 16)
        sum_chunk<W, N>(sum, a, ring, full, empty, panel, s);
      else
        sum_short_chunk<W, N>(sum, a, ring, full, empty, panel, left, s);
      if (n_ctas == 1) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) total[i] = total[i] + sum[i];
      } else {
#pragma unroll
        for (int i = 0; i < N / 2; i++) sums[((c - chunks.first) * (N / 2) + i) * kConsumers + threadIdx.x] = sum[i];
      }
    }
    wait_for_previous_kernel();
    if (n_ctas == 1) finish_tile<W, N>(g, place, total, (float *)ring);
  }
  if (n_ctas == 1) return;
  cluster_sync();
  if (threadIdx.x < kConsumers) finish_slice<W, N>(g, Place<N>{first_panel, first_group * 8}, sums, n_chunks);
  cluster_sync();  // no CTA leaves while another reads its sums
#endif
}

constexpr int kBarrierBytes = 2 * kMaxStages * 8;

template <class W, int N>
void launch_tile(const Launcher &launcher, const GemmArgs &args) {
  const int n_panels = args.weight.n_out / kPanelRows, n_row_tiles = (args.n_rows + N - 1) / N;
  const int n_tiles = (n_panels + kTilePanels - 1) / kTilePanels * n_row_tiles, n_chunks = (args.weight.n_in + TL_K_CHUNK - 1) / TL_K_CHUNK;
  const auto sums_nbytes = [&](int cluster) { return cluster == 1 ? 0 : (n_chunks + cluster - 1) / cluster * (N / 2) * kConsumers * 4; };
  const auto n_stages = [&](int cluster) {
    return std::min(kMaxStages, (launcher.context.max_shared_nbytes - kBarrierBytes - sums_nbytes(cluster)) / Stage<W, N>::kBytes);
  };
  int cluster = 1;
  for (int c = 2; c <= std::min(kMaxCluster, n_chunks) && n_tiles * c / 2 < launcher.context.n_multiprocessors / 2; c *= 2)
    if (n_stages(c) >= 3) cluster = c;
  const WgmmaArgs a{args, n_stages(cluster)};
  const int nbytes = a.n_stages * Stage<W, N>::kBytes + kBarrierBytes + sums_nbytes(cluster);
  launcher.launch(gemm_wgmma<W, N>, Shape{dim3(n_row_tiles * cluster, (n_panels + kTilePanels - 1) / kTilePanels), kCtaThreads, nbytes, cluster}, a);
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
