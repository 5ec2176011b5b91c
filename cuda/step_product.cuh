// A product of one row, as a task of a step (step.cu). The bits are those of gemv.cu: every chunk of columns from zero by one warp, the
// sums of an output in index order. What counts here is how few instructions depend on each other from the last word that comes in to
// the first that goes out.
#pragma once

#include "step_row.cuh"
#include "weights.cuh"

namespace tl {

constexpr int kRoundUnits = kWarps * 2;  // that are summed at a time: a thread an output
// Floats of an output's sums.
TL_BOTH int sums_stride(int n_chunks) { return round_up(n_chunks, 4); }

#if TL_HOPPER

// What a thread needs to finish an output besides its sums: found before it waits for the row.
struct Output {
  bool exists, has_bias;
  int stride;          // chunks that a row has room for among the sums, a multiple of four: what is behind the last one is zero
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
    o.words = h.words && lane % 4 == 0 ? h.words + operand_word_at(column) : nullptr;
    return o;
  }
  o.words = h.words && lane % 2 == 0 ? h.words + row_word_at(output / 2) : nullptr;
  o.out = (float *)h.out + output;
  if (h.kind == kToLogits && output >= t.epilogue.n_valid) o.out = nullptr;
  if (h.kind != kAddToRows) return o;
  if (h.addend.words) {
    o.flag = hand.flag - h.addend.back;
    o.at = h.addend.words + row_word_at(output / 2);
    o.early = load_flagged(o.at);
  } else {
    o.addend = t.epilogue.addend[output];
  }
  return o;
}

TL_DEVICE float addend_of(const Output &o, int lane) {
  if (!o.at) return o.addend;
  const uint64_t word = o.early.flag == o.flag ? o.early.data : await_word(o.at, o.flag);
  return lane % 2 ? high_float(word) : low_float(word);
}

TL_DEVICE float add_four(float y, const uint4 &a) { return (((y + bits_float(a.x)) + bits_float(a.y)) + bits_float(a.z)) + bits_float(a.w); }

// Sums of an output's chunks, in order, and where gated of those of the panel behind it. Nothing changes them by adding zero: they are never a
// negative one.
template <bool kScaled>
TL_DEVICE void sum_chunks(float (&y)[2], const Output &o, bool gated) {
  const shared_t further = o.sums + kPanelRows * o.stride * 4;
  y[0] = y[1] = 0.0f;
#pragma unroll 1
  for (int c = 0; c < o.stride; c += 8) {
    uint4 part[4] = {};
    const bool more = c + 4 < o.stride;
    part[0] = load_shared16(o.sums + c * 4);
    if (more) part[1] = load_shared16(o.sums + c * 4 + 16);
    if (gated) part[2] = load_shared16(further + c * 4);
    if (gated && more) part[3] = load_shared16(further + c * 4 + 16);
    y[0] = add_four(add_four(y[0], part[0]), part[1]);
    y[1] = add_four(add_four(y[1], part[2]), part[3]);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (kScaled) y[i] = y[i] * o.scale[i];
    if (o.has_bias) y[i] = y[i] + o.bias[i];
  }
}

// Stores each thread's output; neighbouring lanes hand on theirs together, two floats or four operands a word. By whole warps.
template <bool kScaled>
TL_DEVICE void finish(const Output &o, const StepProduct &t, const ProductHead &h, const Handover &hand) {
  const int lane = hand.lane(), kind = h.kind;
  const bool gated = h.unit_panels == 2;
  float sum[2];
  sum_chunks<kScaled>(sum, o, gated);
  float y = sum[0];
  if (kind == kActivate) {
    y = h.act == TL_ACT_SILU ? silu(y) : activate(h.act, y);
    if (gated) y = y * sum[1];
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
  __syncwarp();
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

// Where a lane leaves the sums of an item's chunks, found before they are there: lanes 0, 4, ... rows lane / 4 and lane / 4 + 8. Behind the last
// chunk the lanes after them leave zeros.
template <class W>
struct ItemPlace {
  shared_t to;
  int stride, behind;
  int left, room;  // chunks from the item's first one on; places for the last one and what is behind it
  TL_DEVICE_MEMBER ItemPlace(const Items &items, int begin, shared_t sums, int stride, int lane) : stride(stride), behind(lane % 4) {
    const int chunk = items.part * Chunks<W>::kChunks;
    left = items.n_chunks - chunk;
    room = stride - items.n_chunks + 1;
    to = sums + ((items.panel - begin) * kPanelRows * stride + chunk + behind) * 4;
    work_out(to);
  }
  TL_DEVICE_MEMBER void leave(const float (&d)[Chunks<W>::kChunks][4]) const {
#pragma unroll
    for (int c = 0; c < Chunks<W>::kChunks; c++) {
      const int lanes = left - c == 1 ? room : left > c;
      store_shared4_if(behind < lanes, to + c * 4, behind ? 0 : float_bits(d[c][0]));
      store_shared4_if(behind < lanes, to + (8 * stride + c) * 4, behind ? 0 : float_bits(d[c][2]));
    }
  }
};

// This warp's items of the panels before `end`: the sums of their chunks, those of panel `begin` first in `sums`.
template <class W>
TL_DEVICE void sum_items(const StepProduct &t, const Ring &ring, Items &items, int begin, int end, int first_panel, shared_t sums, int stride,
                         int lane, shared_t right, bool groups) {
  using C = Chunks<W>;
  // A warp that waits for an item has read the one eight before: the ring holds as many, so no slot is two uses behind.
#pragma unroll 1
  while (items.panel < end) {
    float d[C::kChunks][4] = {};
    const ItemPlace<W> place(items, begin, sums, stride, lane);
    const shared_t left = ring.wait(items.at) + lane * W::kLaneBytes;
    if (!groups && items.n_blocks - items.part * C::kBlocks >= C::kBlocks)
      C::multiply(d, left, right + items.part * C::kBlocks * 32);
    else
      sum_part<W>(d, t, items, left, right, first_panel);
    __syncwarp();
    if (lane == 0) ring.free(items.at, kArrivals);
    place.leave(d);
    items.advance(kWarps, ring);
  }
}

// The sums of the item that a warp holds, and beside them those of its next one, where that is whole and there.
template <class W>
TL_DEVICE void sum_held(const HeldChunks<W> &held, const Ring &ring, Items &items, int end, shared_t sums, int stride, int lane, shared_t right) {
  using C = Chunks<W>;
  float d[C::kChunks][4] = {};
  const ItemPlace<W> place(items, 0, sums, stride, lane);
  const shared_t held_right = right + items.part * C::kBlocks * 32;
  items.advance(kWarps, ring);
  if constexpr (!W::kInt8) {
    if (items.panel < end && items.n_blocks - items.part * C::kBlocks >= C::kBlocks && ring.is_there(items.at)) {
      float next[C::kChunks][4] = {};
      const ItemPlace<W> next_place(items, 0, sums, stride, lane);
      held.multiply_beside(d[0], held_right, next[0], ring.address(items.at) + lane * W::kLaneBytes, right + items.part * C::kBlocks * 32);
      __syncwarp();
      if (lane == 0) ring.free(items.at, kArrivals);
      place.leave(d);
      next_place.leave(next);
      return items.advance(kWarps, ring);
    }
  }
  held.multiply(d, held_right);
  place.leave(d);
}

// The CTA's share of a product, its weights of type W. `settle` is called when all threads are in this task. `may_hold`: whether a warp may look
// for its first item before all threads are here, see kHoldSlots.
template <class W, class Settle>
TL_DEVICE void run_share(const StepProduct &t, const ProductHead &h, const StepMemory &m, const Handover &hand, const Ring &ring,
                         const CtaShare &share, Items &items, bool may_hold, const Settle &settle) {
  const int lane = hand.lane(), first_unit = hand.warp() * 2 * h.unit_panels, stride = sums_stride(h.n_chunks);  // a warp finishes two units
  const bool groups = W::kInt8 && h.groups;
  const shared_t right = shared_of(m.operand) + lane % 4 * 8;
  const shared_t sums = shared_of(m.partial) + lane / 4 * stride * 4;
  int begin = 0, end = min(h.round_panels, share.n_panels);
  Output o;
  HeldChunks<W> held = {};
  const bool is_whole = items.panel < end && !groups && items.n_blocks - items.part * Chunks<W>::kBlocks >= Chunks<W>::kBlocks;
  bool holds = false;
  // While the row is on its way. The warp's first item comes to registers where it is there, so that the ring has room again.
  const auto meanwhile = [&] {
    o = output_of(t, h, m, hand, share, 0);
    holds = may_hold && is_whole && ring.is_there(items.at);
    if (!holds) return;
    held.load(ring.address(items.at) + lane * W::kLaneBytes);
    __syncwarp();
    if (lane == 0) ring.free(items.at, kArrivals);
  };
  if (h.n_ops)
    run_step_program<typename W::Op>(t, h, m, hand, meanwhile);
  else
    take_operand(t, h, m, hand, meanwhile);
  meet();
  if (holds) sum_held<W>(held, ring, items, end, sums, stride, lane, right);
  sum_items<W>(t, ring, items, 0, end, share.first_panel, sums, stride, lane, right, groups);
  meet();
  if (first_unit < end) finish<W::kInt8>(o, t, h, hand);
  settle();
#pragma unroll 1
  while (end < share.n_panels) {
    begin = end;
    end = min(begin + h.round_panels, share.n_panels);
    meet();
    o = output_of(t, h, m, hand, share, begin);
    sum_items<W>(t, ring, items, begin, end, share.first_panel, sums, stride, lane, right, groups);
    meet();
    if (first_unit < end - begin) finish<W::kInt8>(o, t, h, hand);
  }
}

template <class Settle>
TL_DEVICE void run_product(const StepProduct &t, const StepMemory &m, const Handover &hand, const Ring &ring, RingPlace &base, bool may_hold,
                           const Settle &settle) {
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
    run_share<FloatWeights<Bf16>>(t, h, m, hand, ring, share, items, may_hold, settle);
  else if (h.dtype == TL_INT8)
    run_share<Int8Weights>(t, h, m, hand, ring, share, items, may_hold, settle);
  else
    run_share<FloatWeights<F16>>(t, h, m, hand, ring, share, items, may_hold, settle);
}

#endif

}  // namespace tl
