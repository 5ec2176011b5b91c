// A product of one row, as a task of a step (step.cu). The bits are those of gemv.cu: every chunk of columns from zero by one
// warp, the sums of an output in index order.
#pragma once

#include "step_stream.cuh"
#include "weights.cuh"

namespace tl {

constexpr int kRoundBytes = 8192;  // of partial sums, where that holds a unit
constexpr int kStepQuads = 2;      // of a thread: rows of up to 2,048 floats
constexpr int kEarlyNorms = 2;     // of a program, whose weights are read ahead

// What consumers of a step share: shared memory of products, channels, and where in the order of tasks they are.
struct StepMemory {
  uint8_t *operand;     // of the product's row
  float *partial;       // (panels, n_chunks, 16) of a round
  float *norm;          // kEarlyNorms times the row's width
  float *norm_partial;  // 2 * kWarps
  uint8_t *attention;   // step_attend.cuh lays it out
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
  const int mine = max(0, (n / 4 - (int)threadIdx.x + kThreads - 1) / kThreads);
  await_words(data, 2 * mine, hand.flag - c.back, [&](int i) { return from + i / 2 * (kThreads * 32) + i % 2 * 16; });
#pragma unroll
  for (int j = 0; j < kStepQuads; j++)
    v[j] = j < mine ? make_float4(low_float(data[2 * j]), high_float(data[2 * j]), low_float(data[2 * j + 1]), high_float(data[2 * j + 1]))
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

// The row program, to the operand in shared memory. What it may read early it reads first: weights of norms, and a row that is added.
TL_DEVICE void run_step_program(const StepProduct &t, const StepMemory &m, const Handover &hand) {
  const RowProgram &p = t.program;
  const int n = p.dim;
  int n_norms = 0, early = 0;
#pragma unroll 1
  for (int o = 1; o < p.n_ops; o++) {
    if (p.op[o].kind == kRowNorm && n_norms++ < kEarlyNorms) {
      float *to = m.norm + (n_norms - 1) * n;
#pragma unroll 1
      for (int i = quad_index(0); i < n; i += 4 * kThreads) copy16_async(to + i, p.op[o].p + i);
    }
    if (!early && p.op[o].kind == kRowAdd && (t.op[o].index < 0 || t.op[o].back > 1)) early = o;
  }
  commit_copies();
  float4 v[kStepQuads], other[kStepQuads];
  if (early) take_quads(other, hand, t.op[early], p.op[early].p, n);
  n_norms = 0;
#pragma unroll 1
  for (int o = 0; o < p.n_ops; o++) {
    const RowOp &op = p.op[o];
    if (op.kind == kRowLoad) {
      take_quads(v, hand, t.op[o], op.p, n);
    } else if (op.kind == kRowAdd) {
      if (o != early) take_quads(other, hand, t.op[o], op.p, n);
#pragma unroll
      for (int j = 0; j < kStepQuads; j++)
        v[j] = make_float4(v[j].x + other[j].x, v[j].y + other[j].y, v[j].z + other[j].z, v[j].w + other[j].w);
    } else if (op.kind == kRowNorm) {
      wait_copies<0>();
      const float *weight = n_norms < kEarlyNorms ? m.norm + n_norms * n : op.p;
      norm_quads<kStepQuads>(v, [&](int j) { return *(const float4 *)(weight + quad_index(j)); }, n, p.eps, m.norm_partial + n_norms % 2 * kWarps, meet);
      n_norms++;
    } else if (blockIdx.x == 0) {  // kRowStore
#pragma unroll
      for (int j = 0; j < kStepQuads; j++)
        if (quad_index(j) < n) store_quad<true>(const_cast<float *>(op.p), quad_index(j), n, v[j]);
      if (t.op[o].index >= 0) hand_quads(hand, t.op[o], v, n);
    }
  }
  const int dtype = operand_dtype(t.weight.dtype);
  emit_operand<kStepQuads, true>(p, 0, v, [&](int column, float lo, float hi, int count) {
    uint16_t *to = (uint16_t *)m.operand + operand_position(column);
    if (count == 2)
      *(uint32_t *)to = pack_pair(dtype, lo, hi);
    else
      *to = (uint16_t)pack_pair(dtype, lo, 0.0f);
  });
}

// The operand that an earlier task left: words of four columns.
TL_DEVICE void take_operand(const StepProduct &t, const StepMemory &m, const Handover &hand) {
  const int n = t.n_blocks * 4;  // words
  if (t.operand.index < 0) {
#pragma unroll 2
    for (int i = threadIdx.x * 16; i < t.n_blocks * 32; i += kThreads * 16) *(uint4 *)(m.operand + i) = *(const uint4 *)((const uint8_t *)t.source.data + i);
    return;
  }
  constexpr int kAtOnce = 6;
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += kThreads * kAtOnce) {
    uint64_t data[kAtOnce];
    const int mine = min(kAtOnce, (n - i + kThreads - 1) / kThreads);
    const uint8_t *from = hand.words(t.operand) + i * 16;
    await_words(data, mine, hand.flag - t.operand.back, [&](int j) { return from + j * (kThreads * 16); });
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
  const float next = __shfl_sync(0xffffffffu, y, lane_id() + 1);
  if (t.epilogue.kind != kActivate) {
    if (exists && output % 2 == 0) store_flagged(hand.words(t.out) + output * 8, two_floats(y, next), hand.flag);
    return;
  }
  const uint32_t pair = pack_pair(t.epilogue.operand.dtype, y, next), other = __shfl_sync(0xffffffffu, pair, lane_id() + 2);
  if (exists && output % 4 == 0) store_flagged(hand.words(t.out) + output * 4, (uint64_t)other << 32 | pair, hand.flag);
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
    await_words(word, 1, hand.flag - t.addend.back, [&](int) { return hand.words(t.addend) + output / 2 * 16; });
    e.addend = output % 2 ? high_float(word[0]) : low_float(word[0]);
  }
  return e;
}

// Outputs of panels begin .. end - 1 of the share, from their chunks' sums. `first` is for this thread's first output, where that is of the round.
TL_DEVICE void finish_round(const StepProduct &t, const StepMemory &m, const Handover &hand, const CtaShare &share, int begin, int end,
                            const OutputExtras &first) {
  const bool scaled = row_scaled(t.weight);
  const int n_units = (end - begin) / t.unit_panels, lane = threadIdx.x % kPanelRows;
#pragma unroll 1
  for (int base = 0; base < n_units; base += kThreads / kPanelRows) {
    const int unit = base + threadIdx.x / kPanelRows;
    const bool exists = unit < n_units;
    if (!__any_sync(0xffffffffu, exists)) break;
    const int panel = begin + unit * t.unit_panels, output = (share.first_panel + panel) * kPanelRows + lane;
    float y = 0.0f;
    if (exists) {
      const OutputExtras e = begin == 0 && base == 0 ? first : extras_of(t, hand, output);
      const float *sums = m.partial + unit * t.unit_panels * t.n_chunks * kPanelRows + lane;
      const auto total = [&](int i) {
        const float *p = sums + i * t.n_chunks * kPanelRows;
        float sum = 0.0f;
#pragma unroll 8
        for (int c = 0; c < t.n_chunks; c++) sum = sum + p[c * kPanelRows];
        if (scaled) sum = sum * e.scale[i];
        return t.bias ? sum + e.bias[i] : sum;
      };
      y = total(0);
      if (t.unit_panels == 2)
        y = activate(t.epilogue.act, y) * total(1);
      else if (t.epilogue.kind == kActivate)
        y = activate(t.epilogue.act, y);
      else if (t.epilogue.kind == kAddToRows)
        y = e.addend + y;
    }
    const int column = t.unit_panels == 2 ? output / 32 * 16 + output % 16 : output;
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
  const int lane = lane_id();
  const shared_t right = shared_of(m.operand) + lane % 4 * 8;
#pragma unroll 1
  while (panel < end) {
    const shared_t slot = ring.wait(at) + lane * W::kLaneBytes;
    const int chunk = part * kChunks;
    float d[kChunks][4] = {};
#pragma unroll
    for (int i = 0; i < kChunks; i++) {
      const int block = (chunk + i) * kBlocks, n_blocks = t.n_blocks - block;
      const shared_t left = slot + i * kBlocks * W::kBlockBytes;
      if (W::kInt8 && t.weight.group_size)
        add_scaled_blocks<W>(d[i], left, right + block * 32, min(n_blocks, kBlocks), t.weight, share.first_panel + panel, block);
      else
        add_blocks<W, kBlocks, kBlocks / 2>(d[i], left, right + block * 32, n_blocks);
    }
    ring.done(at);
    at.advance(kWarps, ring.n_slots);
    float *sums = m.partial + ((panel - begin) * t.n_chunks + chunk) * kPanelRows + lane / 4;
#pragma unroll
    for (int i = 0; i < kChunks; i++)
      if (lane % 4 == 0 && chunk + i < t.n_chunks) sums[i * kPanelRows] = d[i][0], sums[i * kPanelRows + 8] = d[i][2];
    part += kWarps;
#pragma unroll 1
    while (part >= t.n_items) part -= t.n_items, panel++;
  }
}

// The CTA's share of a product. `read_ahead` returns when the next task is in shared memory.
template <class ReadAhead>
TL_DEVICE void run_product(const StepProduct &t, const StepMemory &m, const Handover &hand, const Ring &ring, RingPlace &base, const ReadAhead &read_ahead) {
  const CtaShare share = share_of(t, blockIdx.x);
  if (!share.n_panels) {
    read_ahead();
    return meet();
  }
  OutputExtras first = {};
  if ((int)threadIdx.x < share.n_panels / t.unit_panels * kPanelRows)
    first = extras_of(t, hand, (share.first_panel + (int)threadIdx.x / kPanelRows * t.unit_panels) * kPanelRows + threadIdx.x % kPanelRows);
  if (t.program.n_ops)
    run_step_program(t, m, hand);
  else
    take_operand(t, m, hand);
  read_ahead();
  meet();

  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0);
  RingPlace at = base;
  at.advance(warp, ring.n_slots);
  int panel = 0, part = warp;
#pragma unroll 1
  while (part >= t.n_items) part -= t.n_items, panel++;
#pragma unroll 1
  for (int begin = 0; begin < share.n_panels; begin += t.round_panels) {
    const int end = min(begin + t.round_panels, share.n_panels);
    if (t.weight.dtype == TL_INT8)
      sum_items<Int8Weights>(t, m, ring, at, share, begin, end, panel, part);
    else if (t.weight.dtype == TL_BF16)
      sum_items<FloatWeights<Bf16>>(t, m, ring, at, share, begin, end, panel, part);
    else
      sum_items<FloatWeights<F16>>(t, m, ring, at, share, begin, end, panel, part);
    meet();
    finish_round(t, m, hand, share, begin, end, first);
    if (end < share.n_panels) meet();
  }
  base.advance(share.n_panels * t.n_items, ring.n_slots);
}

#endif

}  // namespace tl
