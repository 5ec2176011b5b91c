// Matrix product for one to eight batch rows, weights as the left operand of mma.sync, float32 accumulators.
//
// Fused: the row program and the rounding of its result (one row), bias, int8 scales, and the epilogue. A CTA takes
// neighbouring panels; its warps take turns at their K-chunks, each from a private ring in shared memory that fills
// ahead, before the kernel may read what earlier kernels wrote. Every chunk is summed from zero by one warp; the sums of
// an output are added in index order, so the bits depend neither on the number of rows nor on who took which chunk.
// A step runs hundreds of these one after another: what counts here is how few instructions lie between the last bytes
// of a kernel and the first products of the next.
#include "gemv_body.cuh"

#include <algorithm>

namespace tl {
namespace {

template <class W, bool kProgram>
__global__ void __launch_bounds__(kThreads, 2) gemv(const Gemv v) {
  uint8_t *ring = shared_memory<uint8_t>(), *shared = ring + kWarps * kSlots * (kSlotBytes + 8);
  const CtaShare share = share_of(blockIdx.x, v.units_each, v.units_more, v.args.unit_panels);
  const uint8_t *weights = v.args.weight.data + (int64_t)share.first_panel * v.panel_bytes;
  ChunkStream<W> stream(weights, v.n_chunks, v.panel_bytes, share.n_panels, __shfl_sync(0xffffffffu, warp_id(), 0), shared_of(ring));
  let_next_kernel_start();
  run_gemv<W, kProgram>(v, shared, share, blockIdx.x == 0, stream, [] { wait_for_previous_kernel(); });
#if !TL_HOPPER
  wait_copies<0>();
#endif
}

int ring_nbytes(const tl_context &context) { return kWarps * (context.code >= kCodeSm90 ? kHopperSlots : kOlderSlots) * (kSlotBytes + 8); }

template <class W>
void launch_with(const Launcher &launcher, const Gemv &v) {
  const Shape shape{dim3(v.n_ctas), kThreads, v.nbytes + ring_nbytes(launcher.context), 1};
  if (v.args.program.n_ops)
    launcher.launch(gemv<W, true>, shape, v);
  else
    launcher.launch(gemv<W, false>, shape, v);
}

}  // namespace

Gemv plan_gemv(const GemvArgs &args, int most_ctas) {
  Gemv v = {};
  v.args = args;
  const int k_pad = pad16(args.weight.n_in), n_units = args.weight.n_out / kPanelRows / args.unit_panels;
  v.n_ctas = std::min(n_units, most_ctas);
  v.units_each = n_units / v.n_ctas;
  v.units_more = n_units % v.n_ctas;
  v.n_blocks = k_pad / 16;
  v.n_chunks = (v.n_blocks + kChunkBlocks - 1) / kChunkBlocks;
  v.panel_bytes = (int32_t)panel_nbytes(args.weight.dtype, args.weight.n_in);
  v.operand_stride = round_up(k_pad * 2, 128) + 32;
  const int panel_sums = v.n_chunks * args.n_rows * kPanelRows * 4, n_outputs = (v.units_each + (v.units_more > 0)) * args.unit_panels * kPanelRows;
  v.round_panels = std::max(1, kRoundBytes / panel_sums / args.unit_panels) * args.unit_panels;
  const auto take = [&](int nbytes) {
    const int at = v.nbytes;
    v.nbytes += round_up(nbytes, 16);
    return at;
  };
  v.operand = take(args.n_rows * v.operand_stride);
  v.partial = take(v.round_panels * panel_sums);
  v.scale = take(args.weight.dtype == TL_INT8 ? n_outputs * 4 : 0);
  v.bias = take(args.bias ? n_outputs * 4 : 0);
  v.addend = take(args.epilogue.kind == kAddToRows ? args.n_rows * n_outputs * 4 : 0);
  v.norm_partial = take(2 * kWarps * 4);
  return v;
}

int gemv_shared_nbytes(const tl_context &context, const GemvArgs &args) {
  return plan_gemv(args, context.n_multiprocessors).nbytes + ring_nbytes(context);
}

void launch_gemv(const Launcher &launcher, const GemvArgs &args) {
  const Gemv v = plan_gemv(args, launcher.context.n_multiprocessors);
  switch (args.weight.dtype) {
    case TL_BF16: return launch_with<FloatWeights<Bf16>>(launcher, v);
    case TL_F16: return launch_with<FloatWeights<F16>>(launcher, v);
    default: return launch_with<Int8Weights>(launcher, v);
  }
}

}  // namespace tl
