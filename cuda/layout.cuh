// Where a value lies: packed weight matrices, the operands of products, KV pages. Host and device agree through these.
//
// Tensor cores read 8 x 8 tiles of 16-bit values, 128 contiguous bytes each; a 16 x 16 block of a left operand is four of
// them, 512 bytes: (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
#pragma once

#include "device.cuh"
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
// odd bytes of the first word, a2 and a3 in the second. float32 panels are columns of sixteen.

struct Matrix {
  const uint8_t *data;
  const float *scales;  // int8: (panels, n_groups, 16)
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

struct KvLayer {
  uint8_t *base;          // of the part's pages
  uint64_t page_nbytes;
  uint64_t layer_offset;  // of the layer inside a page
  int dtype, head_pad;
};

TL_BOTH int kv_element_nbytes(int dtype) { return dtype == TL_F32 ? 4 : 2; }
TL_BOTH uint64_t head_nbytes(const KvLayer &kv) { return (uint64_t)TL_PAGE_POSITIONS * kv.head_pad * kv_element_nbytes(kv.dtype); }
TL_BOTH uint8_t *k_of(const KvLayer &kv, int page, int kv_head) {
  return kv.base + (uint64_t)page * kv.page_nbytes + kv.layer_offset + 2 * head_nbytes(kv) * kv_head;
}
TL_BOTH uint8_t *v_of(const KvLayer &kv, int page, int kv_head) { return k_of(kv, page, kv_head) + head_nbytes(kv); }

// Index of the first of eight neighbouring 16-bit dims of a slot.
TL_BOTH int k_index(int slot, int dim) { return dim / 16 * 256 + block_index(slot, dim % 16); }
TL_BOTH int v_index(int slot, int dim) { return dim / 16 * 256 + (dim % 16 / 8 * 2 + slot / 8) * 64 + slot % 8 * 8 + dim % 8; }

inline uint64_t page_nbytes(const tl_plan_desc &d, int part) {
  return (uint64_t)d.n_layers[part] * d.n_kv_heads * 2 * TL_PAGE_POSITIONS * pad16(d.head_dim) * kv_element_nbytes(d.kv_dtype);
}

}  // namespace tl
