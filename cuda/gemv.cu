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
constexpr int kSlots = 3;  // of a warp's ring
constexpr int kRingBytes = kWarps * kSlots * kSlotBytes;
constexpr int kRoundBytes = 4096;  // of partial sums, where that holds a unit

// The chunks of a warp, in order, through its ring: part q of the warp is in slot q % kSlots.
template <class W>
struct ChunkStream {
  static constexpr int kParts = TL_K_CHUNK / 16 * W::kBlockBytes / kSlotBytes;  // slots of one chunk
  const uint8_t *weights;  // the CTA's first panel
  int64_t panel_bytes;
  int n_items, n_chunks;
  uint8_t *ring;
  uint64_t *full;

  // Bytes of part q; 0 past the end of a short last chunk, below 0 past the last item.
  TL_DEVICE_MEMBER int find(int q, int64_t &offset) const {
    const int item = warp_id() + kWarps * (q / kParts);
    if (item >= n_items) return -1;
    const int64_t in_panel = (int64_t)(item % n_chunks * kParts + q % kParts) * kSlotBytes, left = panel_bytes - in_panel;
    offset = item / n_chunks * panel_bytes + in_panel;
    return left >= kSlotBytes ? kSlotBytes : left > 0 ? (int)left : 0;
  }

#if TL_HOPPER
  TL_DEVICE_MEMBER void init() {
    if (lane_id() == 0)
      for (int s = 0; s < kSlots; s++) barrier_init(full + s, 1);
    barrier_init_done();
    __syncwarp();
  }
  TL_DEVICE_MEMBER void request(int q) {
    int64_t offset;
    const int nbytes = find(q, offset);
    if (lane_id() != 0 || nbytes < 0) return;
    uint64_t *barrier = full + q % kSlots;
    barrier_arrive_expecting(barrier, nbytes);
    if (nbytes) copy_bulk(ring + q % kSlots * kSlotBytes, weights + offset, nbytes, barrier);
  }
  TL_DEVICE_MEMBER void wait(int q) { barrier_wait(full + q % kSlots, q / kSlots % 2); }
#else
  TL_DEVICE_MEMBER void init() {}
  TL_DEVICE_MEMBER void request(int q) {
    int64_t offset;
    const int nbytes = find(q, offset);
    for (int i = lane_id() * 16; i < nbytes; i += 512) copy16_async(ring + q % kSlots * kSlotBytes + i, weights + offset + i);
    commit_copies();
  }
  TL_DEVICE_MEMBER void wait(int) {
    wait_copies<kSlots - 1>();
    __syncwarp();
  }
#endif
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

// Lays out the operand rows in shared memory: `stride` bytes apart, so that a warp's loads meet every bank once.
template <class W>
TL_DEVICE void fetch_operand(const GemvArgs &g, uint8_t *operand, int stride, float *row) {
  if (g.program.n_ops) {
    run_row_program(g.program, 0, blockIdx.x == 0, row);
    emit_operand(g.program, 0, row, [&](int column, float lo, float hi) {
      *(uint32_t *)(operand + operand_position(column) * 2) = W::Op::pack(lo, hi);
    });
    return;
  }
  const int row_bytes = g.source.n_in * 2, n = g.n_rows * row_bytes / 16;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const int r = i * 16 / row_bytes, at = i * 16 % row_bytes;
    *(uint4 *)(operand + r * stride + at) = load_fresh((const uint4 *)((const uint8_t *)g.source.data + (int64_t)r * row_bytes + at));
  }
}

// Outputs of panels first .. first + n - 1 of the CTA, from their chunks' sums: partial[(panel, chunk, row, 16)].
template <class W>
TL_DEVICE void finish_panels(const GemvArgs &g, const float *partial, int first_panel, int n_panels, int n_chunks) {
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
    if (gated)
      finish_gated(g.epilogue, at / kPanelRows, output, total(panel, at), total(panel + 1, at));
    else
      finish_output(g.epilogue, at / kPanelRows, output, total(panel, at));
  }
}

TL_BOTH int operand_stride(int n_in) { return round_up(n_in * 2, 128) + 32; }

template <class W>
__global__ void __launch_bounds__(kThreads) gemv(const GemvArgs g) {
  uint8_t *shared = shared_memory<uint8_t>();
  const int k_pad = pad16(g.weight.n_in), n_chunks = (k_pad + TL_K_CHUNK - 1) / TL_K_CHUNK, stride = operand_stride(k_pad);
  const int n_units = g.weight.n_out / kPanelRows / g.unit_panels;
  const int first_panel = (int)((int64_t)n_units * blockIdx.x / gridDim.x) * g.unit_panels;
  const int end_panel = (int)((int64_t)n_units * (blockIdx.x + 1) / gridDim.x) * g.unit_panels;
  const int n_items = (end_panel - first_panel) * n_chunks, round_items = g.round_panels * n_chunks;

  ChunkStream<W> stream;
  stream.panel_bytes = panel_nbytes(g.weight.dtype, g.weight.n_in);
  stream.weights = g.weight.data + first_panel * stream.panel_bytes;
  stream.n_items = n_items;
  stream.n_chunks = n_chunks;
  stream.ring = shared + warp_id() * kSlots * kSlotBytes;
  stream.full = (uint64_t *)(shared + kRingBytes) + warp_id() * kSlots;
  uint8_t *operand = shared + kRingBytes + kWarps * kSlots * 8;
  float *partial = (float *)(operand + g.n_rows * stride);
  float *row = partial + g.round_panels * n_chunks * g.n_rows * kPanelRows;

  stream.init();
  for (int q = 0; q < kSlots; q++) stream.request(q);
  let_next_kernel_start();
  wait_for_previous_kernel();
  fetch_operand<W>(g, operand, stride, row);
  __syncthreads();

  const int lane = lane_id(), group = lane / 4;
  const RightOperand right{group < g.n_rows ? operand + group * stride + lane % 4 * 8 : nullptr};
  int q = 0, item = warp_id();
  for (int begin = 0; begin < n_items; begin += round_items) {
    for (; item < min(begin + round_items, n_items); item += kWarps) {
      const int chunk = item % n_chunks, n_blocks = min(TL_K_CHUNK / 16, k_pad / 16 - chunk * (TL_K_CHUNK / 16));
      constexpr int kSlotBlocks = kSlotBytes / W::kBlockBytes;
      float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int part = 0; part < ChunkStream<W>::kParts; part++, q++) {
        stream.wait(q);
        const uint8_t *blocks = stream.ring + q % kSlots * kSlotBytes;
        const int n = min(kSlotBlocks, n_blocks - part * kSlotBlocks), first = chunk * (TL_K_CHUNK / 16) + part * kSlotBlocks;
        if (W::kInt8 && g.weight.group_size)
          add_scaled_blocks<W>(d, blocks, n, right, first, g.weight, first_panel + item / n_chunks);
        else
          add_blocks<W>(d, blocks, n, right, first);
        __syncwarp();
        stream.request(q + kSlots);
      }
      float *sums = partial + (int64_t)(item - begin) * g.n_rows * kPanelRows;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int column = lane % 4 * 2 + j % 2;
        if (column < g.n_rows) sums[column * kPanelRows + group + j / 2 * 8] = d[j];
      }
    }
    __syncthreads();
    const int panels = min(g.round_panels, end_panel - first_panel - begin / n_chunks);
    finish_panels<W>(g, partial, first_panel + begin / n_chunks, panels, n_chunks);
    __syncthreads();
  }
#if !TL_HOPPER
  wait_copies<0>();
#endif
}

}  // namespace

int gemv_shared_nbytes(const tl_matrix &weight, int n_rows, bool program, int unit_panels, int *round_panels) {
  const int k_pad = pad16(weight.n_in), n_chunks = (k_pad + TL_K_CHUNK - 1) / TL_K_CHUNK;
  const int panel = n_chunks * n_rows * kPanelRows * 4;
  *round_panels = std::max(1, kRoundBytes / panel / unit_panels) * unit_panels;
  const int row = program ? row_program_floats(weight.n_in) * 4 : 0;
  return kRingBytes + kWarps * kSlots * 8 + n_rows * operand_stride(k_pad) + *round_panels * panel + row;
}

void launch_gemv(const Launcher &launcher, GemvArgs &args) {
  tl_matrix sizes = {};
  sizes.n_in = args.weight.n_in;
  const int nbytes = gemv_shared_nbytes(sizes, args.n_rows, args.program.n_ops > 0, args.unit_panels, &args.round_panels);
  const int n_units = args.weight.n_out / kPanelRows / args.unit_panels;
  const Shape shape{dim3(std::min(n_units, launcher.context.n_multiprocessors)), kThreads, nbytes, 1};
  switch (args.weight.dtype) {
    case TL_BF16: return launcher.launch(gemv<FloatWeights<Bf16>>, shape, args);
    case TL_F16: return launcher.launch(gemv<FloatWeights<F16>>, shape, args);
    default: return launcher.launch(gemv<Int8Weights>, shape, args);
  }
}

}  // namespace tl
