// Matrix product for one to eight batch rows, weights as the left operand of mma.sync, float32 accumulators.
//
// Fused: the row program and the rounding of its result (one row), bias, int8 scales, and the epilogue. A CTA takes
// neighbouring panels; its warps take turns at their K-chunks, each from a private ring in shared memory that fills
// ahead, before the kernel may read what earlier kernels wrote. Every chunk is summed from zero by one warp; the sums of
// an output are added in index order, so the bits depend neither on the number of rows nor on who took which chunk.
// A step runs hundreds of these one after another: what counts here is how few instructions lie between the last bytes
// of a kernel and the first products of the next.
#include <algorithm>

#include "chunk_stream.cuh"
#include "gemv.cuh"

namespace tl {
namespace {

constexpr int kRoundBytes = 4096;  // of partial sums, where that holds a unit

// The arguments with what the host works out for them.
struct Gemv {
  GemvArgs args;
  int32_t n_ctas;                           // that have a share
  int32_t units_each, units_more;           // units of every CTA, and CTAs that have one more
  int32_t n_chunks, n_blocks, panel_bytes;  // of a panel
  int32_t round_panels;                     // panels whose sums are held at a time
  int32_t operand_stride;                   // bytes; a warp's loads of eight rows meet every bank once
  int32_t operand, partial, scale, bias, addend, norm_partial, nbytes;  // offsets in shared memory
};

TL_DEVICE void copy_floats(float *to, const float *from, int n) {  // n a multiple of four
#pragma unroll 1
  for (int i = threadIdx.x * 4; i < n; i += kThreads * 4) copy16_async(to + i, from + i);
}

// Outputs of panels begin .. end - 1 of the CTA, from their chunks' sums: sixteen threads a panel and row.
template <class W>
TL_DEVICE void finish_panels(const Gemv &v, uint8_t *shared, int first_output, int n_outputs, int begin, int end) {
  const GemvArgs &g = v.args;
  const bool scaled = W::kInt8 && !g.weight.group_size;
  const int per_chunk = g.n_rows * kPanelRows, lane = threadIdx.x % kPanelRows, units = (end - begin) / g.unit_panels;
  int unit = threadIdx.x / kPanelRows, row = 0;  // threads walk over units, then rows
#pragma unroll 1
  for (; row < g.n_rows; unit += kThreads / kPanelRows) {
#pragma unroll 1
    while (unit >= units && row < g.n_rows) unit -= units, row++;
    if (row >= g.n_rows) break;
    const int panel = unit * g.unit_panels, output = (begin + panel) * kPanelRows + lane;  // of the CTA's
    const float *p = (const float *)(shared + v.partial) + panel * v.n_chunks * per_chunk + row * kPanelRows + lane;
    const auto total = [&](const float *p, int output) {
      float sum = 0.0f;
#pragma unroll 4
      for (int c = 0; c < v.n_chunks; c++) sum = sum + p[c * per_chunk];
      if (scaled) sum = sum * ((const float *)(shared + v.scale))[output];
      return g.bias ? sum + ((const float *)(shared + v.bias))[output] : sum;
    };
    const float y = total(p, output);
    if (g.unit_panels == 2)
      finish_gated(g.epilogue, row, first_output + output, y, total(p + v.n_chunks * per_chunk, output + kPanelRows));
    else if (g.epilogue.kind == kAddToRows)
      g.epilogue.out[row * g.epilogue.stride + first_output + output] = ((const float *)(shared + v.addend))[row * n_outputs + output] + y;
    else
      finish_output(g.epilogue, row, first_output + output, y);
  }
}

// The one row, computed by every CTA, to the operand in shared memory; stored where asked by one that stores.
template <class W>
TL_DEVICE void run_program(const Gemv &v, uint8_t *shared, bool stores_x, const EarlyNorm<kGemvQuads, true> &early) {
  float4 x[kGemvQuads];
  run_row_program<kGemvQuads, true>(v.args.program, 0, stores_x, x, (float *)(shared + v.norm_partial), early);
  emit_operand<kGemvQuads, true>(v.args.program, 0, x, [&](int column, float lo, float hi, int count) {
    uint16_t *to = (uint16_t *)(shared + v.operand) + operand_position(column);
    if (count == 2)
      *(uint32_t *)to = W::Op::pack(lo, hi);
    else
      *to = (uint16_t)W::Op::pack(lo, 0.0f);
  });
}

// What an earlier kernel left: the operand rows, and what the outputs are added to.
TL_DEVICE void fetch_rows(const Gemv &v, uint8_t *shared, int first_output, int n_outputs) {
  const GemvArgs &g = v.args;
  const int row_bytes = v.n_blocks * 32;
#pragma unroll 1
  for (int r = 0; r < g.n_rows; r++) {
    const uint8_t *from = (const uint8_t *)g.source.data + r * row_bytes;
    const shared_t to = shared_of(shared + v.operand + r * v.operand_stride);
#pragma unroll 2
    for (int i = threadIdx.x * 16; i < row_bytes; i += kThreads * 16) copy16_async(to + i, from + i);
    if (g.epilogue.kind == kAddToRows)
      copy_floats((float *)(shared + v.addend) + r * n_outputs, g.epilogue.addend + r * g.epilogue.stride + first_output, n_outputs);
  }
}

// All of a CTA's share. `shared` is v.nbytes of memory.
template <class W, bool kProgram>
TL_DEVICE void run_gemv(const Gemv &v, uint8_t *shared, const CtaShare &share, bool stores_x, ChunkStream<W> &stream) {
  constexpr int kSlotBlocks = kSlotBytes / W::kBlockBytes, kParts = ChunkStream<W>::kParts;
  const GemvArgs &g = v.args;
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0), lane = lane_id();
  const int first_panel = share.first_panel, n_panels = share.n_panels;
  const int first_output = first_panel * kPanelRows, n_outputs = n_panels * kPanelRows;
  if (W::kInt8 && !g.weight.group_size) copy_floats((float *)(shared + v.scale), g.weight.scales + first_output, n_outputs);
  if (g.bias) copy_floats((float *)(shared + v.bias), g.bias + first_output, n_outputs);
  EarlyNorm<kGemvQuads, true> early;
  if (kProgram) early.load(g.program);
  wait_for_previous_kernel();
  if (kProgram)
    run_program<W>(v, shared, stores_x, early);
  else
    fetch_rows(v, shared, first_output, n_outputs);
  commit_copies();
  wait_copies<0>();  // before Hopper, of the ring as well
  __syncthreads();

  // Right operands of lane (group, t): columns 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 of batch row `group`, or of the last one.
  const int group = lane / 4;
  const shared_t right = shared_of(shared + v.operand) + min(group, g.n_rows - 1) * v.operand_stride + lane % 4 * 8;
  float *sums = (float *)(shared + v.partial) + warp * g.n_rows * kPanelRows + lane % 4 * 2 * kPanelRows + group;  // of this warp's next chunk
  int chunk = warp, item = warp;
#pragma unroll 1
  while (chunk >= v.n_chunks) chunk -= v.n_chunks;
#pragma unroll 1
  for (int begin = 0; begin < n_panels; begin += v.round_panels) {
    const int end = min(begin + v.round_panels, n_panels);
#pragma unroll 1
    for (; item < end * v.n_chunks; item += kWarps) {
      const int first = chunk * kChunkBlocks;
      float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
      for (int part = 0; part < kParts; part++) {
        const int block = first + part * kSlotBlocks;
        const shared_t slot = stream.wait() + lane * W::kLaneBytes;
        if (W::kInt8 && g.weight.group_size)
          add_scaled_blocks<W>(d, slot, right + block * 32, min(kSlotBlocks, v.n_blocks - block), g.weight, first_panel + item / v.n_chunks, block);
        else
          add_blocks<W, kSlotBlocks, 4>(d, slot, right + block * 32, v.n_blocks - block);
        stream.done();
      }
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (lane % 4 * 2 + j % 2 < g.n_rows) sums[j % 2 * kPanelRows + j / 2 * 8] = d[j];
      sums += kWarps * g.n_rows * kPanelRows;
      chunk += kWarps;
#pragma unroll 1
      while (chunk >= v.n_chunks) chunk -= v.n_chunks;
    }
    __syncthreads();
    finish_panels<W>(v, shared, first_output, n_outputs, begin, end);
    sums -= (end - begin) * v.n_chunks * g.n_rows * kPanelRows;
    if (end < n_panels) __syncthreads();
  }
}

template <class W, bool kProgram>
__global__ void __launch_bounds__(kThreads, 2) gemv(const Gemv v) {
  uint8_t *ring = shared_memory<uint8_t>(), *shared = ring + kWarps * kSlots * (kSlotBytes + 8);
  const CtaShare share = share_of(blockIdx.x, v.units_each, v.units_more, v.args.unit_panels);
  const uint8_t *weights = v.args.weight.data + (int64_t)share.first_panel * v.panel_bytes;
  ChunkStream<W> stream(weights, v.n_chunks, v.panel_bytes, share.n_panels, __shfl_sync(0xffffffffu, warp_id(), 0), shared_of(ring));
  let_next_kernel_start();
  run_gemv<W, kProgram>(v, shared, share, blockIdx.x == 0, stream);
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
