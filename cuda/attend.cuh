// Attention on chunks of 64 keys at absolute positions, shared by every kernel that attends with 16-bit K and V.
//
// A warp holds 16 queries as rows of mma.sync. A chunk has one maximum over its unmasked keys; P = exp(s - max) is rounded
// to the KV type, and both its sum and P V use the rounded P; O starts from zero. Scores, sums and O are float32. Chunks
// merge in ascending order inside absolute groups of TL_CHUNK_GROUP, then groups in ascending order: merge_factors and
// merge_value are the one way to merge. None of this depends on who computes a chunk, nor on the queries beside.
#pragma once

#include "epilogue.cuh"
#include "place.cuh"

namespace tl {

constexpr int kTileQueries = 16;  // of one warp
constexpr int kPagesOfChunk = TL_KEY_CHUNK / TL_PAGE_POSITIONS;
constexpr float kMasked = -3.0e38f;

struct AttendArgs {
  PlaceArgs place;       // its rows, KV and q; a one-row split kernel also does its work
  int32_t window;        // 0: full
  float scale;           // 1 / sqrt(head_dim)
  int32_t rows_of_tile;  // split: rows that share a tile; 1: a tile is heads of one row
  int32_t place_here;    // split: K, V and q of the only row are not there yet
  Operand out;
};

struct Keys {
  int first, end;  // positions that a row reads: first <= key < end
};

TL_BOTH Keys keys_of(int pos, int window) { return {window && pos >= window ? pos - window + 1 : 0, pos + 1}; }

// Scores of the warp's queries against the 16 keys of each of some pages: s[..][0] a page's first eight, s[..][1] the others.
template <class Kv, int kPages>
TL_DEVICE void score_pages(float (&s)[kPages][2][4], const uint16_t *q_tile, const uint16_t *k_pages, int page_elements, int n_blocks) {
#pragma unroll
  for (int i = 0; i < kPages * 8; i++) s[i / 8][i % 8 / 4][i % 4] = 0.0f;
#pragma unroll 2
  for (int b = 0; b < n_blocks; b++) {
    uint32_t q[4];
    ldmatrix4(q, q_tile + b * 256 + lane_id() * 8);
#pragma unroll
    for (int j = 0; j < kPages; j++) {
      uint32_t k[4];
      ldmatrix4(k, k_pages + j * page_elements + b * 256 + lane_id() * 8);
      Kv::mma(s[j][0], q, k[0], k[2]);
      Kv::mma(s[j][1], q, k[1], k[3]);
    }
  }
}

// Scales and masks; lo, hi: the keys lo <= key < hi of the page that rows (lane / 4) and (lane / 4 + 8) see.
TL_DEVICE void mask_page(float (&s)[2][4], float scale, const int (&lo)[2], const int (&hi)[2]) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int key = i / 4 * 8 + lane_id() % 4 * 2 + i % 2, h = i % 4 / 2;
    float &x = s[i / 4][i % 4];
    x = key >= lo[h] && key < hi[h] ? x * scale : kMasked;
  }
}

// Maximum over a page's keys of row half h, the same in the four lanes of a row.
TL_DEVICE float page_maximum(const float (&s)[2][4], int h) {
  float m = fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1]));
  m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
  return fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
}

// P of a page, rounded, as the left operand of P V: its words hold the keys in the order that scores came in.
template <class Kv>
TL_DEVICE void soften_page(uint32_t (&p)[4], const float (&s)[2][4], const float (&m)[2]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float x0 = s[i / 2][i % 2 * 2], x1 = s[i / 2][i % 2 * 2 + 1], top = m[i % 2];
    p[i] = Kv::pack(x0 == kMasked ? 0.0f : exp_fast(x0 - top), x1 == kMasked ? 0.0f : exp_fast(x1 - top));
  }
}

// Sum of a row's 64 rounded P: pairs and pages inside a lane, then lanes 1 and 2 apart.
template <class Kv>
TL_DEVICE float sum_of_p(const uint32_t (&p)[kPagesOfChunk][4], int h) {
  float w[kPagesOfChunk];
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    const float2 a = Kv::unpack(p[j][h]), b = Kv::unpack(p[j][2 + h]);
    w[j] = (a.x + a.y) + (b.x + b.y);
  }
  float sum = (w[0] + w[1]) + (w[2] + w[3]);
  sum = sum + __shfl_xor_sync(0xffffffffu, sum, 1);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

// O of sixteen dims from zero: o[0] the first eight, o[1] the others. Pages of V lie page_elements apart.
template <class Kv>
TL_DEVICE void weigh_block(float (&o)[2][4], const uint32_t (&p)[kPagesOfChunk][4], const uint16_t *v_block, int page_elements) {
#pragma unroll
  for (int i = 0; i < 8; i++) o[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    uint32_t v[4];
    ldmatrix4_transposed(v, v_block + j * page_elements + lane_id() * 8);
    Kv::mma(o[0], p[j], v[0], v[1]);
    Kv::mma(o[1], p[j], v[2], v[3]);
  }
}

// ---- merging: (m, l, o) of earlier keys takes in that of later ones. An empty state is m = kMasked and zeros.

struct MergeFactors {
  float earlier, later;
};

TL_DEVICE MergeFactors merge_factors(float m_earlier, float m_later) {
  if (m_earlier == kMasked) return {0.0f, 1.0f};
  const float m = fmaxf(m_earlier, m_later);
  return {exp_fast(m_earlier - m), exp_fast(m_later - m)};
}

TL_DEVICE float merge_value(float earlier, float later, MergeFactors f) { return fmaf(later, f.later, earlier * f.earlier); }

// ---- loading a chunk: page j of it to `to` + j pages, by n_threads threads; absent pages read as zero.

TL_DEVICE void copy_chunk(uint8_t *to, const AttendArgs &a, const int32_t *table, int chunk, Keys keys, int kv_head, bool values, int thread,
                          int n_threads) {
  const int nbytes = (int)head_nbytes(a.place.kv);
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    const int pos = chunk * TL_KEY_CHUNK + j * TL_PAGE_POSITIONS;
    const int page = pos < keys.end && pos + TL_PAGE_POSITIONS > keys.first ? table[pos / TL_PAGE_POSITIONS] : -1;
    const uint8_t *from = page < 0 ? nullptr : values ? v_of(a.place.kv, page, kv_head) : k_of(a.place.kv, page, kv_head);
    for (int i = thread * 16; i < nbytes; i += n_threads * 16) {
      if (from)
        copy16_async(to + j * nbytes + i, from + i);
      else
        *(uint4 *)(to + j * nbytes + i) = make_uint4(0, 0, 0, 0);
    }
  }
  commit_copies();
}

void launch_attend_split(const Launcher &launcher, const AttendArgs &args);
void launch_attend_tile(const Launcher &launcher, const AttendArgs &args);
void launch_attend_f32(const Launcher &launcher, const AttendArgs &args);

}  // namespace tl
