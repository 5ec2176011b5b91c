// Where a value lies: packed weight matrices, the operands of products, KV pages. Host and device agree through these.
//
// Tensor cores read 8 x 8 tiles of 16-bit values, 128 contiguous bytes each; a 16 x 16 block of a left operand is four of
// them, 512 bytes: (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
#pragma once

#include "device.cuh"
#include "kv_rows.h"
#include "tinyloop.h"

namespace tl {

constexpr int kPanelRows = 16;
constexpr int kScaleColumns = TL_INT8_GROUP;  // columns summed before they are scaled, where groups of int8 columns have scales
static_assert(kScaleColumns % 16 == 0 && TL_K_CHUNK % kScaleColumns == 0, "groups are whole blocks of a chunk");

TL_BOTH int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
TL_BOTH int pad16(int n) { return round_up(n, 16); }

// Of a 16 x 16 block of 16-bit values: index of (row, column).
TL_BOTH int block_index(int row, int column) { return ((column / 8) * 2 + row / 8) * 64 + (row % 8) * 8 + column % 8; }

// ---- weights: panels of sixteen rows, one after another; a panel is its blocks of sixteen columns in order.
//
// int8 blocks are 256 bytes, eight for each lane of a warp: the left operand of one mma.sync, a0 and a1 in the even and
// odd bytes of the first word, a2 and a3 in the second. A byte is the value + kInt8Offset; the tensor cores take it as a part of
// kInt8Parts, which many the scales are multiplied by (weights.cuh). float32 panels are columns of sixteen.
constexpr int kInt8Offset = 128;
constexpr float kInt8Parts = 64.0f;

struct Matrix {
  const uint8_t *data;
  const float *scales;  // int8: (panels, n_groups, 16), times kInt8Parts
  int dtype, n_out, n_in, group_size;
};

TL_BOTH int64_t panel_nbytes(int dtype, int n_in) {
  if (dtype == TL_F32) return (int64_t)n_in * kPanelRows * 4;
  return (int64_t)pad16(n_in) * kPanelRows * (dtype == TL_INT8 ? 1 : 2);
}

TL_BOTH int n_scale_groups(int n_in, int group_size) { return group_size ? (n_in + group_size - 1) / group_size : 1; }

TL_BOTH int64_t element_offset(int dtype, int n_in, int row, int column) {
  const int r = row % kPanelRows, c = column % 16;
  const int64_t panel = (int64_t)(row / kPanelRows) * panel_nbytes(dtype, n_in);
  if (dtype == TL_F32) return panel + ((int64_t)column * kPanelRows + r) * 4;
  if (dtype == TL_INT8) return panel + column / 16 * 256 + ((r % 8) * 4 + c % 8 / 2) * 8 + c / 8 * 4 + c % 2 * 2 + r / 8;
  return panel + column / 16 * 512 + block_index(r, c) * 2;
}

TL_BOTH int64_t scale_offset(const Matrix &m, int row, int group) {
  return ((int64_t)(row / kPanelRows) * n_scale_groups(m.n_in, m.group_size) + group) * kPanelRows + row % kPanelRows;
}

inline uint64_t matrix_nbytes(const tl_matrix &m) {
  const uint64_t panels = (uint64_t)(m.n_out / kPanelRows) * panel_nbytes(m.dtype, m.n_in);
  const uint64_t scales = m.dtype == TL_INT8 ? (uint64_t)m.n_out * n_scale_groups(m.n_in, m.group_size) * 4 : 0;
  return (panels + 63) / 64 * 64 + scales;
}

inline Matrix matrix_of(const tl_matrix &m) {
  const uint8_t *data = (const uint8_t *)m.data;
  const uint64_t panels = (uint64_t)(m.n_out / kPanelRows) * panel_nbytes(m.dtype, m.n_in);
  return {data, m.dtype == TL_INT8 ? (const float *)(data + (panels + 63) / 64 * 64) : nullptr, m.dtype, m.n_out, m.n_in, m.group_size};
}

// The matrix without its first rows, a multiple of sixteen.
inline Matrix rows_from(Matrix m, int first) {
  m.data += first / kPanelRows * panel_nbytes(m.dtype, m.n_in);
  if (m.scales) m.scales += scale_offset(m, first, 0);
  m.n_out -= first;
  return m;
}

// The type that a product with these weights computes in.
TL_BOTH int operand_dtype(int weight_dtype) { return weight_dtype == TL_INT8 ? (int)TL_BF16 : weight_dtype; }

// ---- the right operand of a product: one column of it per batch row
//
// Rows: each batch row for itself, words of a block of sixteen in the order that one lane reads them (0 4 1 5 2 6 3 7).
// Tiles: for each 64 columns, for each 8 batch rows, four blocks of sixteen columns, each two 8 x 8 tiles.

enum { kOperandRows = 0, kOperandTiles = 1 };

struct Operand {
  void *data;
  int dtype;     // TL_F32 (always plain rows), TL_BF16 or TL_F16
  int layout;
  int n_in;      // padded to 16
  int n_groups;  // tiles: groups of eight batch rows
};

TL_BOTH int operand_position(int column) {
  const int word = column % 16 / 2;
  return column / 16 * 16 + (word % 4 * 2 + word / 4) * 2 + column % 2;
}

TL_BOTH int operand_index(const Operand &o, int row, int column) {
  if (o.dtype == TL_F32) return row * o.n_in + column;
  if (o.layout == kOperandRows) return row * o.n_in + operand_position(column);
  return (column / 64 * o.n_groups + row / 8) * 512 + column % 64 / 16 * 128 + column % 16 / 8 * 64 + row % 8 * 8 + column % 8;
}

// ---- KV pages: per layer and KV head sixteen keys, then sixteen values
//
// 16-bit K is blocks of (16 keys, 16 dims) as left operands are; V's blocks have their second and third tile exchanged,
// (keys 0-7, dims 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15), which reads in place as dims by keys. float32 is plain rows.
//
// Codes of K are bytes in the same blocks, two to a 16-bit value, so that a block is 32 dims. V is one row of sixteen key bytes
// for each dim, of int8; of int4 for dims 32 i + j in the low half and 32 i + 16 + j in the high half, j < 16. A key's byte is where
// the scores of a tensor core leave it (key_place). Behind the codes are the bfloat16 scales, 16 a group, then zeros of int4.

struct KvLayer {
  uint8_t *base;          // of the part's pages
  uint64_t page_nbytes;
  uint64_t layer_offset;  // of the layer inside a page
  int dtype, head_pad;
  int k_nbytes, v_nbytes;  // of a page's keys and values of one KV head
};

TL_BOTH int kv_element_nbytes(int dtype) { return dtype == TL_F32 ? 4 : 2; }
TL_BOTH uint8_t *k_of(const KvLayer &kv, int page, int kv_head) {
  return kv.base + (uint64_t)page * kv.page_nbytes + kv.layer_offset + (uint64_t)(kv.k_nbytes + kv.v_nbytes) * kv_head;
}
TL_BOTH uint8_t *v_of(const KvLayer &kv, int page, int kv_head) { return k_of(kv, page, kv_head) + kv.k_nbytes; }

// Index of the first of eight neighbouring 16-bit dims of a slot.
TL_BOTH int k_index(int slot, int dim) { return dim / 16 * 256 + block_index(slot, dim % 16); }
TL_BOTH int v_index(int slot, int dim) { return dim / 16 * 256 + (dim % 16 / 8 * 2 + slot / 8) * 64 + slot % 8 * 8 + dim % 8; }

constexpr int kCodeBlock = 32;                        // dims of a block of codes
constexpr int kScaleBytes = TL_PAGE_POSITIONS * 2;    // of a group's scales, or zeros
static_assert(TL_KV_GROUP == kCodeBlock, "a group of int4 values is a block");

TL_BOTH int code_pad(int head_pad) { return round_up(head_pad, kCodeBlock); }
TL_BOTH int n_value_groups(int dtype, int head_pad) { return dtype == TL_INT4 ? code_pad(head_pad) / TL_KV_GROUP : 1; }

// Byte offsets in a page's keys, of eight neighbouring dims of a slot and of the scales; in its values, of a dim's keys (int8), of a
// byte row of int4, of the scales and of the zeros.
TL_BOTH int k_code_at(int slot, int dim) { return k_index(slot, dim / 2) * 2; }
TL_BOTH int k_scale_at(int head_pad) { return TL_PAGE_POSITIONS * code_pad(head_pad); }
TL_BOTH int key_place(int slot) { return slot % 8 / 2 * 4 + slot / 8 * 2 + slot % 2; }
TL_BOTH int v_code_row(int dtype, int dim) { return dtype == TL_INT4 ? dim / 32 * 16 + dim % 16 : dim; }
TL_BOTH int v_scale_at(int dtype, int head_pad) { return TL_PAGE_POSITIONS * (dtype == TL_INT4 ? code_pad(head_pad) / 2 : head_pad); }
TL_BOTH int v_zero_at(int dtype, int head_pad) { return v_scale_at(dtype, head_pad) + kScaleBytes * n_value_groups(dtype, head_pad); }

inline int k_page_nbytes(int dtype, int head_pad) {
  return is_quantised(dtype) ? k_scale_at(head_pad) + kScaleBytes : TL_PAGE_POSITIONS * head_pad * kv_element_nbytes(dtype);
}
// Padded so that keys and values together are whole lines of 64 bytes.
inline int v_page_nbytes(int dtype, int head_pad) {
  if (!is_quantised(dtype)) return k_page_nbytes(dtype, head_pad);
  const int k = k_page_nbytes(dtype, head_pad), zeros = dtype == TL_INT4 ? kScaleBytes * n_value_groups(dtype, head_pad) : 0;
  return round_up(k + v_zero_at(dtype, head_pad) + zeros, 64) - k;
}

inline uint64_t page_nbytes(const tl_plan_desc &d, int part) {
  const int head_pad = pad16(d.head_dim), n = k_page_nbytes(d.kv_dtype, head_pad) + v_page_nbytes(d.kv_dtype, head_pad);
  return (uint64_t)d.n_layers[part] * d.n_kv_heads * n;
}

inline KvLayer kv_layer(const tl_plan_desc &d, int part, int layer) {
  const uint64_t page = page_nbytes(d, part);
  const int head_pad = pad16(d.head_dim);
  const int k = k_page_nbytes(d.kv_dtype, head_pad), v = v_page_nbytes(d.kv_dtype, head_pad);
  return {(uint8_t *)d.kv_base[part], page, page / d.n_layers[part] * layer, d.kv_dtype, head_pad, k, v};
}

// ---- operand pages: per layer sixteen plain rows of the QKV product's operand

inline uint64_t operand_row_nbytes(const tl_matrix &weight) { return (uint64_t)weight.n_in * (operand_dtype(weight.dtype) == TL_F32 ? 4 : 2); }

// Bytes of a part's page that are in use; `before`: phases of the part in front of this one only. A page is whole lines of 64.
inline uint64_t operand_nbytes(const tl_phase *phases, int n_phases, int part, const tl_phase *before = nullptr) {
  uint64_t nbytes = 0;
  for (const tl_phase *p = phases; p != phases + n_phases && p != before; p++)
    if (p->kind == TL_PHASE_QKV && p->part == part) nbytes += TL_PAGE_POSITIONS * operand_row_nbytes(p->weight);
  return nbytes;
}
inline uint64_t operand_page_nbytes(const tl_phase *phases, int n_phases, int part) {
  return (operand_nbytes(phases, n_phases, part) + 63) / 64 * 64;
}

// ---- q as attention reads it: a head of one row. Where K and V are codes, the high and the low bytes of its 16-bit operands (code_pad
// each), then their float scale.

TL_BOTH int query_nbytes(int dtype, int head_pad) { return is_quantised(dtype) ? 2 * code_pad(head_pad) + 16 : head_pad * kv_element_nbytes(dtype); }

}  // namespace tl
