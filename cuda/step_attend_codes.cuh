// What attention of a step (step_attend.cuh) does in its own way where K and V are codes: a page may end anywhere in its slot of the ring,
// products with codes are exact in int32, the row's own k and v are codes too, and O goes out turned (step_turn.cuh). The numbers are those
// of attend_codes.cuh.
//
// A unit has eight queries at most, and a left operand all of theirs: rows 0 to 7 their high bytes, rows 8 to 15 the low ones. One product
// gives both, and a lane has both sums of its query.
#pragma once

#include "attend_codes.cuh"
#include "step_attend.cuh"

namespace tl {

#if TL_HOPPER

constexpr int kDimsOfLane = kStepHeadPad / 32;  // of a head that is placed
static_assert(kDimsOfLane == 4, "a word of codes is four dims");

TL_DEVICE float *query_scales(const AttentionMemory &m) { return (float *)(m.q() + kTileQueries * kStepHeadPad); }
// Of the row's own k or v: a word of codes of each lane, then its scale, with a zero above it.
TL_DEVICE uint32_t *new_codes(const AttentionMemory &m, int part) { return (uint32_t *)m.new_kv(part); }

// Where the row's own codes go: a page in memory, or its copy in the ring.
struct PageInMemory {
  uint8_t *at;
  TL_DEVICE_MEMBER void put_byte(int i, uint32_t v) const { at[i] = (uint8_t)v; }
  TL_DEVICE_MEMBER void put_half(int i, uint32_t v) const { *(uint16_t *)(at + i) = (uint16_t)v; }
  TL_DEVICE_MEMBER void put_word(int i, uint32_t v) const { *(uint32_t *)(at + i) = v; }
};
struct PageInRing {
  shared_t at;
  TL_DEVICE_MEMBER void put_byte(int i, uint32_t v) const { store_shared1(at + i, v); }
  TL_DEVICE_MEMBER void put_half(int i, uint32_t v) const { store_shared2(at + i, v); }
  TL_DEVICE_MEMBER void put_word(int i, uint32_t v) const { store_shared4(at + i, v); }
};

// The row's own keys, or its values, of one KV head: as store_codes has them.
template <class Page>
TL_DEVICE void put_key_codes(const Page &page, const uint32_t *row, int lane, int head_pad, int slot) {
  if (lane * kDimsOfLane < head_pad) page.put_word(k_code_at(slot, lane * kDimsOfLane), row[lane]);
  if (lane == 0) page.put_half(k_scale_at(head_pad) + 2 * slot, row[32]);
}
template <class Kv, class Page>
TL_DEVICE void put_value_codes(const Page &page, const uint32_t *row, int lane, int head_pad, int slot) {
  constexpr int kRows = kStepHeadPad * Kv::kValueBits / 8, kGroupLanes = TL_KV_GROUP / kDimsOfLane;
  const uint8_t *const bytes = (const uint8_t *)row;
#pragma unroll
  for (int i = lane; i < kRows; i += 32) {
    const int dim = Kv::kValueBits == 4 ? i / 16 * 32 + i % 16 : i;
    if (dim < head_pad) page.put_byte(i * TL_PAGE_POSITIONS + key_place(slot), bytes[dim]);
  }
  if (Kv::kValueBits == 8 ? lane == 0 : lane % kGroupLanes == 0 && lane * kDimsOfLane < head_pad) {
    const int at = (lane / kGroupLanes * TL_PAGE_POSITIONS + slot) * 2;
    page.put_half(v_scale_at(Kv::kDtype, head_pad) + at, row[32 + lane]);
    if (Kv::kValueBits == 4) page.put_half(v_zero_at(Kv::kDtype, head_pad) + at, row[32 + lane] >> 16);
  }
}

// A finished head of the row: q to the tile, k and v as codes, kept beside the page they go to. `page`: NULL where another CTA stores them.
template <class Kv>
TL_DEVICE void place_codes(const AttentionShape &shape, const AttentionMemory &m, const float *v, int lane, int i, int part, uint8_t *page, int slot) {
  const int dim = lane * kDimsOfLane, head_pad = shape.head_pad;
  float x[kDimsOfLane];
  load_dims(x, v, head_pad, lane);
  turn_head(x, shape.turn, shape.turn_scale, lane);
  if (part < 0) {
    const QueryCodes<kDimsOfLane> q = query_codes(x);
    if (dim < code_pad(head_pad)) {
      *(uint32_t *)(m.q() + k_code_at(i, dim)) = q.high[0];
      *(uint32_t *)(m.q() + k_code_at(i + 8, dim)) = q.low[0];
    }
    if (lane == 0) query_scales(m)[i] = q.scale;
    return;
  }
  const HeadCodes<kDimsOfLane> codes = !part || Kv::kValueBits == 8 ? codes_int8(x) : codes_int4(x, shape.head_dim, lane);
  uint32_t *const row = new_codes(m, part);
  row[lane] = codes.byte[0];
  row[32 + lane] = codes.scale;
  __syncwarp();
  if (!page) return;
  if (part)
    put_value_codes<Kv>(PageInMemory{page}, row, lane, head_pad, slot);
  else
    put_key_codes(PageInMemory{page}, row, lane, head_pad, slot);
}

// Where a page's scales and zeros lie in its keys and in its values.
struct ScalePlaces {
  int key, value, zero;
};
template <class Kv>
TL_DEVICE ScalePlaces scale_places(int head_pad) {
  return {k_scale_at(head_pad), v_scale_at(Kv::kDtype, head_pad), v_zero_at(Kv::kDtype, head_pad)};
}

// As four_scales, of a group in the ring.
TL_DEVICE void read_scales(float (&v)[4], shared_t group, int lane) {
  const float2 a = Bf16::unpack(load_shared4(group + lane % 4 * 4)), b = Bf16::unpack(load_shared4(group + 16 + lane % 4 * 4));
  v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
}

// Values that no one reads may have scales and zeros that are no number: in the copies of a warp's pages they become 0, as is P. A lane a key.
template <class Kv>
TL_DEVICE void clear_unread(const TeamChunk &c, const shared_t (&v)[kPagesOfWarp], const ScalePlaces &at, const Keys &keys, int lane, int head_pad) {
  const int key = c.first + lane, slot = lane % TL_PAGE_POSITIONS;
  static_assert(kPagesOfWarp * TL_PAGE_POSITIONS == 32, "a key a lane");
  if (key >= keys.first && key < keys.end) return;
  const shared_t page = lane < TL_PAGE_POSITIONS ? v[0] : v[1];
#pragma unroll 1
  for (int group = 0; group < n_value_groups(Kv::kDtype, head_pad); group++) {
    store_shared2(page + at.value + group * kScaleBytes + 2 * slot, 0);
    if (Kv::kValueBits == 4) store_shared2(page + at.zero + group * kScaleBytes + 2 * slot, 0);
  }
}

// Sum over the chunk of the lane's query: the tree of sum_of_chunk.
TL_DEVICE float sum_of_lanes(const float (&x)[kPagesOfChunk][4]) {
  float w[kPagesOfChunk];
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) w[j] = (x[j][0] + x[j][1]) + (x[j][2] + x[j][3]);
  float sum = (w[0] + w[1]) + (w[2] + w[3]);
  sum = sum + __shfl_xor_sync(0xffffffffu, sum, 1);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

// P with the scales of a group of V's dims, as a left operand of both bytes, and what its products are scaled by.
struct StepWeights {
  uint32_t both[kPagesOfChunk / 2][4];
  float scale, zero;
};

// scales, zeros: of the group, in each page.
template <class Kv>
TL_DEVICE void weigh_scales(StepWeights &w, const float (&p)[kPagesOfChunk][4], const shared_t (&scales)[kPagesOfChunk], int zeros, int lane) {
  float y[kPagesOfChunk][4], four[4], top = 0.0f;
  if (Kv::kValueBits == 4) {
#pragma unroll
    for (int j = 0; j < kPagesOfChunk; j++) {
      read_scales(four, scales[j] + zeros, lane);
#pragma unroll
      for (int i = 0; i < 4; i++) y[j][i] = p[j][i] * four[i];
    }
    w.zero = sum_of_lanes(y);
  }
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    read_scales(four, scales[j], lane);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      y[j][i] = p[j][i] * four[i];
      top = max_nan(top, fabsf(y[j][i]));
    }
  }
  top = max_nan(top, __shfl_xor_sync(0xffffffffu, top, 1));
  top = max_nan(top, __shfl_xor_sync(0xffffffffu, top, 2));
  const OperandScale s = operand_scale(top);
  w.scale = s.scale;
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    int o[4];
#pragma unroll
    for (int i = 0; i < 4; i++) o[i] = operand_of(y[j][i], s);
    w.both[j / 2][j % 2 * 2] = high_bytes(o[0], o[1], o[2], o[3]);
    w.both[j / 2][j % 2 * 2 + 1] = low_bytes(o[0], o[1], o[2], o[3]);
  }
}

// Sixteen dims of O from zero, to whoever merges them. codes[i]: what ldmatrix brings of pages 2 i and 2 i + 1.
template <class Kv>
TL_DEVICE void weigh_sixteen(const StepWeights &w, const uint32_t (&codes)[kPagesOfChunk / 2][4], uint8_t *word, bool exists, uint64_t flag) {
  int sum[2][4] = {};
#pragma unroll
  for (int j = 0; j < kPagesOfChunk / 2; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) mma_s8(sum[i], w.both[j], codes[j][2 * i], codes[j][2 * i + 1]);
  float o[2][2];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float product = (float)whole(sum[i / 2][i % 2], sum[i / 2][i % 2 + 2]);
    o[i / 2][i % 2] = Kv::kValueBits == 4 ? fmaf(product, w.scale, w.zero) : product * w.scale;
  }
  if (!exists) return;
  store_flagged(word, two_floats(o[0][0], o[0][1]), flag);
  store_flagged(word + 64, two_floats(o[1][0], o[1][1]), flag);
}

// P V of the chunk: each warp of the team its share of V's rows of bytes. v: this lane's rows in a pair of pages.
template <class Kv>
TL_DEVICE void weigh_values(const TeamLane &me, const TeamChunk &c, const float (&p)[kPagesOfChunk][4], const ScalePlaces &at) {
  const int lane = me.lane, head_pad = me.head_pad;
  shared_t scales[kPagesOfChunk], rows[kPagesOfChunk / 2];
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) scales[j] = c.v[j] - lane * 16 + at.value;
#pragma unroll
  for (int j = 0; j < kPagesOfChunk / 2; j++)  // page, dims, row
    rows[j] = (lane / 8 % 2 ? c.v[2 * j + 1] : c.v[2 * j]) - lane * 16 + lane / 16 * 128 + lane % 8 * 16;
  StepWeights weights;
  if (Kv::kValueBits == 8) weigh_scales<Kv>(weights, p, scales, 0, lane);
  uint8_t *const first = c.to + (1 + lane % 4) * 16;
#pragma unroll 2
  for (int unit = me.w; unit * Kv::kUnitDims < head_pad; unit += kWarpsOfTeam) {
    uint32_t codes[kPagesOfChunk / 2][4];
#pragma unroll
    for (int j = 0; j < kPagesOfChunk / 2; j++) ldmatrix4(codes[j], rows[j] + unit * 256);
    if constexpr (Kv::kValueBits == 8) {
      weigh_sixteen<Kv>(weights, codes, first + unit * 128, me.exists[0], c.flag);
    } else {
      shared_t group[kPagesOfChunk];
#pragma unroll
      for (int j = 0; j < kPagesOfChunk; j++) group[j] = scales[j] + unit * kScaleBytes;
      weigh_scales<Kv>(weights, p, group, at.zero - at.value, lane);
#pragma unroll
      for (int upper = 0; upper < 2; upper++) {
        if (unit * Kv::kUnitDims + upper * 16 >= head_pad) break;
        uint32_t half[kPagesOfChunk / 2][4];
#pragma unroll
        for (int i = 0; i < kPagesOfChunk * 2; i++) half[i / 4][i % 4] = codes[i / 4][i % 4] >> 4 * upper & 0x0f0f0f0fu;
        weigh_sixteen<Kv>(weights, half, first + (unit * 2 + upper) * 128, me.exists[0], c.flag);
      }
    }
  }
}

// Scores of the lane's query against its keys of the warp's pages, in units of log2(e).
TL_DEVICE void score_step_codes(float (&s)[kPagesOfWarp][4], const TeamLane &me, const TeamChunk &c, int key_scales, float scale) {
  int sum[kPagesOfWarp][2][4] = {};
#pragma unroll 2
  for (int b = 0; b < code_pad(me.head_pad) / kCodeBlock; b++) {
    uint32_t q[4], k[kPagesOfWarp][4];
    ldmatrix4(q, me.q + b * 512);
#pragma unroll
    for (int j = 0; j < kPagesOfWarp; j++) ldmatrix4(k[j], c.k[j] + b * 512);
#pragma unroll
    for (int j = 0; j < kPagesOfWarp; j++) {
      mma_s8(sum[j][0], q, k[j][0], k[j][2]);
      mma_s8(sum[j][1], q, k[j][1], k[j][3]);
    }
  }
#pragma unroll
  for (int j = 0; j < kPagesOfWarp; j++) {
    float key[4];
    read_scales(key, c.k[j] - me.lane * 16 + key_scales, me.lane);
#pragma unroll
    for (int i = 0; i < 4; i++) s[j][i] = ((float)whole(sum[j][i / 2][i % 2], sum[j][i / 2][i % 2 + 2]) * key[i]) * scale;
  }
}

// attend_chunk of codes.
template <class Kv>
TL_DEVICE void attend_code_chunk(const TeamLane &me, const AttentionMemory &m, const Ring &ring, const TeamChunk &c, const Keys &keys, int pos) {
  const int w = me.w, lane = me.lane, head_pad = me.head_pad;
  const ScalePlaces at = scale_places<Kv>(head_pad);
  float s[kPagesOfWarp][4], p[kPagesOfChunk][4], top = kMasked;
  const shared_t values[kPagesOfWarp] = {(w ? c.v[2] : c.v[0]) - lane * 16, (w ? c.v[3] : c.v[1]) - lane * 16};
  static_assert(kPagesOfWarp == 2 && kWarpsOfTeam == 2, "two warps with two pages each");
  wait_for_pages(ring, c);
  if (!c.is_whole) clear_unread<Kv>(c, values, at, keys, lane, head_pad);
  if (c.inserted >= 0) {
    __syncwarp();  // slots of keys that no one reads are not the row's own; but stores to one line stay in order
    put_key_codes(PageInRing{(c.inserted ? c.k[1] : c.k[0]) - lane * 16}, new_codes(m, 0), lane, head_pad, pos % TL_PAGE_POSITIONS);
    put_value_codes<Kv>(PageInRing{c.inserted ? values[1] : values[0]}, new_codes(m, 1), lane, head_pad, pos % TL_PAGE_POSITIONS);
    __syncwarp();
  }
  score_step_codes(s, me, c, at.key, query_scales(m)[lane / 4] * me.scale);
  if (!c.is_whole)
#pragma unroll
    for (int j = 0; j < kPagesOfWarp; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = c.first + j * TL_PAGE_POSITIONS + i / 2 * 8 + lane % 4 * 2 + i % 2;
        s[j][i] = key >= keys.first && key < keys.end ? s[j][i] : kMasked;
      }
#pragma unroll
  for (int j = 0; j < kPagesOfWarp; j++) top = larger<Kv>(top, larger<Kv>(larger<Kv>(s[j][0], s[j][1]), larger<Kv>(s[j][2], s[j][3])));
  top = row_maximum<Kv>(top);
  if (lane % 4 == 0) me.top[0] = top;
  sync_threads(me.barrier, kWarpsOfTeam * 32);
  top = chunk_maximum<Kv>(larger<Kv>(top, me.other_top[0]), me.scale);
#pragma unroll
  for (int j = 0; j < kPagesOfWarp; j++) {
#pragma unroll
    for (int i = 0; i < 4; i++) s[j][i] = s[j][i] == kMasked ? 0.0f : exp2_fast(s[j][i] - top);
    me.p[(w * kPagesOfWarp + j) * 32] = make_uint4(float_bits(s[j][0]), float_bits(s[j][1]), float_bits(s[j][2]), float_bits(s[j][3]));
  }
  sync_threads(me.barrier, kWarpsOfTeam * 32);
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    const uint4 four = me.p[j * 32];
    p[j][0] = bits_float(four.x), p[j][1] = bits_float(four.y), p[j][2] = bits_float(four.z), p[j][3] = bits_float(four.w);
  }
  weigh_values<Kv>(me, c, p, at);
  if (w) {
    const float l = sum_of_lanes(p);
    if (me.exists[0] && lane % 4 == 0) store_flagged(c.to, two_floats(top, l), c.flag);
  }
  if (c.inserted >= 0 || !c.is_whole) fence_bulk_copies();  // the slots are copied to next
  free_pages(ring, c, lane);
}

// O / l of a quad, turned as it is, to whoever turns it back. By the warp that merged it.
TL_DEVICE void hand_turned(const AttentionHead &h, const Handover &hand, const Quad &quad, const Total &total) {
  const int lane = hand.lane();
  const float y = total.l != 0.0f ? total.o * (1.0f / total.l) : 0.0f, next = __shfl_sync(0xffffffffu, y, lane + 1);
  if (lane < 4 && lane % 2 == 0) store_flagged(h.words + (quad.column + lane) * 8, two_floats(y, next), hand.flag);
}

#endif

}  // namespace tl
