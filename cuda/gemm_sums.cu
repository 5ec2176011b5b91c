// Matrix product for some batch rows on wgmma whose chunks' sums go to memory as they are: the kernel after it adds them up, in index
// order (sums.cuh), where it reads whole rows or heads anyway. So no CTA waits for another, and any cut of the work will do. The bits are
// those of gemm_wgmma.cu.
#include "gemm_some.cuh"

namespace tl {
namespace {

struct SumsArgs {
  SomeArgs some;
  float *sums;  // (n_chunks, n_rows, n_out)
};

#if TL_WGMMA

// A consumer thread's sums of a chunk, of the outputs and rows that exist.
template <int N>
TL_DEVICE void leave_sums(const SomeArgs &a, float *sums, const float (&sum)[N / 2], int warp, int tile, int chunk) {
  const int first = tile * a.tile_panels * kPanelRows, end = min(a.tile_panels * kPanelRows, a.weight.n_out - first), output = output_of(warp, 0);
  float *to = sums + (int64_t)chunk * a.n_rows * a.weight.n_out + first + output;
  const bool exists[2] = {output < end, output + kPanelRows < end};
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    const int row = row_of(i);
    if (row < a.n_rows && exists[i % 4 / 2]) to[row * a.weight.n_out + i % 4 / 2 * kPanelRows] = sum[i];
  }
}

#endif

template <class W, int N>
__global__ void __launch_bounds__(kSomeThreads, 1) gemm_sums(const SumsArgs args) {
#if TL_WGMMA
  const SomeArgs &a = args.some;
  Ring ring = begin_ring<W, N>(a);
  let_next_kernel_start();
  touch_arguments(args);
  const int n_blocks = pad16(a.weight.n_in) / 16, n_chunks = (n_blocks + kChunkBlocks - 1) / kChunkBlocks;
  const Items items = items_of(a, n_chunks, blockIdx.x, gridDim.x);
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0);  // the same for the warp, and known to be
  if (warp >= kConsumers / 32) {
    produce<W, N>(a, ring, items, n_chunks, warp - kConsumers / 32);
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
    leave_sums<N>(a, args.sums, sum, warp, tile, chunk);
    if (++chunk == n_chunks) chunk = 0, tile++;
  }
#endif
}

// Which kernel takes a product, for launch_some.
struct Sums {
  using Args = SumsArgs;
  template <class W, int N>
  static constexpr auto kernel = gemm_sums<W, N>;
};

}  // namespace

bool gemm_leaves_sums(const tl_context &context, const Matrix &weight, int n_rows) {
  return n_rows <= kMaxSumRows && gemm_takes_wgmma(context, weight);
}

ChunkSums launch_gemm_sums(const Launcher &launcher, const Matrix &weight, const float *bias, int n_rows, const Operand &source, float *sums) {
  launch_some<Sums>(launcher, {{weight, source, n_rows, 0, 0, 0, false}, sums});
  return {sums, n_chunks_of(weight.n_in), n_rows, weight.n_out, weight.scales, bias};
}

}  // namespace tl
