// A product of one row, as a task of a step (step.cu). The bits are those of gemv.cu: every chunk of columns from zero by one warp, the
// sums of an output in index order. What counts here is how few instructions depend on each other from the last word that comes in to
// the first that goes out.
#pragma once

#include "step_stream.cuh"
#include "weights.cuh"

namespace tl {

constexpr int kRoundUnits = kWarps * 2;  // that are summed at a time: a thread an output
// Floats of an output's sums.
TL_BOTH int sums_stride(int n_chunks) { return round_up(n_chunks, 4); }

// Shared memory of products; step_attend.cuh lays out attention's.
struct StepMemory {
  uint8_t *operand;     // of the product's row
  float *partial;       // (panels, 16, sums_stride) of a round: an output's sums are in order
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

// Reads all of a struct in shared memory now: what the compiler puts off until it is needed waits for one load after another.
template <class T>
TL_DEVICE void load_at_once(T &value, const T &shared) {
  static_assert(sizeof(T) % 16 == 0 && alignof(T) % 16 == 0, "in pieces of sixteen bytes");
  uint4 piece[sizeof(T) / 16];
#pragma unroll
  for (int i = 0; i < (int)(sizeof(T) / 16); i++) piece[i] = load_shared16(shared_of(&shared) + i * 16);
  memcpy((void *)&value, piece, sizeof value);
}

TL_DEVICE uint64_t two_floats(float a, float b) { return (uint64_t)float_bits(b) << 32 | float_bits(a); }
TL_DEVICE float low_float(uint64_t word) { return bits_float((uint32_t)word); }
TL_DEVICE float high_float(uint64_t word) { return bits_float((uint32_t)(word >> 32)); }

// A thread's quads of a row in memory, zeros from n on.
TL_DEVICE void read_quads(float4 (&v)[kStepQuads], const Handover &hand, const float *p, int n) {
#pragma unroll
  for (int j = 0; j < kStepQuads; j++) v[j] = hand.quad(j) < n ? *(const float4 *)(p + hand.quad(j)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

TL_DEVICE const uint8_t *quad_word(const uint8_t *from, int i) { return from + i / 2 * (kThreads * 32) + i % 2 * 16; }
TL_DEVICE float4 quad_of(const uint64_t *word) { return make_float4(low_float(word[0]), high_float(word[0]), low_float(word[1]), high_float(word[1])); }

// A thread's quads of a row of floats: from words of two floats each, or from memory.
TL_DEVICE void take_quads(float4 (&v)[kStepQuads], const Handover &hand, const Channel &c, const float *p, int n) {
  if (!c.words) return read_quads(v, hand, p, n);
  uint64_t data[2 * kStepQuads];
  const uint8_t *from = c.words + hand.thread * 32;
  await_words(data, hand.quad(1) < n ? 4 : hand.quad(0) < n ? 2 : 0, hand.flag - c.back, [&](int i) { return quad_word(from, i); });
#pragma unroll
  for (int j = 0; j < kStepQuads; j++) v[j] = quad_of(data + 2 * j);
}

// The words that a thread takes of a product's row: those of its quads, or of an operand, four columns each. Both have their third word at
// the same place, so that one piece of code asks for either.
struct RowWords {
  static constexpr int kMost = 6;
  const uint8_t *from;  // NULL: they are in memory alone
  uint64_t flag;
  int count, second, fourth;  // where these are
  TL_DEVICE_MEMBER const uint8_t *at(int i) const {
    return from + (i == 1 ? second : i == 3 ? fourth : i * (kThreads * 16));
  }
};
TL_DEVICE RowWords row_of(const ProductHead &t, const Handover &hand) {
  const bool quads = t.n_ops;
  const int left = t.n_blocks * 4 - hand.thread;  // of an operand: of kThreads, this thread's among them
  const int n_quads = hand.quad(1) < t.dim ? 4 : hand.quad(0) < t.dim ? 2 : 0, n_operand = max(left + kThreads - 1, 0) / kThreads;
  RowWords r;
  r.from = t.row.words ? t.row.words + hand.thread * (quads ? 32 : 16) : nullptr;
  r.flag = hand.flag - t.row.back;
  r.count = quads ? n_quads : n_operand;
  r.second = quads ? 16 : kThreads * 16;
  r.fourth = 2 * kThreads * 16 + r.second;
  static_assert(kStepQuads == 2, "two quads are four words");
  return r;
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

// Where four columns from `column` on, a multiple of four, lie in an operand: as operand_position has them, in two words two apart.
TL_DEVICE int four_at(int column) { return (column / 16 * 8 + column / 4 % 2 * 4 + column / 8 % 2) * 4; }
TL_DEVICE uint32_t *four_at(void *operand, int column) { return (uint32_t *)((uint8_t *)operand + four_at(column)); }
TL_DEVICE void put_four(uint32_t *to, uint32_t low, uint32_t high) {
  to[0] = low;
  to[2] = high;
}
// The same in shared memory. An address that the compiler cannot tell from others' would wait behind all that is read and written there.
TL_DEVICE void put_four(shared_t to, uint32_t low, uint32_t high) {
  store_shared4(to, low);
  store_shared4(to + 8, high);
}
template <class Op>
TL_DEVICE void put_quad(shared_t to, const float4 &q) {
  put_four(to, Op::pack(q.x, q.y), Op::pack(q.z, q.w));
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

// The row program, to the operand in shared memory. What it may read early it reads first: weights of norms, a row that is added, what is
// appended.
template <class Op>
TL_DEVICE void run_step_program(const StepProduct &t, const ProductHead &h, const StepMemory &m, const Handover &hand, RowWords &row) {
  const int n = h.dim, early = h.early, n_in = t.tail ? 2 * n : n;
  const float eps = t.eps, per_value = reciprocal((float)n);
  float4 weight[kEarlyNorms][kStepQuads], v[kStepQuads], other[kStepQuads] = {};
  bool mine[kStepQuads];
  shared_t to[kStepQuads];
  uint32_t kinds = h.kinds;
  int n_norms = 0;
#pragma unroll
  for (int i = 0; i < kEarlyNorms; i++) read_quads(weight[i], hand, t.early_norm[i], i < t.n_early_norms ? n : 0);
#pragma unroll
  for (int j = 0; j < kStepQuads; j++) mine[j] = hand.quad(j) < n, to[j] = shared_of(m.operand) + four_at(hand.quad(j));
  if (hand.thread < pad16(n_in) - n_in) ((uint16_t *)m.operand)[operand_position(n_in + hand.thread)] = 0;
  if (t.tail) {
    read_quads(v, hand, t.tail, n);
#pragma unroll
    for (int j = 0; j < kStepQuads; j++)
      if (mine[j]) put_quad<Op>(shared_of(m.operand) + four_at(n + hand.quad(j)), v[j]);
  }
  if (early) take_quads(other, hand, t.op[early].channel, t.op[early].p, n);
  if (row.from) {
    uint64_t data[RowWords::kMost];
    await_words(data, row.count, row.flag, [&](int i) { return row.at(i); });
#pragma unroll
    for (int j = 0; j < kStepQuads; j++) v[j] = quad_of(data + 2 * j);
  } else {
    read_quads(v, hand, (const float *)t.source, n);
  }
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
        if (mine[j]) store_quad<true>(const_cast<float *>(op.p), hand.quad(j), n, v[j]);
      if (op.channel.words) hand_quads(hand, op.channel, v, pad16(n));  // a product adds its padding, too
    }
  }
#pragma unroll
  for (int j = 0; j < kStepQuads; j++)
    if (mine[j]) put_quad<Op>(to[j], v[j]);
}

// The operand that an earlier task left.
TL_DEVICE void take_operand(const StepProduct &t, const StepMemory &m, const Handover &hand, RowWords &row) {
  if (!row.from) {
#pragma unroll 2
    for (int i = hand.thread * 16; i < t.head.n_blocks * 32; i += kThreads * 16) *(uint4 *)(m.operand + i) = *(const uint4 *)((const uint8_t *)t.source + i);
    return;
  }
  shared_t to = shared_of(m.operand) + four_at(hand.thread * 4);
  const int n = row.count;
#pragma unroll 1
  for (int done = 0;;) {
    uint64_t data[RowWords::kMost];
    await_words(data, row.count, row.flag, [&](int i) { return row.at(i); });
#pragma unroll
    for (int i = 0; i < RowWords::kMost; i++)
      if (i < row.count) put_four(to + i * kThreads * 8, (uint32_t)data[i], (uint32_t)(data[i] >> 32));
    done += RowWords::kMost;
    if (done >= n) return;
    row.from += RowWords::kMost * kThreads * 16;
    row.count = n - done;
    to += RowWords::kMost * kThreads * 8;
  }
}

// What a thread needs to finish an output besides its sums: found before it waits for the row.
struct Output {
  bool exists, has_bias;
  int stride;          // chunks that a row has room for among the sums, a multiple of four: those behind the last one are zero
  shared_t sums;       // of its chunks; of the panel after it, where gated, a panel further
  float scale[2], bias[2], addend;
  uint8_t *words;      // that this thread hands on, or NULL
  uint32_t *operand;   // four columns, and NULL where others store them
  float *out;
  Flagged early;       // the word with the addend, as it was
  const uint8_t *at;   // where it is, or NULL
  uint64_t flag;       // that it is to have
};

// Of a unit of the round, and where its first panel is in the share.
TL_DEVICE Output output_of(const StepProduct &t, const ProductHead &h, const StepMemory &m, const Handover &hand, const CtaShare &share, int begin) {
  Output o = {};
  const int lane = hand.thread % kPanelRows, panel = hand.thread / kPanelRows * h.unit_panels;
  const int output = (share.first_panel + begin + panel) * kPanelRows + lane;
  o.exists = panel < min(h.round_panels, share.n_panels - begin);
  o.stride = sums_stride(h.n_chunks);
  o.sums = shared_of(m.partial) + (o.exists ? (panel * kPanelRows + lane) * o.stride * 4 : 0);
  o.scale[0] = o.scale[1] = 1.0f;
  if (!o.exists) return o;
  const bool gated = h.unit_panels == 2;
  if (h.dtype == TL_INT8 && !h.groups) {
    o.scale[0] = t.weight.scales[output];
    if (gated) o.scale[1] = t.weight.scales[output + kPanelRows];
  }
  if (t.bias) {
    o.has_bias = true;
    o.bias[0] = t.bias[output];
    if (gated) o.bias[1] = t.bias[output + kPanelRows];
  }
  if (h.kind == kActivate) {
    const int column = gated ? output / 32 * 16 + lane : output;
    o.operand = lane % 4 ? nullptr : four_at(h.out, column);
    o.words = h.words && lane % 4 == 0 ? h.words + column * 4 : nullptr;
    return o;
  }
  o.words = h.words && lane % 2 == 0 ? h.words + output * 8 : nullptr;
  o.out = (float *)h.out + output;
  if (h.kind == kToLogits && output >= t.epilogue.n_valid) o.out = nullptr;
  if (h.kind != kAddToRows) return o;
  if (h.addend.words) {
    o.flag = hand.flag - h.addend.back;
    o.at = h.addend.words + output / 2 * 16;
    o.early = load_flagged(o.at);
  } else {
    o.addend = t.epilogue.addend[output];
  }
  return o;
}

// Clears what an output's sums have room for behind the last one: once no one finishes an earlier task or round any more.
TL_DEVICE void clear_rest(const Output &o, const ProductHead &h) {
  if (!o.exists) return;
#pragma unroll
  for (int c = 0; c < 3; c++)
    if (h.n_chunks + c < o.stride) {
      store_shared4(o.sums + (h.n_chunks + c) * 4, 0);
      if (h.unit_panels == 2) store_shared4(o.sums + (kPanelRows * o.stride + h.n_chunks + c) * 4, 0);
    }
}

TL_DEVICE float addend_of(const Output &o, int lane) {
  if (!o.at) return o.addend;
  uint64_t word[1] = {o.early.data};
  if (o.early.flag != o.flag) await_words(word, 1, o.flag, [&](int) { return o.at; });
  return lane % 2 ? high_float(word[0]) : low_float(word[0]);
}

// Sum of an output's chunks, in order. Nothing changes it by adding zero: it is never a negative one.
TL_DEVICE float sum_chunks(shared_t sums, int stride) {
  float y = 0.0f;
#pragma unroll 1
  for (int c = 0; c < stride; c += 8) {
    const uint4 a = load_shared16(sums + c * 4), b = c + 4 < stride ? load_shared16(sums + c * 4 + 16) : make_uint4(0, 0, 0, 0);
    y = (((y + bits_float(a.x)) + bits_float(a.y)) + bits_float(a.z)) + bits_float(a.w);
    y = (((y + bits_float(b.x)) + bits_float(b.y)) + bits_float(b.z)) + bits_float(b.w);
  }
  return y;
}

template <bool kScaled>
TL_DEVICE float finished_sum(const Output &o, int i) {
  float y = sum_chunks(o.sums + i * kPanelRows * o.stride * 4, o.stride);
  if (kScaled) y = y * o.scale[i];
  return o.has_bias ? y + o.bias[i] : y;
}

// Stores each thread's output; neighbouring lanes hand on theirs together, two floats or four operands a word. By whole warps.
template <bool kScaled>
TL_DEVICE void finish(const Output &o, const StepProduct &t, const ProductHead &h, const Handover &hand) {
  const int lane = hand.lane(), kind = h.kind;
  float y = finished_sum<kScaled>(o, 0);
  if (kind == kActivate) {
    y = activate(h.act, y);
    if (h.unit_panels == 2) y = y * finished_sum<kScaled>(o, 1);
    const uint32_t pair = pack_pair(h.out_dtype, y, __shfl_sync(0xffffffffu, y, lane + 1)), other = __shfl_sync(0xffffffffu, pair, lane + 2);
    if (o.words) store_flagged(o.words, (uint64_t)other << 32 | pair, hand.flag);
    if (o.operand) put_four(o.operand, pair, other);
    return;
  }
  if (kind == kToLogits) {
    if (o.out) *o.out = scale_softcap(y, t.epilogue.scale, t.epilogue.cap);
    return;
  }
  if (kind == kAddToRows && o.exists) y = addend_of(o, lane) + y;
  const float next = __shfl_sync(0xffffffffu, y, lane + 1);
  if (o.words) store_flagged(o.words, two_floats(y, next), hand.flag);
  if (o.out) *o.out = y;
}

// What a warp needs to know of its items.
struct Items {
  int panel, part;  // of the next one
  int n_items, n_chunks, n_blocks;
  uint32_t inverse;  // of n_items
  RingPlace at;
  TL_DEVICE_MEMBER void advance(int n, const Ring &ring) {
    at.advance(n, ring.n_slots, ring.inverse);
    part += n;
    const int panels = quotient(part, inverse);
    part -= panels * n_items;
    panel += panels;
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

// This warp's items of the panels before `end`: the sums of their chunks, those of panel `begin` first in `sums`.
template <class W>
TL_DEVICE void sum_items(const StepProduct &t, const Ring &ring, Items &items, int begin, int end, int first_panel, float *sums, int stride, int lane,
                         shared_t right, bool groups) {
  using C = Chunks<W>;
  // A warp that waits for an item has read the one eight before: the ring holds as many, so no slot is two uses behind.
#pragma unroll 1
  while (items.panel < end) {
    float d[C::kChunks][4] = {};
    const shared_t left = ring.wait(items.at) + lane * W::kLaneBytes;
    if (!groups && items.n_blocks - items.part * C::kBlocks >= C::kBlocks)
      C::multiply(d, left, right + items.part * C::kBlocks * 32);
    else
      sum_part<W>(d, t, items, left, right, first_panel);
    const int chunk = items.part * C::kChunks;
    float *to = sums + (items.panel - begin) * kPanelRows * stride + chunk;
#pragma unroll
    for (int c = 0; c < C::kChunks; c++)
      if (lane % 4 == 0 && chunk + c < items.n_chunks) to[c] = d[c][0], to[8 * stride + c] = d[c][2];
    __syncwarp();
    if (lane == 0) ring.free(items.at, kArrivals);
    items.advance(kWarps, ring);
  }
}

// The CTA's share of a product, its weights of type W. `settle` is called when all threads are in this task.
template <class W, class Settle>
TL_DEVICE void run_share(const StepProduct &t, const ProductHead &h, const StepMemory &m, const Handover &hand, const Ring &ring, const CtaShare &share,
                         Items &items, const Settle &settle) {
  const int lane = hand.lane(), first_unit = hand.warp() * 2 * h.unit_panels;  // a warp finishes two
  const bool groups = W::kInt8 && h.groups;
  const shared_t right = shared_of(m.operand) + lane % 4 * 8;
  RowWords row = row_of(h, hand);
  Output o = output_of(t, h, m, hand, share, 0);
  float *const sums = m.partial + lane / 4 * o.stride;
  int begin = 0, end = min(h.round_panels, share.n_panels);
  if (h.n_ops)
    run_step_program<typename W::Op>(t, h, m, hand, row);
  else
    take_operand(t, m, hand, row);
  meet();
  if (o.stride != h.n_chunks) clear_rest(o, h);
  sum_items<W>(t, ring, items, 0, end, share.first_panel, sums, o.stride, lane, right, groups);
  meet();
  if (first_unit < end) finish<W::kInt8>(o, t, h, hand);
  settle();
#pragma unroll 1
  while (end < share.n_panels) {
    begin = end;
    end = min(begin + h.round_panels, share.n_panels);
    meet();
    o = output_of(t, h, m, hand, share, begin);
    clear_rest(o, h);
    sum_items<W>(t, ring, items, begin, end, share.first_panel, sums, o.stride, lane, right, groups);
    meet();
    if (first_unit < end - begin) finish<W::kInt8>(o, t, h, hand);
  }
}

template <class Settle>
TL_DEVICE void run_product(const StepProduct &t, const StepMemory &m, const Handover &hand, const Ring &ring, RingPlace &base, const Settle &settle) {
  ProductHead h;
  load_at_once(h, t.head);
  const CtaShare share = share_of(h, blockIdx.x);
  if (!share.n_panels) {
    meet();
    return settle();
  }
  Items items = {0, 0, h.n_items, h.n_chunks, h.n_blocks, h.items_inverse, base};
  items.advance(hand.warp(), ring);
  base.advance(share.n_panels * h.n_items, ring.n_slots, ring.inverse);
  if (h.dtype == TL_BF16)
    run_share<FloatWeights<Bf16>>(t, h, m, hand, ring, share, items, settle);
  else if (h.dtype == TL_INT8)
    run_share<Int8Weights>(t, h, m, hand, ring, share, items, settle);
  else
    run_share<FloatWeights<F16>>(t, h, m, hand, ring, share, items, settle);
}

#endif

}  // namespace tl
