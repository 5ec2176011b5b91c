// What attention of a step (step_attend.cuh) does in its own way where K and V are codes: a page may end anywhere in its slot of the ring,
// products with codes are exact in int32, and the row's own k and v are codes too. The numbers are those of attend_codes.cuh.
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
  const uint32_t codes = row[lane], scale = row[32];
  if (lane * kDimsOfLane < head_pad) page.put_word(k_code_at(slot, lane * kDimsOfLane), codes);
  if (lane == 0) page.put_half(k_scale_at(head_pad) + 2 * slot, scale);
}
template <class Kv, class Page>
TL_DEVICE void put_value_codes(const Page &page, const uint32_t *row, int lane, int head_pad, int slot) {
  constexpr int kRows = kStepHeadPad * Kv::kValueBits / 8 / 32, kGroupLanes = TL_KV_GROUP / kDimsOfLane;
  const uint32_t scale = row[32 + lane];
  uint32_t byte[kRows];
  int dim[kRows];
#pragma unroll
  for (int i = 0; i < kRows; i++) {  // all are read before one is put, or each would wait for the one before
    const int at = lane + 32 * i;
    dim[i] = Kv::kValueBits == 4 ? at / 16 * 32 + at % 16 : at;
    byte[i] = ((const uint8_t *)row)[dim[i]];
  }
#pragma unroll
  for (int i = 0; i < kRows; i++)
    if (dim[i] < head_pad) page.put_byte((lane + 32 * i) * TL_PAGE_POSITIONS + key_place(slot), byte[i]);
  if (Kv::kValueBits == 8 ? lane == 0 : lane % kGroupLanes == 0 && lane * kDimsOfLane < head_pad) {
    const int at = (lane / kGroupLanes * TL_PAGE_POSITIONS + slot) * 2;
    page.put_half(v_scale_at(Kv::kDtype, head_pad) + at, scale);
    if (Kv::kValueBits == 4) page.put_half(v_zero_at(Kv::kDtype, head_pad) + at, scale >> 16);
  }
}

// A finished head of the row: q to the tile, k and v as codes, kept beside the page they go to. `page`: NULL where another CTA stores them.
template <class Kv>
TL_DEVICE void place_codes(const AttentionShape &shape, const AttentionMemory &m, const float *v, int lane, int i, int part, uint8_t *page,
                           int slot) {
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

// As four_scales, of a group in the ring: the lane's two words, and its four keys' scales or zeros in them.
struct ScaleWords {
  uint32_t word[2];
  TL_DEVICE_MEMBER void read(shared_t group, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) word[i] = load_shared4(group + i * 16 + lane % 4 * 4);
  }
  TL_DEVICE_MEMBER void multiply(float (&x)[4], const float (&by)[4]) const {
    const float2 a = Bf16::unpack(word[0]), b = Bf16::unpack(word[1]);
    x[0] = by[0] * a.x, x[1] = by[1] * a.y, x[2] = by[2] * b.x, x[3] = by[3] * b.y;
  }
};

// Values that no one reads may have scales and zeros that are no number: in the copies of a warp's pages they become 0, as is P. A lane a key.
template <class Kv>
TL_DEVICE void clear_unread(const TeamChunk &c, const shared_t (&v)[kPagesOfWarp], const ScalePlaces &at, const Keys &keys, int lane, int head_pad) {
  const int key = c.first + lane, slot = lane % TL_PAGE_POSITIONS;
  static_assert(kPagesOfWarp * TL_PAGE_POSITIONS == 32, "a key a lane");
  if ((key >= keys.first && key < keys.end) || !(lane < TL_PAGE_POSITIONS ? c.reads_own[0] : c.reads_own[1])) return;
  const shared_t page = lane < TL_PAGE_POSITIONS ? v[0] : v[1];
#pragma unroll 1
  for (int group = 0; group < n_value_groups(Kv::kDtype, head_pad); group++) {
    store_shared2(page + at.value + group * kScaleBytes + 2 * slot, 0);
    if (Kv::kValueBits == 4) store_shared2(page + at.zero + group * kScaleBytes + 2 * slot, 0);
  }
}

// Scores of the lane's query against its keys of the warp's pages, in units of log2(e).
TL_DEVICE void score_codes(float (&s)[kPagesOfWarp][4], const TeamLane &me, const TeamChunk &c, int key_scales, float scale) {
  const int lane = me.lane, n_blocks = code_pad(me.head_pad) / kCodeBlock;
  int sum[kPagesOfWarp][2][4] = {};
  shared_t page[kPagesOfWarp];
  ScaleWords key[kPagesOfWarp];
#pragma unroll
  for (int j = 0; j < kPagesOfWarp; j++) {
    page[j] = c.k[j] - lane * 16 + (lane % 8 + (lane & 8) * 2 + (lane & 16) / 2) * 16;  // both halves of eight keys' dims, then of the others'
    key[j].read(c.k[j] - lane * 16 + key_scales, lane);
  }
#pragma unroll 4
  for (int b = 0; b < n_blocks; b++) {
    uint32_t q[4], k[kPagesOfWarp][4];
    ldmatrix4(q, me.q + b * 512);
#pragma unroll
    for (int j = 0; j < kPagesOfWarp; j++) ldmatrix4(k[j], page[j] + b * 512);
#pragma unroll
    for (int j = 0; j < kPagesOfWarp; j++) {
      mma_s8(sum[j][0], q, k[j][0], k[j][1]);
      mma_s8(sum[j][1], q, k[j][2], k[j][3]);
    }
  }
#pragma unroll
  for (int j = 0; j < kPagesOfWarp; j++) {
    float product[4];
#pragma unroll
    for (int i = 0; i < 4; i++) product[i] = (float)whole(sum[j][i / 2][i % 2], sum[j][i / 2][i % 2 + 2]);
    key[j].multiply(s[j], product);
#pragma unroll
    for (int i = 0; i < 4; i++) s[j][i] = s[j][i] * scale;
  }
}

// What a warp reads of a chunk's values: its share of their rows of bytes, unit w and every second one from there. Of int4 each unit has scales
// and zeros of its own, of which the first one's scales are read here.
template <class Kv>
struct ValueWords {
  static constexpr int kUnits = kStepHeadPad / Kv::kUnitDims / kWarpsOfTeam;
  uint32_t codes[kUnits][kPagesOfChunk / 2][4];  // of two pages each
  ScaleWords scale[kPagesOfChunk];
  shared_t scale_at[kPagesOfChunk];  // where they were
  TL_DEVICE_MEMBER void read_scales(int unit, int lane) {
#pragma unroll
    for (int j = 0; j < kPagesOfChunk; j++) scale[j].read(scale_at[j] + unit * kWarpsOfTeam * kScaleBytes, lane);
  }
};
// Codes behind the head's end, which no one uses, are in the slot too.
template <class Kv>
TL_DEVICE void read_values(ValueWords<Kv> &v, const TeamLane &me, const TeamChunk &c, const ScalePlaces &at) {
  const int lane = me.lane;
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) v.scale_at[j] = c.v[j] - lane * 16 + at.value + (Kv::kValueBits == 4 ? me.w * kScaleBytes : 0);
  v.read_scales(0, lane);
#pragma unroll
  for (int j = 0; j < kPagesOfChunk / 2; j++) {  // a lane gives a row's address: page, dims, row
    const shared_t row = (lane & 8 ? c.v[2 * j + 1] : c.v[2 * j]) - lane * 16 + lane / 16 * 128 + lane % 8 * 16 + me.w * 256;
#pragma unroll
    for (int u = 0; u < ValueWords<Kv>::kUnits; u++) ldmatrix4(v.codes[u][j], row + u * kWarpsOfTeam * 256);
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
template <class Kv>
TL_DEVICE void weigh_scales(StepWeights &w, const float (&p)[kPagesOfChunk][4], const ScaleWords (&scale)[kPagesOfChunk],
                            const shared_t (&scale_at)[kPagesOfChunk], int zeros, int lane) {
  float y[kPagesOfChunk][4], largest[kPagesOfChunk];
  if (Kv::kValueBits == 4) {
#pragma unroll
    for (int j = 0; j < kPagesOfChunk; j++) {
      ScaleWords zero;
      zero.read(scale_at[j] + zeros, lane);
      zero.multiply(y[j], p[j]);
    }
    w.zero = sum_of_lanes(y);
  }
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    scale[j].multiply(y[j], p[j]);
    largest[j] = max_nan(max_nan(fabsf(y[j][0]), fabsf(y[j][1])), max_nan(fabsf(y[j][2]), fabsf(y[j][3])));
  }
  float top = max_nan(max_nan(largest[0], largest[1]), max_nan(largest[2], largest[3]));
  top = max_nan(top, __shfl_xor_sync(0xffffffffu, top, 1));
  top = max_nan(top, __shfl_xor_sync(0xffffffffu, top, 2));
  const OperandScale s = operand_scale(top);
  w.scale = s.scale;
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    const FourOperands o = four_operands(y[j][0], y[j][1], y[j][2], y[j][3], s);
    w.both[j / 2][j % 2 * 2] = o.high;
    w.both[j / 2][j % 2 * 2 + 1] = o.low;
  }
}

// Sixteen dims of O from zero: the lane's two, and the two eight dims on.
template <class Kv>
TL_DEVICE void weigh_sixteen(float (&o)[4], const StepWeights &w, const uint32_t (&codes)[kPagesOfChunk / 2][4]) {
  int sum[2][4] = {};
#pragma unroll
  for (int j = 0; j < kPagesOfChunk / 2; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) mma_s8(sum[i], w.both[j], codes[j][2 * i], codes[j][2 * i + 1]);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float product = (float)whole(sum[i / 2][i % 2], sum[i / 2][i % 2 + 2]);
    o[i] = Kv::kValueBits == 4 ? fmaf(product, w.scale, w.zero) : product * w.scale;
  }
}

// P V of the warp's share, to whoever merges it.
template <class Kv>
TL_DEVICE void weigh_values(const TeamLane &me, const TeamChunk &c, const float (&p)[kPagesOfChunk][4], ValueWords<Kv> &v, const ScalePlaces &at) {
  constexpr int kUnits = ValueWords<Kv>::kUnits;
  float o[kUnits][4];
  StepWeights weights;
  const auto leave = [&](int block, const float (&o)[4]) {
    uint8_t *const word = c.to + (1 + block * 8 + me.lane % 4) * 16;
    if (block * 16 >= me.head_pad) return;
    store_flagged(word, two_floats(o[0], o[1]), c.flag);
    store_flagged(word + 64, two_floats(o[2], o[3]), c.flag);
  };
  if constexpr (Kv::kValueBits == 8) {
    weigh_scales<Kv>(weights, p, v.scale, v.scale_at, 0, me.lane);
#pragma unroll
    for (int u = 0; u < kUnits; u++) weigh_sixteen<Kv>(o[u], weights, v.codes[u]);  // those behind the head's end too: no branch between them
    if (!me.exists[0]) return;
#pragma unroll
    for (int u = 0; u < kUnits; u++) leave(me.w + u * kWarpsOfTeam, o[u]);
  } else {
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
      const int unit = me.w + u * kWarpsOfTeam;
      if (unit * Kv::kUnitDims >= me.head_pad) break;
      if (u) v.read_scales(u, me.lane);
      weigh_scales<Kv>(weights, p, v.scale, v.scale_at, at.zero - at.value + u * kWarpsOfTeam * kScaleBytes, me.lane);
#pragma unroll
      for (int upper = 0; upper < 2; upper++) {
        uint32_t half[kPagesOfChunk / 2][4];
#pragma unroll
        for (int i = 0; i < kPagesOfChunk * 2; i++) half[i / 4][i % 4] = v.codes[u][i / 4][i % 4] >> 4 * upper & 0x0f0f0f0fu;
        weigh_sixteen<Kv>(o[upper], weights, half);
      }
      if (!me.exists[0]) continue;
      leave(2 * unit, o[0]);
      leave(2 * unit + 1, o[1]);
    }
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
    put_key_codes(PageInRing{(c.inserted ? c.k[1] : c.k[0]) - lane * 16}, new_codes(m, 0), lane, head_pad, pos % TL_PAGE_POSITIONS);
    put_value_codes<Kv>(PageInRing{c.inserted ? values[1] : values[0]}, new_codes(m, 1), lane, head_pad, pos % TL_PAGE_POSITIONS);
    __syncwarp();
  }
  score_codes(s, me, c, at.key, query_scales(m)[lane / 4] * me.scale);
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
  ValueWords<Kv> words;
  read_values(words, me, c, at);  // both warps have waited for theirs, and put in what is new
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
  weigh_values<Kv>(me, c, p, words, at);
  if (w) {
    const float l = sum_of_lanes(p);
    if (me.exists[0] && lane % 4 == 0) store_flagged(c.to, two_floats(top, l), c.flag);
  }
  if (c.inserted >= 0 || !c.is_whole) fence_bulk_copies();  // the slots are copied to next
  free_pages(ring, c, lane);
}

#endif

}  // namespace tl
