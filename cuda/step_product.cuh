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
  float *norm_partial;  // 2 * kWarps
  uint8_t *attention;
};

// The thread in the task that runs. What the compiler could work out of its number for all tasks beforehand would not fit registers.
struct Handover {
  int thread;
  uint64_t flag;  // of the task
  TL_DEVICE_MEMBER int lane() const { return thread % 32; }
  TL_DEVICE_MEMBER int warp() const { return thread / 32; }
  TL_DEVICE_MEMBER int quad(int j) const { return 4 * (thread + kThreads * j); }  // as quad_index
};

#if TL_HOPPER

constexpr int kTaskBarrier = 1;  // of the kThreads that compute

TL_DEVICE void meet() { sync_threads(kTaskBarrier, kThreads); }

TL_DEVICE uint64_t two_floats(float a, float b) { return (uint64_t)float_bits(b) << 32 | float_bits(a); }
TL_DEVICE float low_float(uint64_t word) { return bits_float((uint32_t)word); }
TL_DEVICE float high_float(uint64_t word) { return bits_float((uint32_t)(word >> 32)); }

// A thread's quads of a row in memory, zeros from n on.
TL_DEVICE void read_quads(float4 (&v)[kStepQuads], const Handover &hand, const float *p, int n) {
#pragma unroll
  for (int j = 0; j < kStepQuads; j++) v[j] = hand.quad(j) < n ? *(const float4 *)(p + hand.quad(j)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// A thread's quads of a row of floats: from words of two floats each, or from memory.
TL_DEVICE void take_quads(float4 (&v)[kStepQuads], const Handover &hand, const Channel &c, const float *p, int n) {
  if (!c.words) return read_quads(v, hand, p, n);
  uint64_t data[2 * kStepQuads];
  const uint8_t *from = c.words + hand.thread * 32;
  const int mine = hand.quad(1) < n ? 4 : hand.quad(0) < n ? 2 : 0;
  static_assert(kStepQuads == 2, "two quads are four words");
  await_words(data, mine, hand.flag - c.back, [&](int i) { return from + i / 2 * (kThreads * 32) + i % 2 * 16; });
#pragma unroll
  for (int j = 0; j < kStepQuads; j++)
    v[j] = make_float4(low_float(data[2 * j]), high_float(data[2 * j]), low_float(data[2 * j + 1]), high_float(data[2 * j + 1]));
}

TL_DEVICE void hand_quads(const Handover &hand, const Channel &c, const float4 (&v)[kStepQuads], int n) {
#pragma unroll
  for (int j = 0; j < kStepQuads; j++) {
    if (hand.quad(j) >= n) break;
    uint8_t *to = c.words + hand.quad(j) * 8;
    store_flagged(to, two_floats(v[j].x, v[j].y), hand.flag);
    store_flagged(to + 16, two_floats(v[j].z, v[j].w), hand.flag);
  }
}

// Four columns from `column` on, a multiple of four, to the operand: as operand_position has them.
TL_DEVICE void put_four(uint8_t *operand, int column, uint32_t low, uint32_t high) {
  uint32_t *to = (uint32_t *)operand + column / 16 * 8 + column / 4 % 2 * 4 + column / 8 % 2;
  to[0] = low;
  to[2] = high;
}
template <class Op>
TL_DEVICE void put_quad(uint8_t *operand, int column, const float4 &q) {
  put_four(operand, column, Op::pack(q.x, q.y), Op::pack(q.z, q.w));
}

// norm_quads of quads that are zero where the row has none.
TL_DEVICE void norm_row(float4 (&v)[kStepQuads], const float4 (&weight)[kStepQuads], float per_value, float eps, float *partial) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kStepQuads; j++) sum = fmaf(v[j].w, v[j].w, fmaf(v[j].z, v[j].z, fmaf(v[j].y, v[j].y, fmaf(v[j].x, v[j].x, sum))));
  const float inverse = rsqrtf(block_sum(sum, partial, meet) * per_value + eps);
#pragma unroll
  for (int j = 0; j < kStepQuads; j++)
    v[j] = make_float4(v[j].x * inverse * weight[j].x, v[j].y * inverse * weight[j].y, v[j].z * inverse * weight[j].z, v[j].w * inverse * weight[j].w);
}

// The row program, to the operand in shared memory. What it may read early it reads first: weights of norms, and a row that is added.
template <class Op>
TL_DEVICE void run_step_program(const StepProduct &t, const StepMemory &m, const Handover &hand) {
  const int n = t.dim, early = t.early;
  const float eps = t.eps, per_value = reciprocal((float)n);
  float4 weight[kEarlyNorms][kStepQuads], v[kStepQuads], other[kStepQuads] = {};
#pragma unroll
  for (int i = 0; i < kEarlyNorms; i++) read_quads(weight[i], hand, t.early_norm[i], i < t.n_early_norms ? n : 0);
  if (early) take_quads(other, hand, t.op[early].channel, t.op[early].p, n);
  uint32_t kinds = t.kinds;
  int n_norms = 0;
  take_quads(v, hand, t.op[0].channel, t.op[0].p, n);
#pragma unroll 1
  for (int o = 1; kinds; o++, kinds >>= kKindBits) {
    const int kind = kinds % (1 << kKindBits);
    if (kind == kRowNorm) {
      if (n_norms >= kEarlyNorms) read_quads(weight[0], hand, t.op[o].p, n);
      norm_row(v, weight[0], per_value, eps, m.norm_partial + n_norms++ % 2 * kWarps);
#pragma unroll
      for (int j = 0; j < kStepQuads; j++) weight[0][j] = weight[1][j];
    } else if (kind == kRowAdd) {
      if (o != early) take_quads(other, hand, t.op[o].channel, t.op[o].p, n);
#pragma unroll
      for (int j = 0; j < kStepQuads; j++) v[j] = make_float4(v[j].x + other[j].x, v[j].y + other[j].y, v[j].z + other[j].z, v[j].w + other[j].w);
    } else if (blockIdx.x == 0) {  // kRowStore
      const StepOp op = t.op[o];
#pragma unroll
      for (int j = 0; j < kStepQuads; j++)
        if (hand.quad(j) < n) store_quad<true>(const_cast<float *>(op.p), hand.quad(j), n, v[j]);
      if (op.channel.words) hand_quads(hand, op.channel, v, pad16(n));  // a product adds its padding, too
    }
  }
#pragma unroll
  for (int j = 0; j < kStepQuads; j++)
    if (hand.quad(j) < n) put_quad<Op>(m.operand, hand.quad(j), v[j]);
  int n_in = n;
  if (t.tail) {
    n_in = 2 * n;
    read_quads(other, hand, t.tail, n);
#pragma unroll
    for (int j = 0; j < kStepQuads; j++)
      if (hand.quad(j) < n) put_quad<Op>(m.operand, n + hand.quad(j), other[j]);
  }
  if (hand.thread < pad16(n_in) - n_in) ((uint16_t *)m.operand)[operand_position(n_in + hand.thread)] = 0;
}

// The operand that an earlier task left: words of four columns.
TL_DEVICE void take_operand(const StepProduct &t, const StepMemory &m, const Handover &hand) {
  const int n = t.n_blocks * 4;  // words
  const uint8_t *words = t.operand.words;
  if (!words) {
#pragma unroll 2
    for (int i = hand.thread * 16; i < n * 8; i += kThreads * 16) *(uint4 *)(m.operand + i) = *(const uint4 *)((const uint8_t *)t.source + i);
    return;
  }
  constexpr int kAtOnce = 6;
  const uint64_t flag = hand.flag - t.operand.back;
#pragma unroll 1
  for (int i = hand.thread; i < n; i += kThreads * kAtOnce) {
    uint64_t data[kAtOnce];
    const int mine = (n - i + kThreads - 1) / kThreads;
    await_words(data, mine, flag, [&](int j) { return words + (i + j * kThreads) * 16; });
#pragma unroll
    for (int j = 0; j < kAtOnce; j++)
      if (j < mine) put_four(m.operand, (i + j * kThreads) * 4, (uint32_t)data[j], (uint32_t)(data[j] >> 32));
  }
}

TL_DEVICE bool row_scaled(const Matrix &m) { return m.dtype == TL_INT8 && !m.group_size; }

// What a thread needs to finish outputs besides their sums: read before it waits.
struct Finish {
  int kind, act, unit_panels, n_chunks, operand_dtype;
  bool scaled, has_bias;
  uint8_t *words;  // or NULL
  float *out;
  // Of this thread's first output:
  float scale[2], bias[2], addend;
  Flagged early;      // the word with the addend, as it was
  const uint8_t *at;  // where it is, or NULL
  uint64_t flag;      // that it is to have
};

TL_DEVICE void find_extras(Finish &f, const StepProduct &t, const Handover &hand, int output) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    f.scale[i] = f.scaled && i < f.unit_panels ? t.weight.scales[output + i * kPanelRows] : 1.0f;
    f.bias[i] = f.has_bias && i < f.unit_panels ? t.bias[output + i * kPanelRows] : 0.0f;
  }
  f.at = nullptr;
  if (f.kind != kAddToRows) return;
  if (!t.addend.words) {
    f.addend = t.epilogue.addend[output];
  } else {
    f.at = t.addend.words + output / 2 * 16;
    f.early = load_flagged(f.at);
  }
}

TL_DEVICE Finish begin_finish(const StepProduct &t, const Handover &hand, int output, bool exists) {
  Finish f = {};
  f.kind = t.epilogue.kind;
  f.act = t.epilogue.act;
  f.unit_panels = t.unit_panels;
  f.n_chunks = t.n_chunks;
  f.operand_dtype = t.epilogue.operand.dtype;
  f.scaled = row_scaled(t.weight);
  f.has_bias = t.bias;
  f.words = t.out.words;
  f.out = f.kind == kActivate ? (float *)t.epilogue.operand.data : t.epilogue.out;
  f.flag = hand.flag - t.addend.back;
  f.at = nullptr;
  if (exists) find_extras(f, t, hand, output);
  return f;
}

TL_DEVICE float addend_of(const Finish &f, int output) {
  if (!f.at) return f.addend;
  uint64_t word[1] = {f.early.data};
  if (f.early.flag != f.flag) await_words(word, 1, f.flag, [&](int) { return f.at; });
  return output % 2 ? high_float(word[0]) : low_float(word[0]);
}

// Sums of an output's chunks, in order, of a unit's panels side by side; `sums` is this lane's first. Nothing changes a sum by adding zero:
// it is never a negative one.
TL_DEVICE void sum_chunks(float (&y)[2], const float *sums, int n_chunks, bool two) {
  constexpr int kAtOnce = 8;
  y[0] = y[1] = 0.0f;
#pragma unroll 1
  for (int c = 0; c < n_chunks; c += kAtOnce, sums += kAtOnce * kPanelRows) {
    float p[2][kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      const bool exists = c + j < n_chunks;
      p[0][j] = exists ? sums[j * kPanelRows] : 0.0f;
      p[1][j] = exists && two ? sums[(n_chunks + j) * kPanelRows] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) y[0] = y[0] + p[0][j], y[1] = y[1] + p[1][j];
  }
}

// Outputs of panels begin .. end - 1 of the share; neighbouring lanes hand on theirs together, two floats or four operands a word. `f` is
// for this thread's first output.
TL_DEVICE void finish_round(const StepProduct &t, const StepMemory &m, const Handover &hand, const CtaShare &share, int begin, int end, Finish &f) {
  const int n_panels = end - begin, lane = hand.thread % kPanelRows;
  int panel = hand.thread / kPanelRows * f.unit_panels, first = hand.warp() * 2 * f.unit_panels;  // of the warp, which has two units
#pragma unroll 1
  for (bool again = begin; first < n_panels; again = true) {
    const bool exists = panel < n_panels;  // both halves of the warp take part in what follows
    const int output = (share.first_panel + begin + panel) * kPanelRows + lane;
    if (again && exists) find_extras(f, t, hand, output);
    float y[2];
    sum_chunks(y, m.partial + (exists ? panel : 0) * f.n_chunks * kPanelRows + lane, f.n_chunks, f.unit_panels == 2);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (f.scaled) y[i] = y[i] * f.scale[i];
      if (f.has_bias) y[i] = y[i] + f.bias[i];
    }
    if (f.kind == kActivate) {
      y[0] = activate(f.act, y[0]);
      if (f.unit_panels == 2) y[0] = y[0] * y[1];
    } else if (f.kind == kAddToRows && exists) {
      y[0] = addend_of(f, output) + y[0];
    }
    const float next = __shfl_sync(0xffffffffu, y[0], hand.lane() + 1);
    if (f.kind == kActivate) {
      const int column = f.unit_panels == 2 ? output / 32 * 16 + lane : output;
      const uint32_t pair = pack_pair(f.operand_dtype, y[0], next), other = __shfl_sync(0xffffffffu, pair, hand.lane() + 2);
      if (exists && lane % 4 == 0) {
        if (f.words) store_flagged(f.words + column * 4, (uint64_t)other << 32 | pair, hand.flag);
        put_four((uint8_t *)f.out, column, pair, other);
      }
    } else if (f.kind == kToLogits) {
      if (exists) finish_output(t.epilogue, 0, output, y[0]);
    } else if (exists) {
      if (f.words && lane % 2 == 0) store_flagged(f.words + output * 8, two_floats(y[0], next), hand.flag);
      f.out[output] = y[0];
    }
    panel += kThreads / kPanelRows * f.unit_panels;
    first += kThreads / kPanelRows * f.unit_panels;
  }
}

// What a warp needs to know of its items.
struct Items {
  int panel, part;  // of the next one
  int n_items, n_chunks, n_blocks;
  RingPlace at;
  TL_DEVICE_MEMBER void next(const Ring &ring) {
    at.advance(kWarps, ring.n_slots);
    part += kWarps;
    wrap();
  }
  TL_DEVICE_MEMBER void wrap() {
#pragma unroll 1
    while (part >= n_items) part -= n_items, panel++;
  }
};

// The sums of one item's chunks, one or two of int8: of an item that is not whole, or has scales of its own.
template <class W>
TL_DEVICE void sum_part(float (&d)[Chunks<W>::kChunks][4], const StepProduct &t, const Items &i, shared_t slot, shared_t right, int first_panel) {
  constexpr int kChunks = Chunks<W>::kChunks;
  const int block = i.part * kChunks * kChunkBlocks, n_blocks = i.n_blocks - block;
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    const shared_t left = slot + c * kChunkBlocks * W::kBlockBytes, row = right + (block + c * kChunkBlocks) * 32;
    const int n = min(n_blocks - c * kChunkBlocks, kChunkBlocks);
    if (W::kInt8 && t.weight.group_size)
      add_scaled_blocks<W>(d[c], left, row, n, t.weight, first_panel + i.panel, block + c * kChunkBlocks);
    else
      add_blocks<W, kChunkBlocks, kChunkBlocks / 2>(d[c], left, row, n);
  }
}

// The CTA's share of a product, its weights of type W. `settle` is called when all threads are in this task.
template <class W, class Settle>
TL_DEVICE void run_share(const StepProduct &t, const StepMemory &m, const Handover &hand, const Ring &ring, const CtaShare &share, Items &items,
                         Finish &f, const Settle &settle) {
  using L = Chunks<W>;
  const int lane = hand.lane(), round_panels = t.round_panels;
  const bool groups = W::kInt8 && t.weight.group_size;
  const shared_t right = shared_of(m.operand) + lane % 4 * 8;
  float *sums = m.partial + lane / 4;
  if (t.n_ops)
    run_step_program<typename W::Op>(t, m, hand);
  else
    take_operand(t, m, hand);
  meet();
#pragma unroll 1
  for (int begin = 0; begin < share.n_panels; begin += round_panels) {
    const int end = min(begin + round_panels, share.n_panels);
    // A warp that waits for an item has read the one eight before: the ring holds as many, so no slot is two uses behind.
#pragma unroll 1
    while (items.panel < end) {
      float d[L::kChunks][4] = {};
      const shared_t left = ring.wait(items.at) + lane * W::kLaneBytes;
      if (!groups && items.n_blocks - items.part * L::kBlocks >= L::kBlocks)
        L::multiply(d, left, right + items.part * L::kBlocks * 32);
      else
        sum_part<W>(d, t, items, left, right, share.first_panel);
      const int chunk = items.part * L::kChunks;
      float *to = sums + ((items.panel - begin) * items.n_chunks + chunk) * kPanelRows;
#pragma unroll
      for (int c = 0; c < L::kChunks; c++)
        if (lane % 4 == 0 && chunk + c < items.n_chunks) to[c * kPanelRows] = d[c][0], to[c * kPanelRows + 8] = d[c][2];
      __syncwarp();
      if (lane == 0) ring.free(items.at, kArrivals);
      items.next(ring);
    }
    meet();
    finish_round(t, m, hand, share, begin, end, f);
    if (begin == 0) settle();
    if (end < share.n_panels) meet();
  }
}

template <class Settle>
TL_DEVICE void run_product(const StepProduct &t, const StepMemory &m, const Handover &hand, const Ring &ring, RingPlace &base, const Settle &settle) {
  const CtaShare share = share_of(t, blockIdx.x);
  if (!share.n_panels) {
    meet();
    return settle();
  }
  const int own = hand.thread / kPanelRows * t.unit_panels;
  Finish f = begin_finish(t, hand, (share.first_panel + own) * kPanelRows + hand.thread % kPanelRows, own < share.n_panels);
  const int warp = __shfl_sync(0xffffffffu, hand.warp(), 0);
  Items items = {0, warp, t.n_items, t.n_chunks, t.n_blocks, base};
  items.at.advance(warp, ring.n_slots);
  items.wrap();
  base.advance(share.n_panels * items.n_items, ring.n_slots);
  if (t.weight.dtype == TL_BF16)
    run_share<FloatWeights<Bf16>>(t, m, hand, ring, share, items, f, settle);
  else if (t.weight.dtype == TL_INT8)
    run_share<Int8Weights>(t, m, hand, ring, share, items, f, settle);
  else
    run_share<FloatWeights<F16>>(t, m, hand, ring, share, items, f, settle);
}

#endif

}  // namespace tl
