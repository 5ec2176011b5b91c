// Attention on chunks of 64 keys at absolute positions, shared by every kernel that attends with 16-bit K and V.
//
// A warp holds 16 queries as rows of mma.sync. A chunk has one maximum over its unmasked keys; P = exp(s - max) is rounded
// to the KV type, and both its sum and P V use the rounded P; O starts from zero. Scores, sums and O are float32, scores
// and maxima in units of log2(e), so that exponentials are powers of two. Chunks merge in ascending order inside absolute groups of TL_CHUNK_GROUP, then groups in ascending order: merge_factors and
// merge_value are the one way to merge. None of this depends on who computes a chunk, nor on the queries beside.
#pragma once

#include <vector>

#include "epilogue.cuh"
#include "place.cuh"

namespace tl {

constexpr int kTileQueries = 16;  // of one warp
constexpr int kPagesOfChunk = TL_KEY_CHUNK / TL_PAGE_POSITIONS;
constexpr float kMasked = -3.0e38f;

struct AttendArgs {
  PlaceArgs place;  // its rows, KV and q; a one-row split kernel also does its work
  int32_t window;  // 0: full
  float scale;  // log2(e) / sqrt(head_dim)
  int32_t rows_of_tile;  // split: rows that share a tile; 1: a tile is heads of one row
  int32_t queries_of_tile;  // split: at most kTileQueries
  int32_t place_here;  // split: K, V and q of the only row are not there yet
  Operand out;
};

struct Keys {
  int first, end;  // positions that a row reads: first <= key < end
};

TL_BOTH Keys keys_of(int pos, int window) { return {window && pos >= window ? pos - window + 1 : 0, pos + 1}; }

// Scores of the warp's queries against the 16 keys of each of some pages: s[..][0] a page's first eight, s[..][1] the others.
// q_tile and k_pages are this lane's addresses in the first block.
template <class Kv, int kPages>
TL_DEVICE void score_pages(float (&s)[kPages][2][4], shared_t q_tile, const shared_t (&k_pages)[kPages], int n_blocks) {
#pragma unroll
  for (int i = 0; i < kPages * 8; i++) s[i / 8][i % 8 / 4][i % 4] = 0.0f;
#pragma unroll 4
  for (int b = 0; b < n_blocks; b++) {
    uint32_t q[4], k[kPages][4];
    ldmatrix4(q, q_tile + b * 512);
#pragma unroll
    for (int j = 0; j < kPages; j++) ldmatrix4(k[j], k_pages[j] + b * 512);
#pragma unroll
    for (int j = 0; j < kPages; j++) {
      Kv::mma(s[j][0], q, k[j][0], k[j][2]);
      Kv::mma(s[j][1], q, k[j][1], k[j][3]);
    }
  }
}

// The same of pages that lie page_bytes apart.
template <class Kv, int kPages>
TL_DEVICE void score_pages(float (&s)[kPages][2][4], shared_t q_tile, shared_t k_pages, int page_bytes, int n_blocks) {
  shared_t page[kPages];
#pragma unroll
  for (int j = 0; j < kPages; j++) page[j] = k_pages + j * page_bytes;
  score_pages<Kv, kPages>(s, q_tile, page, n_blocks);
}

// Masks; lo, hi: the keys lo <= key < hi of the page that rows (lane / 4) and (lane / 4 + 8) see.
TL_DEVICE void mask_page(float (&s)[2][4], const int (&lo)[2], const int (&hi)[2]) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int key = i / 4 * 8 + lane_id() % 4 * 2 + i % 2, h = i % 4 / 2;
    float &x = s[i / 4][i % 4];
    x = key >= lo[h] && key < hi[h] ? x : kMasked;
  }
}

// The larger of two scores; of codes no number is the largest of all.
template <class Kv>
TL_DEVICE float larger(float a, float b) {
  return Kv::kQuantised ? max_nan(a, b) : fmaxf(a, b);
}

// Maximum of this lane's scores of row half h over some pages.
template <class Kv, int kPages>
TL_DEVICE float lane_maximum(const float (&s)[kPages][2][4], int h) {
  float m = kMasked;
#pragma unroll
  for (int j = 0; j < kPages; j++)
    m = larger<Kv>(m, larger<Kv>(larger<Kv>(s[j][0][2 * h], s[j][0][2 * h + 1]), larger<Kv>(s[j][1][2 * h], s[j][1][2 * h + 1])));
  return m;
}

// The largest over the four lanes of a row.
template <class Kv>
TL_DEVICE float row_maximum(float m) {
  m = larger<Kv>(m, __shfl_xor_sync(0xffffffffu, m, 1));
  return larger<Kv>(m, __shfl_xor_sync(0xffffffffu, m, 2));
}

// A chunk's m from its largest score. Scores of codes are scaled; one that is no number makes m 0, and with it P and the row's output none.
template <class Kv>
TL_DEVICE float chunk_maximum(float top, float scale) {
  if (Kv::kQuantised) return top == top ? top : 0.0f;
  return top == kMasked ? kMasked : top * scale;
}

// P of a page, rounded, as the left operand of P V: its words hold the keys in the order that scores came in. Masked keys
// give 2^-huge = 0.
template <class Kv>
TL_DEVICE void soften_page(uint32_t (&p)[4], const float (&s)[2][4], const float (&m)[2], float scale) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float x0 = s[i / 2][i % 2 * 2], x1 = s[i / 2][i % 2 * 2 + 1], top = m[i % 2];
    p[i] = Kv::pack(exp2_fast(fmaf(x0, scale, -top)), exp2_fast(fmaf(x1, scale, -top)));
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

// O of sixteen dims from zero: o[0] the first eight, o[1] the others. v_blocks are this lane's addresses in the pages' blocks.
template <class Kv>
TL_DEVICE void weigh_block(float (&o)[2][4], const uint32_t (&p)[kPagesOfChunk][4], const shared_t (&v_blocks)[kPagesOfChunk]) {
  uint32_t v[kPagesOfChunk][4];
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) ldmatrix4_transposed(v[j], v_blocks[j]);
#pragma unroll
  for (int i = 0; i < 8; i++) o[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) {
    Kv::mma(o[0], p[j], v[j][0], v[j][1]);
    Kv::mma(o[1], p[j], v[j][2], v[j][3]);
  }
}
template <class Kv>
TL_DEVICE void weigh_block(float (&o)[2][4], const uint32_t (&p)[kPagesOfChunk][4], shared_t v_block, int page_bytes) {
  shared_t block[kPagesOfChunk];
#pragma unroll
  for (int j = 0; j < kPagesOfChunk; j++) block[j] = v_block + j * page_bytes;
  weigh_block<Kv>(o, p, block);
}

// ---- merging: (m, l, o) of earlier keys takes in that of later ones. An empty state is m = kMasked and zeros.

struct MergeFactors {
  float earlier, later;
};

TL_DEVICE MergeFactors merge_factors(float m_earlier, float m_later) {
  if (m_earlier == kMasked) return {0.0f, 1.0f};
  const float m = fmaxf(m_earlier, m_later);
  return {exp2_fast(m_earlier - m), exp2_fast(m_later - m)};
}

TL_DEVICE float merge_value(float earlier, float later, MergeFactors f) { return fmaf(later, f.later, earlier * f.earlier); }

// ---- queries of a tile, and the pages they read

struct Query {
  int row, head, seq;  // row below 0: there is none
  int first, end;  // its keys; none where it does nothing
};

// The queries begin .. end - 1 of a tile: those of one sequence that follow each other, and the keys that any of them reads.
struct Run {
  int seq, begin, end;
  Keys keys;
};

TL_DEVICE Query query_at(const AttendArgs &a, int row, int head, bool exists) {
  const int pos = exists ? a.place.rows.pos[row] : -1;
  const Keys keys = pos < 0 ? Keys{0, 0} : keys_of(pos, a.window);
  return {exists ? row : -1, head, exists ? a.place.rows.seq[row] : -1, keys.first, keys.end};
}

TL_DEVICE Run run_from(const Query *query, int begin, int n_queries) {
  Run run{query[begin].seq, begin, begin, {0, 0}};
  for (; run.end < n_queries && query[run.end].seq == run.seq; run.end++) {
    const Query &q = query[run.end];
    if (q.end && (!run.keys.end || q.first < run.keys.first)) run.keys.first = q.first;
    run.keys.end = max(run.keys.end, q.end);
  }
  return run;
}

TL_DEVICE const int32_t *table_of(const Rows &r, int seq) { return r.page_table[seq] + (int64_t)r.stage * r.table_stride; }

// A warp requests its page (0..3) of a chunk, K or V, to shared memory; one that no query reads is zero.
template <class Kv>
TL_DEVICE void request_page(const AttendArgs &a, uint8_t *chunk_memory, const int32_t *table, int chunk, int own, Keys keys, int kv_head,
                            bool values) {
  const int pos = chunk * TL_KEY_CHUNK + own * TL_PAGE_POSITIONS, nbytes = values ? a.place.kv.v_nbytes : a.place.kv.k_nbytes;
  const int page = pos < keys.end && pos + TL_PAGE_POSITIONS > keys.first ? table[pos / TL_PAGE_POSITIONS] : -1;
  const int end = Kv::kQuantised ? nbytes - lane_id() * 16 : nbytes;  // of float types it is whole blocks of 512
  uint8_t *to = chunk_memory + own * nbytes + lane_id() * 16;
  if (page >= 0) {
    const uint8_t *from = (values ? v_of(a.place.kv, page, kv_head) : k_of(a.place.kv, page, kv_head)) + lane_id() * 16;
#pragma unroll 4
    for (int i = 0; i < end; i += 512) copy16_async(to + i, from + i);
  } else {
#pragma unroll 1
    for (int i = 0; i < end; i += 512) *(uint4 *)(to + i) = make_uint4(0, 0, 0, 0);
  }
}

void launch_attend_split(const Launcher &launcher, const AttendArgs &args);
bool launch_attend_tile(const Launcher &launcher, const AttendArgs &args);  // false: this device has too little shared memory
bool launch_attend_wide(const Launcher &launcher, const AttendArgs &args);  // these two, false: not on this device, or not with this KV
bool launch_attend_few(const Launcher &launcher, const AttendArgs &args);

// For some rows, through states in memory of so many bytes (attend_states.cu): whether a plan's batch may go that way; what is to be launched
// first in it, for each window that its layers have; and the attention of a layer, by the place of its window among them.
constexpr int kMaxWindows = 4;
uint64_t attend_states_nbytes(const tl_context &context, const tl_plan_desc &d);
bool attends_by_states(const tl_context &context, const tl_plan_desc &d, int n_rows);
void launch_plan_spans(const Launcher &launcher, const Rows &rows, const tl_plan_desc &d, const std::vector<int> &windows, uint8_t *memory);
void launch_attend_states(const Launcher &launcher, const AttendArgs &args, int window, uint8_t *memory);
void launch_attend_f32(const Launcher &launcher, const AttendArgs &args);

}  // namespace tl
