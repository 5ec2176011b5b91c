// Layouts of packed panels and operand blocks, and the dot-product step of each weight type on each code path.
//
// A panel holds 16 matrix rows; per step k: float32, float16 and (without the bf16 instruction) bfloat16 as (16,) values,
// bfloat16 with it as (16, 2), int8 as (16, 4) unsigned with 128 added (AVX-512) or (16, 2) signed. A block holds n_rows
// operands as (n_steps, n_rows) words of the same number of columns. int8 blocks add a scale per group and row.
#pragma once

#include "kernels.h"
#include "simd.h"

#define TL_UNROLL _Pragma("GCC unroll 16")

namespace tl {
namespace TL_ISA_NS {

#if TL_ISA == 3
constexpr int kBlockRows = 12, kBlockRowsInt8 = 6;
constexpr int panels_in_flight(int mr) { return mr <= 2 ? 8 : mr <= 6 ? 4 : 2; }
constexpr int panels_in_flight_int8(int mr) { return mr <= 1 ? 8 : mr <= 3 ? 4 : 2; }
#elif TL_ISA == 2
constexpr int kBlockRows = 6, kBlockRowsInt8 = 3;
constexpr int panels_in_flight(int mr) { return mr <= 1 ? 4 : mr <= 2 ? 2 : 1; }
constexpr int panels_in_flight_int8(int mr) { return mr <= 1 ? 2 : 1; }
#else
constexpr int kBlockRows = 4, kBlockRowsInt8 = 4;
constexpr int panels_in_flight(int mr) { return mr <= 2 ? 2 : 1; }
constexpr int panels_in_flight_int8(int) { return 1; }
#endif

// ---- float types

struct DotF32 {
  using A = float;
  using W = vf;
  using B = vf;
  static constexpr int kColumns = 1, kChunkSteps = TL_K_CHUNK;
  TL_INLINE W load_w(const uint8_t *panel, int k) { return load((const float *)panel + k * kLanes); }
  TL_INLINE B broadcast(const A *a) { return set1(*a); }
  TL_INLINE vf step(W w, B a, vf acc) { return fma(w, a, acc); }
};

struct DotF16 : DotF32 {
  TL_INLINE W load_w(const uint8_t *panel, int k) { return load_f16((const uint16_t *)panel + k * kLanes); }
};

#if TL_ISA == 3
struct DotBf16 {
  using A = uint32_t;
  using W = __m512bh;
  using B = __m512bh;
  static constexpr int kColumns = 2, kChunkSteps = TL_K_CHUNK / 2;
  TL_INLINE W load_w(const uint8_t *panel, int k) { return (__m512bh)_mm512_load_si512(panel + k * 64); }
  TL_INLINE B broadcast(const A *a) { return (__m512bh)_mm512_set1_epi32((int)*a); }
  TL_INLINE vf step(W w, B a, vf acc) { return {_mm512_dpbf16_ps(acc.v, w, a)}; }
};
#else
struct DotBf16 : DotF32 {
  TL_INLINE W load_w(const uint8_t *panel, int k) { return load_bf16((const uint16_t *)panel + k * kLanes); }
};
#endif

// ---- int8

#if TL_ISA == 3
struct Int8Dot {
  using W = vi;
  static constexpr int kColumns = 4, kGroupSteps = TL_INT8_GROUP / 4;
  TL_INLINE W load_w(const uint8_t *panel, int k) { return {_mm512_load_si512(panel + k * 64)}; }
  TL_INLINE vi broadcast(const uint32_t *a) { return {_mm512_set1_epi32((int)*a)}; }
  TL_INLINE vi start(const int32_t *correction) { return {_mm512_set1_epi32(*correction)}; }
  TL_INLINE vi step(W w, vi a, vi acc) { return {_mm512_dpbusd_epi32(acc.v, w.v, a.v)}; }
};
#elif TL_ISA == 2
struct Int8Dot {
  using W = vi;  // (16, 2) int16
  static constexpr int kColumns = 2, kGroupSteps = TL_INT8_GROUP / 2;
  TL_INLINE W load_w(const uint8_t *panel, int k) {
    const __m128i *p = (const __m128i *)(panel + k * 32);
    return {_mm256_cvtepi8_epi16(_mm_load_si128(p)), _mm256_cvtepi8_epi16(_mm_load_si128(p + 1))};
  }
  TL_INLINE vi broadcast(const uint32_t *a) { return {_mm256_set1_epi32((int)*a), _mm256_set1_epi32((int)*a)}; }
  TL_INLINE vi start(const int32_t *correction) { return {_mm256_set1_epi32(*correction), _mm256_set1_epi32(*correction)}; }
  TL_INLINE vi step(W w, vi a, vi acc) {
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(w.a, a.a)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(w.b, a.b))};
  }
};
#else
struct Int8Dot {
  struct W {
    int16_t v[32];
  };
  static constexpr int kColumns = 2, kGroupSteps = TL_INT8_GROUP / 2;
  TL_INLINE W load_w(const uint8_t *panel, int k) {
    W w;
    for (int i = 0; i < 32; i++) w.v[i] = ((const int8_t *)panel)[k * 32 + i];
    return w;
  }
  TL_INLINE vi broadcast(const uint32_t *a) {
    vi r;
    for (int i = 0; i < 16; i++) r.v[i] = (int32_t)*a;
    return r;
  }
  TL_INLINE vi start(const int32_t *correction) { return broadcast((const uint32_t *)correction); }
  TL_INLINE vi step(W w, vi a, vi acc) {
    for (int i = 0; i < 16; i++) acc.v[i] += w.v[2 * i] * (int16_t)(a.v[i] & 0xffff) + w.v[2 * i + 1] * (int16_t)(a.v[i] >> 16);
    return acc;
  }
};
#endif

// ---- sizes

TL_INLINE int columns_per_step(int dtype) { return dtype == TL_INT8 ? Int8Dot::kColumns : dtype == TL_BF16 ? DotBf16::kColumns : 1; }
TL_INLINE int steps(int dtype, int n_in) {
  return dtype == TL_INT8 ? round_up(n_in, TL_INT8_GROUP) / Int8Dot::kColumns : round_up(n_in, columns_per_step(dtype)) / columns_per_step(dtype);
}
TL_INLINE int element_nbytes(int dtype) { return dtype == TL_F32 ? 4 : dtype == TL_INT8 ? 1 : 2; }
TL_INLINE uint64_t panel_nbytes(int dtype, int n_in) {
  const uint64_t n = (uint64_t)steps(dtype, n_in) * columns_per_step(dtype) * kPanelRows * element_nbytes(dtype);
  return (n + 63) / 64 * 64;
}

// int8 scales lie behind the panels, per panel (n_scales, 16).
TL_INLINE int scale_count(const tl_matrix *w) { return w->group_size ? (w->n_in + w->group_size - 1) / w->group_size : 1; }
TL_INLINE float *scale_data(const tl_matrix *w) {
  return (float *)((uint8_t *)w->data + (uint64_t)(w->n_out / kPanelRows) * panel_nbytes(w->dtype, w->n_in));
}

// An int8 block: the words, then per (group, row) the scale, then the start of its int32 sum.
struct Int8Block {
  uint32_t *quads;
  float *scale;
  int32_t *correction;
};
TL_INLINE Int8Block int8_block(const void *block, int n_groups, int n_rows) {
  uint32_t *q = (uint32_t *)block;
  float *s = (float *)(q + (uint64_t)n_groups * Int8Dot::kGroupSteps * n_rows);
  return {q, s, (int32_t *)(s + (uint64_t)n_groups * n_rows)};
}

void matmul(const tl_matrix *w, int panel, int n_panels, const void *block, int n_rows, float *out, int out_stride);
uint64_t matrix_nbytes(const tl_matrix *w);
void pack_rows(const tl_matrix *w, const tl_pack_rows *rows, int begin, int end);
void gather_row(const tl_matrix *w, int row, float scale, float *out);
int block_rows(int dtype);
uint64_t block_nbytes(int dtype, int n_in, int n_rows);
void write_block_row(int dtype, int n_in, const float *x, void *block, int n_rows, int row);
void store_operand(int dtype, int n_in, const float *x, void *out);
void load_operand(int dtype, int n_in, const void *stored, float *work, void *block, int n_rows, int row);

}  // namespace TL_ISA_NS
}  // namespace tl
