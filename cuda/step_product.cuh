// A product of one row, as a task of a step (step.cu). The bits are those of gemv.cu: every chunk of columns from zero by one warp, the
// sums of an output in index order. What counts here is how few instructions depend on each other from the last word that comes in to
// the first that goes out.
#pragma once

#include "step_stream.cuh"
#include "weights.cuh"

namespace tl {

constexpr int kRoundBytes = 8192;  // of partial sums, where that holds a unit

// Shared memory of products; step_attend.cuh lays out attention's.
struct StepMemory {
  uint8_t *operand;     // of the product's row
  float *partial;       // (panels, n_chunks, 16) of a round
  float *norm;          // kEarlyNorms times the row's width
  float *norm_partial;  // 2 * kWarps
  uint8_t *attention;
};

struct Handover {
  uint8_t *channels;
  int channel_nbytes;
  uint64_t flag;  // of the task that runs
  TL_DEVICE_MEMBER uint8_t *words(const Channel &c) const { return channels + (int64_t)c.index * channel_nbytes; }
};

#if TL_HOPPER

constexpr int kTaskBarrier = 1;  // of the kThreads that compute

TL_DEVICE void meet() { sync_threads(kTaskBarrier, kThreads); }

TL_DEVICE uint64_t two_floats(float a, float b) { return (uint64_t)float_bits(b) << 32 | float_bits(a); }
TL_DEVICE float low_float(uint64_t word) { return bits_float((uint32_t)word); }
TL_DEVICE float high_float(uint64_t word) { return bits_float((uint32_t)(word >> 32)); }

// A thread's quads of a row of floats: from words of two floats each, or from memory.
TL_DEVICE void take_quads(float4 (&v)[kStepQuads], const Handover &hand, const Channel &c, const float *p, int n) {
  if (c.index < 0) return load_quads<kStepQuads, true>(v, p, n);
  uint64_t data[2 * kStepQuads];
  const uint8_t *from = hand.words(c) + threadIdx.x * 32;
  const int mine = quad_index(1) < n ? 4 : quad_index(0) < n ? 2 : 0;
  static_assert(kStepQuads == 2, "two quads are four words");
  await_words(data, mine, hand.flag - c.back, [&](int i) { return from + i / 2 * (kThreads * 32) + i % 2 * 16; });
#pragma unroll
  for (int j = 0; j < kStepQuads; j++)
    v[j] = 2 * j < mine ? make_float4(low_float(data[2 * j]), high_float(data[2 * j]), low_float(data[2 * j + 1]), high_float(data[2 * j + 1]))
                        : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

TL_DEVICE void hand_quads(const Handover &hand, const Channel &c, const float4 (&v)[kStepQuads], int n) {
#pragma unroll
  for (int j = 0; j < kStepQuads; j++) {
    if (quad_index(j) >= n) break;
    uint8_t *to = hand.words(c) + quad_index(j) * 8;
    store_flagged(to, two_floats(v[j].x, v[j].y), hand.flag);
    store_flagged(to + 16, two_floats(v[j].z, v[j].w), hand.flag);
  }
}

// A quad of the row, rounded, to the operand; behind the row at columns `behind` on.
TL_DEVICE void put_quad(uint16_t *operand, int dtype, int column, const float4 &q) {
  *(uint32_t *)(operand + operand_position(column)) = pack_pair(dtype, q.x, q.y);
  *(uint32_t *)(operand + operand_position(column + 2)) = pack_pair(dtype, q.z, q.w);
}

// The row program, to the operand in shared memory. What it may read early it reads first: weights of norms, and a row that is added.
TL_DEVICE void run_step_program(const StepProduct &t, const StepMemory &m, const Handover &hand) {
  const int n = t.dim, early = t.early, dtype = operand_dtype(t.weight.dtype);
#pragma unroll
  for (int i = 0; i < kEarlyNorms; i++)
#pragma unroll
    for (int j = 0; j < kStepQuads; j++)
      if (i < t.n_early_norms && quad_index(j) < n) copy16_async(m.norm + i * n + quad_index(j), t.early_norm[i] + quad_index(j));
  commit_copies();
  float4 v[kStepQuads], other[kStepQuads];
  if (early) take_quads(other, hand, t.op[early].channel, t.op[early].p, n);
  take_quads(v, hand, t.op[0].channel, t.op[0].p, n);
  int n_norms = 0;
#pragma unroll 1
  for (int o = 1; o < t.n_ops; o++) {
    const StepOp op = t.op[o];
    if (op.kind == kRowNorm) {
      const float *weight = n_norms < kEarlyNorms ? m.norm + n_norms * n : op.p;
      wait_copies<0>();
      norm_quads<kStepQuads>(v, [&](int j) { return *(const float4 *)(weight + quad_index(j)); }, n, t.eps, m.norm_partial + n_norms % 2 * kWarps, meet);
      n_norms++;
    } else if (op.kind == kRowAdd) {
      if (o != early) take_quads(other, hand, op.channel, op.p, n);
#pragma unroll
      for (int j = 0; j < kStepQuads; j++)
        v[j] = make_float4(v[j].x + other[j].x, v[j].y + other[j].y, v[j].z + other[j].z, v[j].w + other[j].w);
    } else if (blockIdx.x == 0) {  // kRowStore
#pragma unroll
      for (int j = 0; j < kStepQuads; j++)
        if (quad_index(j) < n) store_quad<true>(const_cast<float *>(op.p), quad_index(j), n, v[j]);
      if (op.channel.index >= 0) hand_quads(hand, op.channel, v, n);
    }
  }
  wait_copies<0>();
  uint16_t *operand = (uint16_t *)m.operand;
#pragma unroll
  for (int j = 0; j < kStepQuads; j++)
    if (quad_index(j) < n) put_quad(operand, dtype, quad_index(j), v[j]);
  int n_in = n;
  if (t.tail) {
    n_in = 2 * n;
    load_quads<kStepQuads, true>(other, t.tail, n);
#pragma unroll
    for (int j = 0; j < kStepQuads; j++)
      if (quad_index(j) < n) put_quad(operand, dtype, n + quad_index(j), other[j]);
  }
  if ((int)threadIdx.x < pad16(n_in) - n_in) operand[operand_position(n_in + threadIdx.x)] = 0;
}

// The operand that an earlier task left: words of four columns.
TL_DEVICE void take_operand(const StepProduct &t, const StepMemory &m, const Handover &hand) {
  const int n = t.n_blocks * 4;  // words
  if (t.operand.index < 0) {
#pragma unroll 2
    for (int i = threadIdx.x * 16; i < t.n_blocks * 32; i += kThreads * 16) *(uint4 *)(m.operand + i) = *(const uint4 *)((const uint8_t *)t.source + i);
    return;
  }
  constexpr int kAtOnce = 4;
  const uint8_t *words = hand.words(t.operand);
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += kThreads * kAtOnce) {
    uint64_t data[kAtOnce];
    const int mine = (n - i + kThreads - 1) / kThreads;
    await_words(data, mine, hand.flag - t.operand.back, [&](int j) { return words + (i + j * kThreads) * 16; });
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      if (j >= mine) break;
      uint16_t *to = (uint16_t *)m.operand;
      const int column = (i + j * kThreads) * 4;
      *(uint32_t *)(to + operand_position(column)) = (uint32_t)data[j];
      *(uint32_t *)(to + operand_position(column + 2)) = (uint32_t)(data[j] >> 32);
    }
  }
}

// Hands on the outputs of neighbouring lanes, two floats or four operands a word. All lanes of a warp call it.
TL_DEVICE void hand_output(const StepProduct &t, const Handover &hand, int output, float y, bool exists) {
  if (t.out.index < 0) return;
  uint8_t *words = hand.words(t.out);
  const float next = __shfl_sync(0xffffffffu, y, lane_id() + 1);
  if (t.epilogue.kind != kActivate) {
    if (exists && output % 2 == 0) store_flagged(words + output * 8, two_floats(y, next), hand.flag);
    return;
  }
  const uint32_t pair = pack_pair(t.epilogue.operand.dtype, y, next), other = __shfl_sync(0xffffffffu, pair, lane_id() + 2);
  if (exists && output % 4 == 0) store_flagged(words + output * 4, (uint64_t)other << 32 | pair, hand.flag);
}

TL_DEVICE bool row_scaled(const Matrix &m) { return m.dtype == TL_INT8 && !m.group_size; }

// What an output needs besides its sums.
struct OutputExtras {
  float scale[2], bias[2], addend;
};
TL_DEVICE OutputExtras extras_of(const StepProduct &t, const Handover &hand, int output) {
  OutputExtras e = {{1.0f, 1.0f}, {0.0f, 0.0f}, 0.0f};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (i >= t.unit_panels) break;
    if (row_scaled(t.weight)) e.scale[i] = t.weight.scales[output + i * kPanelRows];
    if (t.bias) e.bias[i] = t.bias[output + i * kPanelRows];
  }
  if (t.epilogue.kind != kAddToRows) return e;
  if (t.addend.index < 0) {
    e.addend = t.epilogue.addend[output];
  } else {
    uint64_t word[1];
    const uint8_t *from = hand.words(t.addend) + output / 2 * 16;
    await_words(word, 1, hand.flag - t.addend.back, [&](int) { return from; });
    e.addend = output % 2 ? high_float(word[0]) : low_float(word[0]);
  }
  return e;
}

// A unit's output from its chunks' sums; `sums` is this lane's first.
TL_DEVICE float finish_unit(const StepProduct &t, const float *sums, const OutputExtras &e) {
  const int n = t.n_chunks;
  const auto total = [&](const float *p, int i) {
    float sum = 0.0f;
    int c = 0;
#pragma unroll 1
    for (; c + 4 <= n; c += 4, p += 4 * kPanelRows) {
      const float a = p[0], b = p[kPanelRows], d = p[2 * kPanelRows], f = p[3 * kPanelRows];
      sum = (((sum + a) + b) + d) + f;
    }
#pragma unroll 1
    for (; c < n; c++, p += kPanelRows) sum = sum + p[0];
    if (row_scaled(t.weight)) sum = sum * e.scale[i];
    return t.bias ? sum + e.bias[i] : sum;
  };
  const float y = total(sums, 0);
  if (t.epilogue.kind == kAddToRows) return e.addend + y;
  if (t.epilogue.kind != kActivate) return y;
  const float activated = activate(t.epilogue.act, y);
  return t.unit_panels == 2 ? activated * total(sums + n * kPanelRows, 1) : activated;
}

// Outputs of panels begin .. end - 1 of the share. `first` is for this thread's first output, where that is of the round.
TL_DEVICE void finish_round(const StepProduct &t, const StepMemory &m, const Handover &hand, const CtaShare &share, int begin, int end,
                            const OutputExtras &first) {
  const int unit_panels = t.unit_panels, n_panels = end - begin, lane = threadIdx.x % kPanelRows;
  int panel = threadIdx.x / kPanelRows * unit_panels;
#pragma unroll 1
  for (bool again = false;; again = true, panel += kThreads / kPanelRows * unit_panels) {
    const bool exists = panel < n_panels;
    if (!__any_sync(0xffffffffu, exists)) return;
    const int output = (share.first_panel + begin + panel) * kPanelRows + lane;
    const int column = unit_panels == 2 ? output / 32 * 16 + output % 16 : output;
    float y = 0.0f;
    if (exists)
      y = finish_unit(t, m.partial + panel * t.n_chunks * kPanelRows + lane, begin || again ? extras_of(t, hand, output) : first);
    hand_output(t, hand, column, y, exists);
    if (!exists) continue;
    switch (t.epilogue.kind) {
      case kActivate: store_operand(t.epilogue.operand, 0, column, y); break;
      case kToLogits: finish_output(t.epilogue, 0, column, y); break;
      default: t.epilogue.out[column] = y;
    }
  }
}

// This warp's items of the panels begin .. end - 1 of the share: the sums of their chunks. `panel` and `part` are the next item.
template <class W>
TL_DEVICE void sum_items(const StepProduct &t, const StepMemory &m, const Ring &ring, RingPlace &at, const CtaShare &share, int begin, int end, int &panel,
                         int &part) {
  constexpr int kBlocks = TL_K_CHUNK / 16, kChunks = W::kInt8 ? 2 : 1;
  const int lane = lane_id(), n_chunks = t.n_chunks, n_items = t.n_items, n_all = t.n_blocks;
  const shared_t right = shared_of(m.operand) + lane % 4 * 8;
  float *sums = m.partial + lane / 4;
#pragma unroll 1
  while (panel < end) {
    const int chunk = part * kChunks;
    const shared_t slot = ring.wait(at) + lane * W::kLaneBytes;
    float d[kChunks][4] = {};
#pragma unroll
    for (int i = 0; i < kChunks; i++) {
      const int block = (chunk + i) * kBlocks, n_blocks = n_all - block;
      const shared_t left = slot + i * kBlocks * W::kBlockBytes;
      if (W::kInt8 && t.weight.group_size)
        add_scaled_blocks<W>(d[i], left, right + block * 32, min(n_blocks, kBlocks), t.weight, share.first_panel + panel, block);
      else
        add_blocks<W, kBlocks, kBlocks / 2>(d[i], left, right + block * 32, n_blocks);
    }
    __syncwarp();
    if (lane == 0) ring.free(at, kArrivals);
    at.advance(kWarps, ring.n_slots);
    float *to = sums + ((panel - begin) * n_chunks + chunk) * kPanelRows;
#pragma unroll
    for (int i = 0; i < kChunks; i++)
      if (lane % 4 == 0 && chunk + i < n_chunks) to[i * kPanelRows] = d[i][0], to[i * kPanelRows + 8] = d[i][2];
    part += kWarps;
#pragma unroll 1
    while (part >= n_items) part -= n_items, panel++;
  }
}

// The CTA's share of a product. `settle` is called after the first barrier.
template <class Settle>
TL_DEVICE void run_product(const StepProduct &t, const StepMemory &m, const Handover &hand, const Ring &ring, RingPlace &base, const Settle &settle) {
  const CtaShare share = share_of(t, blockIdx.x);
  if (!share.n_panels) {
    meet();
    return settle();
  }
  OutputExtras first = {};
  const int own = (int)threadIdx.x / kPanelRows * t.unit_panels;
  if (own < share.n_panels) first = extras_of(t, hand, (share.first_panel + own) * kPanelRows + threadIdx.x % kPanelRows);
  if (t.n_ops)
    run_step_program(t, m, hand);
  else
    take_operand(t, m, hand);
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0), n_items = t.n_items, round_panels = t.round_panels, dtype = t.weight.dtype;
  RingPlace at = base;
  at.advance(warp, ring.n_slots);
  int panel = 0, part = warp;
#pragma unroll 1
  while (part >= n_items) part -= n_items, panel++;
  meet();
  settle();
#pragma unroll 1
  for (int begin = 0; begin < share.n_panels; begin += round_panels) {
    const int end = min(begin + round_panels, share.n_panels);
    // A warp that waits for an item has read the one eight before: the ring is no shorter, so no slot is two uses behind.
    if (dtype == TL_INT8)
      sum_items<Int8Weights>(t, m, ring, at, share, begin, end, panel, part);
    else if (dtype == TL_BF16)
      sum_items<FloatWeights<Bf16>>(t, m, ring, at, share, begin, end, panel, part);
    else
      sum_items<FloatWeights<F16>>(t, m, ring, at, share, begin, end, panel, part);
    meet();
    finish_round(t, m, hand, share, begin, end, first);
    if (end < share.n_panels) meet();
  }
  base.advance(share.n_panels * n_items, ring.n_slots);
}

#endif

}  // namespace tl
