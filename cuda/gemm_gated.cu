// Matrix product of gates and ups for some batch rows on wgmma, activated where they are summed: a gate and its up output meet in one thread,
// so that a tile ends in registers. A CTA takes all chunks of its tiles, and adds them in index order.
#include "gates.cuh"
#include "gemm_some.cuh"

namespace tl {
namespace {

struct GatedArgs {
  SomeArgs some;
  const float *bias;
  Epilogue epilogue;
};

template <class W, int N>
__global__ void __launch_bounds__(kSomeThreads, 1) gemm_gated(const GatedArgs args) {
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
  constexpr bool kOneByOne = W::kInt8 && N == 128;  // there are no registers for two stages' weights
  wait_for_previous_kernel();  // what was in memory has been read
#pragma unroll 1
  for (int item = items.first; item < items.end; item += n_chunks) {
    const int first_panel = item / n_chunks * a.tile_panels, end_panel = min(first_panel + a.tile_panels, a.weight.n_out / kPanelRows);
    const int output = first_panel * kPanelRows + output_of(warp, 0);
    float scale[2] = {1.0f, 1.0f}, bias[2] = {0.0f, 0.0f}, total[N / 2], sum[N / 2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (output + h * kPanelRows >= end_panel * kPanelRows) continue;
      if (W::kInt8) scale[h] = a.weight.scales[output + h * kPanelRows];
      if (args.bias) bias[h] = args.bias[output + h * kPanelRows];
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++) total[i] = sum[i] = 0.0f;
#pragma unroll 1
    for (int left = n_blocks; left > 0; left -= kChunkBlocks) {
      if (left >= kChunkBlocks && !kOneByOne)
        sum_chunk<W, N>(sum, ring, warp, release);
      else
        sum_short_chunk<W, N>(sum, ring, warp, min(left, kChunkBlocks), release);
#pragma unroll
      for (int i = 0; i < N / 2; i++) total[i] = total[i] + sum[i];
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      if (W::kInt8) total[i] = total[i] * scale[i % 4 / 2];
      if (args.bias) total[i] = total[i] + bias[i % 4 / 2];
    }
    store_gates<N / 2>(args.epilogue, total, 0, {first_panel, end_panel, 0, a.n_rows}, warp);
  }
#endif
}

// Which kernel takes a product, for launch_some.
struct Gated {
  using Args = GatedArgs;
  template <class W, int N>
  static constexpr auto kernel = gemm_gated<W, N>;
};

}  // namespace

bool gemm_takes_gates(const GemmArgs &args) { return args.n_rows <= kMaxSumRows && takes_gates(args.epilogue); }

void launch_gemm_gated(const Launcher &launcher, const GemmArgs &args) {
  launch_some<Gated>(launcher, {{args.weight, args.source, args.n_rows, 0, 0, 0, true}, args.bias, args.epilogue});
}

}  // namespace tl
