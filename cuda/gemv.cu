// Matrix product for one to eight batch rows, weights as the left operand of mma.sync, float32 accumulators.
//
// Fused: the row program and the rounding of its result (one row), bias, int8 scales, and the epilogue. A CTA takes
// neighbouring panels; its warps take turns at their K-chunks, each from a private ring in shared memory that fills
// ahead, before the kernel may read what earlier kernels wrote. Every chunk is summed from zero by one warp; the sums of
// an output are added in index order, so the bits depend neither on the number of rows nor on who took which chunk.
#include "gemv.cuh"

#include <algorithm>

#include "weights.cuh"

namespace tl {
namespace {

constexpr int kSlotBytes = 4096;
constexpr int kRoundBytes = 4096;  // of partial sums, where that holds a unit
constexpr int kHopperSlots = 3, kOlderSlots = 2;  // of a warp's ring
#if TL_HOPPER
constexpr int kSlots = kHopperSlots;
#else
constexpr int kSlots = kOlderSlots;
#endif
constexpr int kRingBytes = kWarps * kSlots * kSlotBytes;

// Walks the chunks of a CTA's panels that fall to this warp: every kWarps-th, panel after panel.
struct ChunkWalk {
  int n_chunks, panel, chunk;
  TL_DEVICE_MEMBER explicit ChunkWalk(int n) : n_chunks(n), panel(warp_id() / n), chunk(warp_id() % n) {}
  TL_DEVICE_MEMBER void next() {
    chunk += kWarps;
    while (chunk >= n_chunks) chunk -= n_chunks, panel++;
  }
};

// The chunks of a warp, in order, through its ring of kSlots slots. A chunk takes kParts of them, one after another.
template <class W>
struct ChunkStream {
  static constexpr int kParts = TL_K_CHUNK / 16 * W::kBlockBytes / kSlotBytes;
  const uint8_t *weights;  // the CTA's first panel
  int64_t panel_bytes;
  int n_panels;
  uint8_t *ring;
  uint64_t *full;
  ChunkWalk asked;               // what is requested next
  int part = 0, to = 0;          // its part, and the slot it goes to
  int from = 0, parity = 0;      // the slot that is read next, and its barrier's phase

  TL_DEVICE_MEMBER ChunkStream(const uint8_t *weights, int64_t panel_bytes, int n_panels, int n_chunks, uint8_t *ring, uint64_t *full)
      : weights(weights), panel_bytes(panel_bytes), n_panels(n_panels), ring(ring), full(full), asked(n_chunks) {
#if TL_HOPPER
    if (lane_id() == 0)
      for (int s = 0; s < kSlots; s++) barrier_init(full + s, 1);
    barrier_init_done();
    __syncwarp();
#endif
    for (int s = 0; s < kSlots; s++) request();
  }

  // Asks for the next part; past the end of a short last chunk it is empty.
  TL_DEVICE_MEMBER void request() {
    if (asked.panel < n_panels) {
      const int64_t at = (int64_t)(asked.chunk * kParts + part) * kSlotBytes, left = panel_bytes - at;
      copy(weights + asked.panel * panel_bytes + at, left >= kSlotBytes ? kSlotBytes : left > 0 ? (int)left : 0);
    }
#if !TL_HOPPER
    commit_copies();
#endif
    to = to + 1 < kSlots ? to + 1 : 0;
    if (++part < kParts) return;
    part = 0;
    asked.next();
  }

#if TL_HOPPER
  TL_DEVICE_MEMBER void copy(const uint8_t *source, int nbytes) {
    if (lane_id() != 0) return;
    barrier_arrive_expecting(full + to, nbytes);
    if (nbytes) copy_bulk(ring + to * kSlotBytes, source, nbytes, full + to);
  }
#else
  TL_DEVICE_MEMBER void copy(const uint8_t *source, int nbytes) {
    for (int i = lane_id() * 16; i < nbytes; i += 512) copy16_async(ring + to * kSlotBytes + i, source + i);
  }
#endif

  // The part that is read next, once it is there; `done` when the warp has read it.
  TL_DEVICE_MEMBER const uint8_t *wait() {
#if TL_HOPPER
    barrier_wait(full + from, parity);
#else
    wait_copies<kSlots - 1>();
    __syncwarp();
#endif
    return ring + from * kSlotBytes;
  }
  TL_DEVICE_MEMBER void done() {
    __syncwarp();
    request();
    if (++from < kSlots) return;
    from = 0;
    parity ^= 1;
  }
};

// Right operands of lane (group, t): columns 2 t, 2 t + 1 and 2 t + 8, 2 t + 9 of batch row `group`.
struct RightOperand {
  const uint8_t *row;  // of this lane, or NULL where its batch row does not exist
  TL_DEVICE_MEMBER uint2 at(int block) const { return row ? *(const uint2 *)(row + block * 32) : make_uint2(0, 0); }
};

template <class W>
TL_DEVICE void add_blocks(float (&d)[4], const uint8_t *blocks, int n_blocks, const RightOperand &right, int first_block) {
  if (n_blocks == kSlotBytes / W::kBlockBytes) {
#pragma unroll
    for (int i = 0; i < kSlotBytes / W::kBlockBytes; i++) {
      uint32_t a[4];
      W::load(a, blocks + i * W::kBlockBytes);
      const uint2 b = right.at(first_block + i);
      W::Op::mma(d, a, b.x, b.y);
    }
    return;
  }
  for (int i = 0; i < n_blocks; i++) {
    uint32_t a[4];
    W::load(a, blocks + i * W::kBlockBytes);
    const uint2 b = right.at(first_block + i);
    W::Op::mma(d, a, b.x, b.y);
  }
}

// The same with a scale for each 64-column group of int8: groups are summed from zero, then scaled and added in order.
template <class W>
TL_DEVICE void add_scaled_blocks(float (&d)[4], const uint8_t *blocks, int n_blocks, const RightOperand &right, int first_block,
                                 const Matrix &m, int panel) {
  constexpr int kGroupBlocks = TL_INT8_GROUP / 16;
  for (int i = 0; i < n_blocks; i += kGroupBlocks) {
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    add_blocks<W>(s, blocks + i * W::kBlockBytes, min(kGroupBlocks, n_blocks - i), right, first_block + i);
    const float *scale = m.scales + scale_offset(m, panel * kPanelRows, (first_block + i) * 16 / m.group_size) + lane_id() / 4;
#pragma unroll
    for (int j = 0; j < 4; j++) d[j] = fmaf(s[j], scale[j / 2 * 8], d[j]);
  }
}

// What the CTA needs of earlier kernels, to shared memory: the operand rows, `stride` bytes apart so that a warp's loads
// meet every bank once, and what its outputs are added to.
template <class W>
TL_DEVICE void fetch_rows(const GemvArgs &g, uint8_t *operand, int stride, float *addend, int first_output, int n_outputs, float *row,
                          const EarlyWeights &early) {
  if (g.epilogue.kind == kAddToRows)
    for (int i = threadIdx.x * 4; i < g.n_rows * n_outputs; i += kThreads * 4)
      copy16_async(addend + i, g.epilogue.addend + (int64_t)(i / n_outputs) * g.epilogue.stride + first_output + i % n_outputs);
  if (g.program.n_ops) {
    run_row_program(g.program, 0, blockIdx.x == 0, row, early);
    emit_operand(g.program, 0, row, [&](int column, float lo, float hi) {
      *(uint32_t *)(operand + operand_position(column) * 2) = W::Op::pack(lo, hi);
    });
  } else {
    const int row_bytes = g.source.n_in * 2;
    for (int r = 0; r < g.n_rows; r++)
      for (int i = threadIdx.x * 16; i < row_bytes; i += kThreads * 16)
        copy16_async(operand + r * stride + i, (const uint8_t *)g.source.data + (int64_t)r * row_bytes + i);
  }
}

// Outputs of panels first .. first + n - 1 of the CTA, from their chunks' sums: partial[(panel, chunk, row, 16)].
template <class W>
TL_DEVICE void finish_panels(const GemvArgs &g, const float *partial, const float *addend, int first_panel, int n_panels, int n_chunks, int begin,
                             int n_outputs) {
  const int rows = g.n_rows, per_unit = rows * kPanelRows;
  const bool scaled = W::kInt8 && !g.weight.group_size, gated = g.unit_panels == 2;
  const auto total = [&](int panel, int at) {
    const float *p = partial + (int64_t)(panel * n_chunks) * per_unit + at;
    float sum = 0.0f;
    for (int c = 0; c < n_chunks; c++) sum = sum + p[c * per_unit];
    const int output = (first_panel + panel) * kPanelRows + at % kPanelRows;
    if (scaled) sum = sum * g.weight.scales[output];
    return g.bias ? sum + g.bias[output] : sum;
  };
  for (int i = threadIdx.x; i < n_panels / g.unit_panels * per_unit; i += kThreads) {
    const int panel = i / per_unit * g.unit_panels, at = i % per_unit;
    const int output = (first_panel + panel) * kPanelRows + at % kPanelRows;
    const int row = at / kPanelRows;
    if (gated)
      finish_gated(g.epilogue, row, output, total(panel, at), total(panel + 1, at));
    else if (g.epilogue.kind == kAddToRows)
      g.epilogue.out[(int64_t)row * g.epilogue.stride + output] = addend[row * n_outputs + output - begin] + total(panel, at);
    else
      finish_output(g.epilogue, row, output, total(panel, at));
  }
}

TL_BOTH int operand_stride(int n_in) { return round_up(n_in * 2, 128) + 32; }

template <class W>
__global__ void __launch_bounds__(kThreads) gemv(const GemvArgs g) {
  constexpr int kChunkBlocks = TL_K_CHUNK / 16, kSlotBlocks = kSlotBytes / W::kBlockBytes;
  uint8_t *shared = shared_memory<uint8_t>();
  const int k_pad = pad16(g.weight.n_in), n_chunks = (k_pad + TL_K_CHUNK - 1) / TL_K_CHUNK, stride = operand_stride(k_pad);
  const int n_units = g.weight.n_out / kPanelRows / g.unit_panels;
  const int first_panel = (int)((int64_t)n_units * blockIdx.x / gridDim.x) * g.unit_panels;
  const int end_panel = (int)((int64_t)n_units * (blockIdx.x + 1) / gridDim.x) * g.unit_panels;
  const int n_panels = end_panel - first_panel, first_output = first_panel * kPanelRows, n_outputs = n_panels * kPanelRows;
  const int64_t panel_bytes = panel_nbytes(g.weight.dtype, g.weight.n_in);
  uint8_t *operand = shared + kRingBytes + kWarps * kSlots * 8;
  float *partial = (float *)(operand + g.n_rows * stride);
  float *addend = partial + g.round_panels * n_chunks * g.n_rows * kPanelRows;
  float *row = addend + (g.epilogue.kind == kAddToRows ? g.n_rows * n_outputs : 0);

  ChunkStream<W> stream(g.weight.data + first_panel * panel_bytes, panel_bytes, n_panels, n_chunks, shared + warp_id() * kSlots * kSlotBytes,
                        (uint64_t *)(shared + kRingBytes) + warp_id() * kSlots);
  let_next_kernel_start();
  EarlyWeights early;
  early.load(g.program);
  wait_for_previous_kernel();
  fetch_rows<W>(g, operand, stride, addend, first_output, n_outputs, row, early);
  commit_copies();
  wait_copies<0>();  // before Hopper, of the ring as well
  __syncthreads();

  const int lane = lane_id(), group = lane / 4;
  const RightOperand right{group < g.n_rows ? operand + group * stride + lane % 4 * 8 : nullptr};
  ChunkWalk at(n_chunks);
  for (int begin = 0; begin < n_panels; begin += g.round_panels) {
    const int end = min(begin + g.round_panels, n_panels);
    for (; at.panel < end; at.next()) {
      const int first = at.chunk * kChunkBlocks, n_blocks = min(kChunkBlocks, k_pad / 16 - first);
      float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int part = 0; part < ChunkStream<W>::kParts; part++) {
        const uint8_t *blocks = stream.wait();
        const int n = min(kSlotBlocks, n_blocks - part * kSlotBlocks);
        if (W::kInt8 && g.weight.group_size)
          add_scaled_blocks<W>(d, blocks, n, right, first + part * kSlotBlocks, g.weight, first_panel + at.panel);
        else
          add_blocks<W>(d, blocks, n, right, first + part * kSlotBlocks);
        stream.done();
      }
      float *sums = partial + (int64_t)((at.panel - begin) * n_chunks + at.chunk) * g.n_rows * kPanelRows;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int column = lane % 4 * 2 + j % 2;
        if (column < g.n_rows) sums[column * kPanelRows + group + j / 2 * 8] = d[j];
      }
    }
    __syncthreads();
    finish_panels<W>(g, partial, addend, first_panel + begin, end - begin, n_chunks, first_output, n_outputs);
    if (end < n_panels) __syncthreads();
  }
#if !TL_HOPPER
  wait_copies<0>();
#endif
}

}  // namespace

int gemv_shared_nbytes(const tl_context &context, const GemvArgs &g, int *round_panels) {
  const int k_pad = pad16(g.weight.n_in), n_chunks = (k_pad + TL_K_CHUNK - 1) / TL_K_CHUNK;
  const int panel = n_chunks * g.n_rows * kPanelRows * 4, n_units = g.weight.n_out / kPanelRows / g.unit_panels;
  const int most_units = (n_units + context.n_multiprocessors - 1) / context.n_multiprocessors;
  *round_panels = std::max(1, kRoundBytes / panel / g.unit_panels) * g.unit_panels;
  const int slots = context.code >= kCodeSm90 ? kHopperSlots : kOlderSlots;
  const int row = g.program.n_ops ? row_program_floats(g.program.dim) * 4 : 0;
  const int addend = g.epilogue.kind == kAddToRows ? g.n_rows * most_units * g.unit_panels * kPanelRows * 4 : 0;
  return kWarps * slots * (kSlotBytes + 8) + g.n_rows * operand_stride(k_pad) + *round_panels * panel + addend + row;
}

void launch_gemv(const Launcher &launcher, const GemvArgs &asked) {
  GemvArgs args = asked;
  const int nbytes = gemv_shared_nbytes(launcher.context, args, &args.round_panels);
  const int n_units = args.weight.n_out / kPanelRows / args.unit_panels;
  const Shape shape{dim3(std::min(n_units, launcher.context.n_multiprocessors)), kThreads, nbytes, 1};
  switch (args.weight.dtype) {
    case TL_BF16: return launcher.launch(gemv<FloatWeights<Bf16>>, shape, args);
    case TL_F16: return launcher.launch(gemv<FloatWeights<F16>>, shape, args);
    default: return launcher.launch(gemv<Int8Weights>, shape, args);
  }
}

}  // namespace tl
