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
#pragma unroll 1
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

// A run of kCount blocks: their loads first, so that only the chain of products remains.
template <class W, int kCount>
TL_DEVICE void add_run(float (&d)[4], const uint8_t *blocks, const RightOperand &right, int first_block) {
  uint32_t a[kCount][4];
  uint2 b[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    W::load(a[i], blocks + i * W::kBlockBytes);
    b[i] = right.at(first_block + i);
  }
#pragma unroll
  for (int i = 0; i < kCount; i++) W::Op::mma(d, a[i], b[i].x, b[i].y);
}

template <class W>
TL_DEVICE void add_blocks(float (&d)[4], const uint8_t *blocks, int n_blocks, const RightOperand &right, int first_block) {
  int i = 0;
#pragma unroll 1
  for (; i + 4 <= n_blocks; i += 4) add_run<W, 4>(d, blocks + i * W::kBlockBytes, right, first_block + i);
#pragma unroll 1
  for (; i < n_blocks; i++) add_run<W, 1>(d, blocks + i * W::kBlockBytes, right, first_block + i);
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

// Shared memory behind the ring and its barriers.
struct Shared {
  uint8_t *operand;         // rows `operand_stride` bytes apart
  float *partial;           // (panels of a round, n_chunks, n_rows, 16) sums
  float *scale, *bias;      // of the CTA's outputs
  float *addend;            // (n_rows, outputs)
  float *norm_partial;
  int nbytes;
};

// A stride that lets a warp's loads of eight rows meet every bank once.
TL_BOTH int operand_stride(int n_in) { return round_up(n_in * 2, 128) + 32; }

TL_BOTH Shared lay_out(uint8_t *base, const GemvArgs &g, int n_outputs) {
  const int k_pad = pad16(g.weight.n_in), n_chunks = (k_pad + TL_K_CHUNK - 1) / TL_K_CHUNK;
  int at = 0;
  const auto take = [&](int nbytes) {
    uint8_t *p = base + at;
    at += round_up(nbytes, 16);
    return p;
  };
  Shared s;
  s.operand = take(g.n_rows * operand_stride(k_pad));
  s.partial = (float *)take(g.round_panels * n_chunks * g.n_rows * kPanelRows * 4);
  s.scale = (float *)take(g.weight.dtype == TL_INT8 ? n_outputs * 4 : 0);
  s.bias = (float *)take(g.bias ? n_outputs * 4 : 0);
  s.addend = (float *)take(g.epilogue.kind == kAddToRows ? g.n_rows * n_outputs * 4 : 0);
  s.norm_partial = (float *)take(2 * kWarps * 4);
  s.nbytes = at;
  return s;
}

TL_DEVICE void copy_floats(float *to, const float *from, int n) {  // n a multiple of four
#pragma unroll 1
  for (int i = threadIdx.x * 4; i < n; i += kThreads * 4) copy16_async(to + i, from + i);
}

// Outputs of panels begin .. end - 1 of the CTA, from their chunks' sums.
template <class W>
TL_DEVICE void finish_panels(const GemvArgs &g, const Shared &s, int first_output, int n_outputs, int begin, int end, int n_chunks) {
  const bool scaled = W::kInt8 && !g.weight.group_size, gated = g.unit_panels == 2;
  const int per_chunk = g.n_rows * kPanelRows, lane = threadIdx.x % kPanelRows;
#pragma unroll 1
  for (int i = threadIdx.x / kPanelRows; i < (end - begin) / g.unit_panels * g.n_rows; i += kThreads / kPanelRows) {
    const int row = g.n_rows == 1 ? 0 : i % g.n_rows, panel = (g.n_rows == 1 ? i : i / g.n_rows) * g.unit_panels;
    const auto total = [&](int panel) {
      const float *p = s.partial + panel * n_chunks * per_chunk + row * kPanelRows + lane;
      const int output = (begin + panel) * kPanelRows + lane;
      float sum = 0.0f;
#pragma unroll 4
      for (int c = 0; c < n_chunks; c++) sum = sum + p[c * per_chunk];
      if (scaled) sum = sum * s.scale[output];
      return g.bias ? sum + s.bias[output] : sum;
    };
    const int output = (begin + panel) * kPanelRows + lane;  // of the CTA's
    if (gated)
      finish_gated(g.epilogue, row, first_output + output, total(panel), total(panel + 1));
    else if (g.epilogue.kind == kAddToRows)
      g.epilogue.out[(int64_t)row * g.epilogue.stride + first_output + output] = s.addend[row * n_outputs + output] + total(panel);
    else
      finish_output(g.epilogue, row, first_output + output, total(panel));
  }
}

template <class W, bool kProgram>
__global__ void __launch_bounds__(kThreads, 2) gemv(const GemvArgs g) {
  constexpr int kChunkBlocks = TL_K_CHUNK / 16, kSlotBlocks = kSlotBytes / W::kBlockBytes;
  uint8_t *shared = shared_memory<uint8_t>();
  const int k_pad = pad16(g.weight.n_in), n_chunks = (k_pad + TL_K_CHUNK - 1) / TL_K_CHUNK, stride = operand_stride(k_pad);
  const int n_units = g.weight.n_out / kPanelRows / g.unit_panels;
  const int first_panel = (int)((int64_t)n_units * blockIdx.x / gridDim.x) * g.unit_panels;
  const int end_panel = (int)((int64_t)n_units * (blockIdx.x + 1) / gridDim.x) * g.unit_panels;
  const int n_panels = end_panel - first_panel, first_output = first_panel * kPanelRows, n_outputs = n_panels * kPanelRows;
  const int64_t panel_bytes = panel_nbytes(g.weight.dtype, g.weight.n_in);
  const Shared s = lay_out(shared + kRingBytes + kWarps * kSlots * 8, g, n_outputs);

  ChunkStream<W> stream(g.weight.data + first_panel * panel_bytes, panel_bytes, n_panels, n_chunks, shared + warp_id() * kSlots * kSlotBytes,
                        (uint64_t *)(shared + kRingBytes) + warp_id() * kSlots);
  let_next_kernel_start();
  if (W::kInt8 && !g.weight.group_size) copy_floats(s.scale, g.weight.scales + first_output, n_outputs);
  if (g.bias) copy_floats(s.bias, g.bias + first_output, n_outputs);
  EarlyNorm<kGemvQuads, true> early;
  if (kProgram) early.load(g.program);
  wait_for_previous_kernel();
  if (kProgram) {
    float4 v[kGemvQuads];
    run_row_program<kGemvQuads, true>(g.program, 0, blockIdx.x == 0, v, s.norm_partial, early);
    emit_operand<kGemvQuads, true>(g.program, 0, v, [&](int column, float lo, float hi, int count) {
      uint16_t *to = (uint16_t *)s.operand + operand_position(column);
      if (count == 2)
        *(uint32_t *)to = W::Op::pack(lo, hi);
      else
        *to = (uint16_t)W::Op::pack(lo, 0.0f);
    });
  } else {
    if (g.epilogue.kind == kAddToRows)
#pragma unroll 1
      for (int r = 0; r < g.n_rows; r++)
        copy_floats(s.addend + r * n_outputs, g.epilogue.addend + (int64_t)r * g.epilogue.stride + first_output, n_outputs);
#pragma unroll 1
    for (int r = 0; r < g.n_rows; r++)
#pragma unroll 4
      for (int i = threadIdx.x * 16; i < k_pad * 2; i += kThreads * 16)
        copy16_async(s.operand + r * stride + i, (const uint8_t *)g.source.data + (int64_t)r * k_pad * 2 + i);
  }
  commit_copies();
  wait_copies<0>();  // before Hopper, of the ring as well
  __syncthreads();

  const int lane = lane_id(), group = lane / 4;
  const RightOperand right{group < g.n_rows ? s.operand + group * stride + lane % 4 * 8 : nullptr};
  ChunkWalk at(n_chunks);
#pragma unroll 1
  for (int begin = 0; begin < n_panels; begin += g.round_panels) {
    const int end = min(begin + g.round_panels, n_panels);
#pragma unroll 1
    for (; at.panel < end; at.next()) {
      const int first = at.chunk * kChunkBlocks, n_blocks = min(kChunkBlocks, k_pad / 16 - first);
      float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
      for (int part = 0; part < ChunkStream<W>::kParts; part++) {
        const uint8_t *blocks = stream.wait();
        const int n = min(kSlotBlocks, n_blocks - part * kSlotBlocks);
        if (W::kInt8 && g.weight.group_size)
          add_scaled_blocks<W>(d, blocks, n, right, first + part * kSlotBlocks, g.weight, first_panel + at.panel);
        else
          add_blocks<W>(d, blocks, n, right, first + part * kSlotBlocks);
        stream.done();
      }
      float *sums = s.partial + ((at.panel - begin) * n_chunks + at.chunk) * g.n_rows * kPanelRows;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int column = lane % 4 * 2 + j % 2;
        if (column < g.n_rows) sums[column * kPanelRows + group + j / 2 * 8] = d[j];
      }
    }
    __syncthreads();
    finish_panels<W>(g, s, first_output, n_outputs, begin, end, n_chunks);
    if (end < n_panels) __syncthreads();
  }
#if !TL_HOPPER
  wait_copies<0>();
#endif
}

template <class W>
void launch_with(const Launcher &launcher, const Shape &shape, const GemvArgs &args) {
  if (args.program.n_ops)
    launcher.launch(gemv<W, true>, shape, args);
  else
    launcher.launch(gemv<W, false>, shape, args);
}

}  // namespace

int gemv_shared_nbytes(const tl_context &context, GemvArgs &g) {
  const int n_chunks = (pad16(g.weight.n_in) + TL_K_CHUNK - 1) / TL_K_CHUNK, panel = n_chunks * g.n_rows * kPanelRows * 4;
  const int n_units = g.weight.n_out / kPanelRows / g.unit_panels;
  const int most_units = (n_units + context.n_multiprocessors - 1) / context.n_multiprocessors;
  g.round_panels = std::max(1, kRoundBytes / panel / g.unit_panels) * g.unit_panels;
  const int slots = context.code >= kCodeSm90 ? kHopperSlots : kOlderSlots;
  return kWarps * slots * (kSlotBytes + 8) + lay_out(nullptr, g, most_units * g.unit_panels * kPanelRows).nbytes;
}

void launch_gemv(const Launcher &launcher, const GemvArgs &asked) {
  GemvArgs args = asked;
  const int nbytes = gemv_shared_nbytes(launcher.context, args), n_units = args.weight.n_out / kPanelRows / args.unit_panels;
  const Shape shape{dim3(std::min(n_units, launcher.context.n_multiprocessors)), kThreads, nbytes, 1};
  switch (args.weight.dtype) {
    case TL_BF16: return launch_with<FloatWeights<Bf16>>(launcher, shape, args);
    case TL_F16: return launch_with<FloatWeights<F16>>(launcher, shape, args);
    default: return launch_with<Int8Weights>(launcher, shape, args);
  }
}

}  // namespace tl
