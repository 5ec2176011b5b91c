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

// Four columns from `column` on, a multiple of four, to the operand: as operand_position has them.
TL_DEVICE void put_four(uint8_t *operand, int column, uint32_t low, uint32_t high) {
  uint32_t *to = (uint32_t *)operand + column / 16 * 8 + column / 4 % 2 * 4 + column / 8 % 2;
  to[0] = low;
  to[2] = high;
}
TL_DEVICE void put_quad(uint8_t *operand, int dtype, int column, const float4 &q) {
  if (dtype == TL_BF16)
    put_four(operand, column, Bf16::pack(q.x, q.y), Bf16::pack(q.z, q.w));
  else
    put_four(operand, column, F16::pack(q.x, q.y), F16::pack(q.z, q.w));
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
      norm_quads<kStepQuads>(
          v, [&](int j) { return *(const float4 *)(weight + quad_index(j)); }, n, t.eps, m.norm_partial + n_norms % 2 * kWarps, meet);
      n_norms++;
    } else if (op.kind == kRowAdd) {
      if (o != early) take_quads(other, hand, op.channel, op.p, n);
#pragma unroll
      for (int j = 0; j < kStepQuads; j++) v[j] = make_float4(v[j].x + other[j].x, v[j].y + other[j].y, v[j].z + other[j].z, v[j].w + other[j].w);
    } else if (blockIdx.x == 0) {  // kRowStore
#pragma unroll
      for (int j = 0; j < kStepQuads; j++)
        if (quad_index(j) < n) store_quad<true>(const_cast<float *>(op.p), quad_index(j), n, v[j]);
      if (op.channel.index >= 0) hand_quads(hand, op.channel, v, pad16(n));  // a product adds its padding, too
    }
  }
  wait_copies<0>();
#pragma unroll
  for (int j = 0; j < kStepQuads; j++)
    if (quad_index(j) < n) put_quad(m.operand, dtype, quad_index(j), v[j]);
  int n_in = n;
  if (t.tail) {
    n_in = 2 * n;
    load_quads<kStepQuads, true>(other, t.tail, n);
#pragma unroll
    for (int j = 0; j < kStepQuads; j++)
      if (quad_index(j) < n) put_quad(m.operand, dtype, n + quad_index(j), other[j]);
  }
  if ((int)threadIdx.x < pad16(n_in) - n_in) ((uint16_t *)m.operand)[operand_position(n_in + threadIdx.x)] = 0;
}

// The operand that an earlier task left: words of four columns.
TL_DEVICE void take_operand(const StepProduct &t, const StepMemory &m, const Handover &hand) {
  const int n = t.n_blocks * 4;  // words
  if (t.operand.index < 0) {
#pragma unroll 2
    for (int i = threadIdx.x * 16; i < t.n_blocks * 32; i += kThreads * 16)
      *(uint4 *)(m.operand + i) = *(const uint4 *)((const uint8_t *)t.source + i);
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
      put_four(m.operand, (i + j * kThreads) * 4, (uint32_t)data[j], (uint32_t)(data[j] >> 32));
    }
  }
}

TL_DEVICE bool row_scaled(const Matrix &m) { return m.dtype == TL_INT8 && !m.group_size; }

// What a thread needs to finish outputs besides their sums: read before it waits, since each look into the task costs more than a product.
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
  if (t.addend.index < 0) {
    f.addend = t.epilogue.addend[output];
  } else {
    f.at = hand.words(t.addend) + output / 2 * 16;
    f.early = load_flagged(f.at);
  }
}

TL_DEVICE Finish begin_finish(const StepProduct &t, const Handover &hand, int output, bool exists) {
  Finish f;
  f.kind = t.epilogue.kind;
  f.act = t.epilogue.act;
  f.unit_panels = t.unit_panels;
  f.n_chunks = t.n_chunks;
  f.operand_dtype = t.epilogue.operand.dtype;
  f.scaled = row_scaled(t.weight);
  f.has_bias = t.bias;
  f.words = t.out.index < 0 ? nullptr : hand.words(t.out);
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

// Sum of a panel's chunks, scaled and with its bias; `sums` is this lane's first.
TL_DEVICE float finish_panel(const Finish &f, const float *sums, int i) {
  float sum = 0.0f;
  int c = 0;
#pragma unroll 1
  for (; c + 4 <= f.n_chunks; c += 4, sums += 4 * kPanelRows) {
    const float p0 = sums[0], p1 = sums[kPanelRows], p2 = sums[2 * kPanelRows], p3 = sums[3 * kPanelRows];
    sum = (((sum + p0) + p1) + p2) + p3;
  }
  const int left = f.n_chunks - c;
  const float p0 = left > 0 ? sums[0] : 0.0f, p1 = left > 1 ? sums[kPanelRows] : 0.0f, p2 = left > 2 ? sums[2 * kPanelRows] : 0.0f;
  if (left > 0) sum = sum + p0;
  if (left > 1) sum = sum + p1;
  if (left > 2) sum = sum + p2;
  if (f.scaled) sum = sum * f.scale[i];
  return f.has_bias ? sum + f.bias[i] : sum;
}

// Outputs of panels begin .. end - 1 of the share; neighbouring lanes hand on theirs together, two floats or four operands a word. `f` is
// for this thread's first output.
TL_DEVICE void finish_round(const StepProduct &t, const StepMemory &m, const Handover &hand, const CtaShare &share, int begin, int end, Finish &f) {
  const int n_panels = end - begin, lane = threadIdx.x % kPanelRows;
  int panel = threadIdx.x / kPanelRows * f.unit_panels;
  // A warp has two units; both lanes' halves take part in what follows.
#pragma unroll 1
  for (bool again = begin; __shfl_sync(0xffffffffu, panel, 0) < n_panels; again = true, panel += kThreads / kPanelRows * f.unit_panels) {
    const bool exists = panel < n_panels;
    const int output = (share.first_panel + begin + panel) * kPanelRows + lane;
    if (again && exists) find_extras(f, t, hand, output);
    float y = 0.0f;
    if (exists) {
      const float *sums = m.partial + panel * f.n_chunks * kPanelRows + lane;
      y = finish_panel(f, sums, 0);
      if (f.kind == kActivate) {
        y = activate(f.act, y);
        if (f.unit_panels == 2) y = y * finish_panel(f, sums + f.n_chunks * kPanelRows, 1);
      } else if (f.kind == kAddToRows) {
        y = addend_of(f, output) + y;
      }
    }
    const float next = __shfl_sync(0xffffffffu, y, lane_id() + 1);
    if (f.kind == kActivate) {
      const int column = f.unit_panels == 2 ? output / 32 * 16 + lane : output;
      const uint32_t pair = pack_pair(f.operand_dtype, y, next), other = __shfl_sync(0xffffffffu, pair, lane_id() + 2);
      if (!exists || lane % 4) continue;
      if (f.words) store_flagged(f.words + column * 4, (uint64_t)other << 32 | pair, hand.flag);
      put_four((uint8_t *)f.out, column, pair, other);
    } else if (f.kind == kToLogits) {
      if (exists) finish_output(t.epilogue, 0, output, y);
    } else if (exists) {
      if (f.words && lane % 2 == 0) store_flagged(f.words + output * 8, two_floats(y, next), hand.flag);
      f.out[output] = y;
    }
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
#pragma unroll 1
    while (part >= n_items) part -= n_items, panel++;
  }
};

// The sums of one item's chunks: one, or two of int8, side by side where both are whole.
template <class W>
TL_DEVICE void sum_item(float (&d)[2][4], const StepProduct &t, const Items &i, shared_t slot, shared_t right, int first_panel) {
  constexpr int kChunks = W::kInt8 ? 2 : 1;
  const int block = i.part * kChunks * kChunkBlocks, n_blocks = i.n_blocks - block;
  const bool groups = W::kInt8 && t.weight.group_size;
  if (W::kInt8 && !groups && n_blocks >= 2 * kChunkBlocks)
    return add_two<W, kChunkBlocks, 4>(d, {slot, slot + kChunkBlocks * W::kBlockBytes}, {right + block * 32, right + (block + kChunkBlocks) * 32});
#pragma unroll
  for (int c = 0; c < kChunks; c++) {
    const shared_t left = slot + c * kChunkBlocks * W::kBlockBytes, row = right + (block + c * kChunkBlocks) * 32;
    const int n = n_blocks - c * kChunkBlocks;
    if (groups)
      add_scaled_blocks<W>(d[c], left, row, min(n, kChunkBlocks), t.weight, first_panel + i.panel, block + c * kChunkBlocks);
    else
      add_blocks<W, kChunkBlocks, kChunkBlocks / 2>(d[c], left, row, n);
  }
}

// This warp's items of the panels begin .. end - 1 of the share: the sums of their chunks.
template <class W>
TL_DEVICE void sum_items(const StepProduct &t, const StepMemory &m, const Ring &ring, const CtaShare &share, int begin, int end, Items &i) {
  constexpr int kChunks = W::kInt8 ? 2 : 1;
  const int lane = lane_id();
  const shared_t right = shared_of(m.operand) + lane % 4 * 8;
  float *sums = m.partial + lane / 4;
#pragma unroll 1
  while (i.panel < end) {
    float d[2][4] = {};
    sum_item<W>(d, t, i, ring.wait(i.at) + lane * W::kLaneBytes, right, share.first_panel);
    __syncwarp();
    if (lane == 0) ring.free(i.at, kArrivals);
    const int chunk = i.part * kChunks;
    float *to = sums + ((i.panel - begin) * i.n_chunks + chunk) * kPanelRows;
#pragma unroll
    for (int c = 0; c < kChunks; c++)
      if (lane % 4 == 0 && chunk + c < i.n_chunks) to[c * kPanelRows] = d[c][0], to[c * kPanelRows + 8] = d[c][2];
    i.next(ring);
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
  const int own = (int)threadIdx.x / kPanelRows * t.unit_panels;
  Finish f = begin_finish(t, hand, (share.first_panel + own) * kPanelRows + threadIdx.x % kPanelRows, own < share.n_panels);
  const int warp = __shfl_sync(0xffffffffu, warp_id(), 0), round_panels = t.round_panels, dtype = t.weight.dtype;
  Items items = {0, warp, t.n_items, t.n_chunks, t.n_blocks, base};
  items.at.advance(warp, ring.n_slots);
  base.advance(share.n_panels * items.n_items, ring.n_slots);
#pragma unroll 1
  while (items.part >= items.n_items) items.part -= items.n_items, items.panel++;
  if (t.n_ops)
    run_step_program(t, m, hand);
  else
    take_operand(t, m, hand);
  meet();
  settle();
#pragma unroll 1
  for (int begin = 0; begin < share.n_panels; begin += round_panels) {
    const int end = min(begin + round_panels, share.n_panels);
    // A warp that waits for an item has read the one eight before: the ring holds as many, so no slot is two uses behind.
    if (dtype == TL_INT8)
      sum_items<Int8Weights>(t, m, ring, share, begin, end, items);
    else if (dtype == TL_BF16)
      sum_items<FloatWeights<Bf16>>(t, m, ring, share, begin, end, items);
    else
      sum_items<FloatWeights<F16>>(t, m, ring, share, begin, end, items);
    meet();
    finish_round(t, m, hand, share, begin, end, f);
    if (end < share.n_panels) meet();
  }
}

#endif

}  // namespace tl
