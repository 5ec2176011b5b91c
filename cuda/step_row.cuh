// How the row of a product comes to a CTA's shared memory, in a step as one kernel (step.cu): from the words of earlier tasks, through the row
// program or as an operand that is finished.
#pragma once

#include "step_stream.cuh"

namespace tl {

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

TL_DEVICE float4 quad_from(const uint64_t *word) {
  return make_float4(low_float(word[0]), high_float(word[0]), low_float(word[1]), high_float(word[1]));
}

// A thread's quads of a row of floats: from words of two floats each, or from memory.
TL_DEVICE void take_quads(float4 (&v)[kStepQuads], const Handover &hand, const Channel &c, const float *p, int n) {
  if (!c.words) return read_quads(v, hand, p, n);
  uint64_t data[2 * kStepQuads];
  const uint8_t *from = c.words + row_word_at(hand.thread * 2);
  static_assert(kStepQuads == 2, "two quads are four words");
  await_words(data,
              hand.quad(1) < n   ? 4
              : hand.quad(0) < n ? 2
                                 : 0,
              hand.flag - c.back, [&](int i) { return from + i / 2 * row_word_at(kThreads * 2) + row_word_at(i % 2); });
#pragma unroll
  for (int j = 0; j < kStepQuads; j++) v[j] = quad_from(data + 2 * j);
}

TL_DEVICE void hand_quads(const Handover &hand, const Channel &c, const float4 (&v)[kStepQuads], int n) {
#pragma unroll
  for (int j = 0; j < kStepQuads; j++) {
    if (hand.quad(j) >= n) break;
    uint8_t *to = c.words + row_word_at(hand.quad(j) / 2);
    store_flagged(to, two_floats(v[j].x, v[j].y), hand.flag);
    store_flagged(to + row_word_at(1), two_floats(v[j].z, v[j].w), hand.flag);
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
    v[j] =
        make_float4(v[j].x * inverse * weight[j].x, v[j].y * inverse * weight[j].y, v[j].z * inverse * weight[j].z, v[j].w * inverse * weight[j].w);
}

// The row program, to the operand in shared memory. What it may read early it reads first: weights of norms, a row that is added, what is
// appended.
template <class Op>
TL_DEVICE void run_step_program(const StepProduct &t, const ProductHead &h, const StepMemory &m, const Handover &hand) {
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
  take_quads(v, hand, h.row, (const float *)t.source, n);
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

// The operand that an earlier task left: words of four columns, or memory.
TL_DEVICE void take_operand(const StepProduct &t, const ProductHead &h, const StepMemory &m, const Handover &hand) {
  constexpr int kAtOnce = 6;
  const int n = h.n_blocks * 4;  // words
  const uint8_t *const words = h.row.words;
  if (!words) {
#pragma unroll 2
    for (int i = hand.thread * 16; i < n * 8; i += kThreads * 16) *(uint4 *)(m.operand + i) = *(const uint4 *)((const uint8_t *)t.source + i);
    return;
  }
  const uint64_t flag = hand.flag - h.row.back;
  shared_t to = shared_of(m.operand) + four_at(hand.thread * 4);
#pragma unroll 1
  for (int i = hand.thread; i < n; i += kThreads * kAtOnce, to += kThreads * kAtOnce * 8) {
    uint64_t data[kAtOnce];
    const int mine = (n - i + kThreads - 1) / kThreads;
    await_words(data, mine, flag, [&](int j) { return words + operand_word_at((i + j * kThreads) * 4); });
#pragma unroll
    for (int j = 0; j < kAtOnce; j++)
      if (j < mine) put_four(to + j * kThreads * 8, (uint32_t)data[j], (uint32_t)(data[j] >> 32));
  }
}

#endif

}  // namespace tl
