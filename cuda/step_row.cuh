// How the row of a product comes to a CTA's shared memory, in a step as one kernel (step.cu): from the words of earlier tasks, through the row
// program or as an operand that is finished.
#pragma once

#include "step_stream.cuh"

namespace tl {

constexpr int kNormPartials = 3;  // the last norm's, and two that norms before it take in turn

// Shared memory of products; step_attend.cuh lays out attention's.
struct StepMemory {
  uint8_t *operand;     // of the product's row
  float *partial;       // (panels, 16, sums_stride) of a round: an output's sums are in order
  float *norm_partial;  // kNormPartials * kWarps, each kWarps of them for a norm
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

// A thread's quads of a row of floats: from words of two floats each, or from memory. `meanwhile` is called when words have been asked for.
template <class Meanwhile>
TL_DEVICE void take_quads(float4 (&v)[kStepQuads], const Handover &hand, const Channel &c, const float *p, int n, const Meanwhile &meanwhile) {
  if (!c.words) {
    meanwhile();
    return read_quads(v, hand, p, n);
  }
  Flagged word[2 * kStepQuads];
  uint64_t data[2 * kStepQuads];
  const uint8_t *from = c.words + row_word_at(hand.thread * 2);
  static_assert(kStepQuads == 2, "two quads are four words");
  const int count = hand.quad(1) < n ? 4 : hand.quad(0) < n ? 2 : 0;
  const auto at = [&](int i) { return from + i / 2 * row_word_at(kThreads * 2) + row_word_at(i % 2); };
  ask_words(word, count, at);
  meanwhile();
  await_words(data, word, count, hand.flag - c.back, at);
#pragma unroll
  for (int j = 0; j < kStepQuads; j++) v[j] = quad_from(data + 2 * j);
}
TL_DEVICE void take_quads(float4 (&v)[kStepQuads], const Handover &hand, const Channel &c, const float *p, int n) {
  take_quads(v, hand, c, p, n, [] {});
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

// norm_quads of quads that are zero where the row has none. `partial`: kWarps shared floats that no other norm in flight uses.
TL_DEVICE void norm_row(float4 (&v)[kStepQuads], const float4 (&weight)[kStepQuads], float per_value, float eps, shared_t partial,
                        const Handover &hand) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kStepQuads; j++) sum = fmaf(v[j].w, v[j].w, fmaf(v[j].z, v[j].z, fmaf(v[j].y, v[j].y, fmaf(v[j].x, v[j].x, sum))));
  sum = warp_sum(sum);
  if (hand.lane() == 0) store_shared4(partial + hand.warp() * 4, float_bits(sum));
  meet();
  const uint4 a = load_shared16(partial), b = load_shared16(partial + 16);
  static_assert(kWarps == 8, "as block_sum");
  sum = ((bits_float(a.x) + bits_float(a.y)) + (bits_float(a.z) + bits_float(a.w))) +
        ((bits_float(b.x) + bits_float(b.y)) + (bits_float(b.z) + bits_float(b.w)));
  const float inverse = rsqrtf(sum * per_value + eps);
#pragma unroll
  for (int j = 0; j < kStepQuads; j++)
    v[j] =
        make_float4(v[j].x * inverse * weight[j].x, v[j].y * inverse * weight[j].y, v[j].z * inverse * weight[j].z, v[j].w * inverse * weight[j].w);
}

// The row program, to the operand in shared memory. What it may read early it reads first: weights of norms, a row that is added, what is
// appended. `meanwhile` is called when the row has been asked for.
template <class Op, class Meanwhile>
TL_DEVICE void run_step_program(const StepProduct &t, const ProductHead &h, const StepMemory &m, const Handover &hand, const Meanwhile &meanwhile) {
  const int n = h.dim, early = h.early, n_in = t.tail ? 2 * n : n;
  const float eps = t.eps, per_value = reciprocal((float)n);
  const bool ends_normed = t.last_norm;
  float4 weight[kStepQuads], last_weight[kStepQuads], v[kStepQuads], other[kStepQuads] = {};
  int mine[kStepQuads];
  shared_t to[kStepQuads], partial = shared_of(m.norm_partial);
  uint32_t kinds = h.kinds;
  int n_norms = 0;
  read_quads(weight, hand, t.first_norm, t.first_norm ? n : 0);
  read_quads(last_weight, hand, t.last_norm, ends_normed ? n : 0);
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
#pragma unroll
  for (int j = 0; j < kStepQuads; j++) work_out(mine[j]), work_out(to[j]);
  work_out(partial);
  take_quads(v, hand, h.row, (const float *)t.source, n, meanwhile);
#pragma unroll 1
  for (int o = 1; kinds; o++, kinds >>= kKindBits) {
    const int kind = kinds % (1 << kKindBits);
    if (kind == kRowNorm) {
      if (n_norms) read_quads(weight, hand, t.op[o].p, n);
      norm_row(v, weight, per_value, eps, partial + (1 + n_norms++ % 2) * kWarps * 4, hand);
    } else if (kind == kRowAdd) {
      if (o != early) take_quads(other, hand, t.op[o].channel, t.op[o].p, n);
#pragma unroll
      for (int j = 0; j < kStepQuads; j++) v[j] = make_float4(v[j].x + other[j].x, v[j].y + other[j].y, v[j].z + other[j].z, v[j].w + other[j].w);
    } else if ((int)blockIdx.x == h.first_cta) {  // kRowStore
      const StepOp op = t.op[o];
#pragma unroll
      for (int j = 0; j < kStepQuads; j++)
        if (mine[j]) store_quad<true>(const_cast<float *>(op.p), hand.quad(j), n, v[j]);
      if (op.channel.words) hand_quads(hand, op.channel, v, pad16(n));  // a product adds its padding, too
    }
  }
  if (ends_normed) norm_row(v, last_weight, per_value, eps, partial, hand);
#pragma unroll
  for (int j = 0; j < kStepQuads; j++)
    if (mine[j]) put_quad<Op>(to[j], v[j]);
}

// The operand that an earlier task left: words of four columns, or memory. `meanwhile` is called when its first words have been asked for.
template <class Meanwhile>
TL_DEVICE void take_operand(const StepProduct &t, const ProductHead &h, const StepMemory &m, const Handover &hand, const Meanwhile &meanwhile) {
  constexpr int kAtOnce = 6;
  const int n = h.n_blocks * 4;  // words
  const uint8_t *const words = h.row.words;
  if (!words) {
    meanwhile();
#pragma unroll 2
    for (int i = hand.thread * 16; i < n * 8; i += kThreads * 16) *(uint4 *)(m.operand + i) = *(const uint4 *)((const uint8_t *)t.source + i);
    return;
  }
  const uint64_t flag = hand.flag - h.row.back;
  shared_t to = shared_of(m.operand) + four_at(hand.thread * 4);
  const auto take = [&](int i, const auto &meanwhile) {
    Flagged word[kAtOnce];
    uint64_t data[kAtOnce];
    const int mine = (n - i + kThreads - 1) / kThreads;
    const auto at = [&](int j) { return words + operand_word_at((i + j * kThreads) * 4); };
    ask_words(word, mine, at);
    meanwhile();
    await_words(data, word, mine, flag, at);
#pragma unroll
    for (int j = 0; j < kAtOnce; j++)
      if (j < mine) put_four(to + j * kThreads * 8, (uint32_t)data[j], (uint32_t)(data[j] >> 32));
  };
  take(hand.thread, meanwhile);
#pragma unroll 1
  for (int i = hand.thread + kThreads * kAtOnce; i - hand.lane() < n; i += kThreads * kAtOnce) {  // by whole warps
    to += kThreads * kAtOnce * 8;
    take(i, [] {});
  }
}

#endif

}  // namespace tl
