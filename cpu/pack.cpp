// Between row-major matrices and rows on one side, packed panels and operand blocks on the other.
#include "matmul.h"

namespace tl {
namespace TL_ISA_NS {

uint64_t matrix_nbytes(const tl_matrix *w) {
  const uint64_t panels = (uint64_t)(w->n_out / kPanelRows) * panel_nbytes(w->dtype, w->n_in);
  return panels + (w->dtype == TL_INT8 ? (uint64_t)w->n_out * scale_count(w) * sizeof(float) : 0);
}

// Byte offset of element (packed row, column) in the packed matrix.
TL_INLINE uint64_t element_offset(int dtype, int n_in, int row, int column) {
  const int c = columns_per_step(dtype);
  const uint64_t in_panel = ((uint64_t)(column / c) * kPanelRows + row % kPanelRows) * c + column % c;
  return (uint64_t)(row / kPanelRows) * panel_nbytes(dtype, n_in) + in_panel * element_nbytes(dtype);
}

template <class T>
static void pack_row(const tl_matrix *w, int packed_row, const T *src, T flip) {
  const int c = columns_per_step(w->dtype);
  T *dst = (T *)((uint8_t *)w->data + element_offset(w->dtype, w->n_in, packed_row, 0));
  for (int k = 0; k < w->n_in; k++) dst[(uint64_t)(k / c) * kPanelRows * c + k % c] = src[k] ^ flip;
}

void pack_rows(const tl_matrix *w, const tl_pack_rows *rows, int begin, int end) {
  const uint8_t flip = TL_ISA == 3 ? 0x80 : 0;  // signed to unsigned with 128 added
  for (int r = begin; r < end; r++) {
    const int packed_row = r / rows->block * rows->stride + rows->offset + r % rows->block;
    const uint64_t first = (uint64_t)r * w->n_in;
    if (w->dtype == TL_F32) {
      pack_row<uint32_t>(w, packed_row, (const uint32_t *)rows->src + first, 0);
    } else if (w->dtype == TL_INT8) {
      pack_row<uint8_t>(w, packed_row, (const uint8_t *)rows->src + first, flip);
      const int n = scale_count(w);
      float *scales = scale_data(w) + (uint64_t)(packed_row / kPanelRows) * n * kPanelRows + packed_row % kPanelRows;
      for (int g = 0; g < n; g++) scales[g * kPanelRows] = rows->scales[(uint64_t)r * n + g];
    } else {
      pack_row<uint16_t>(w, packed_row, (const uint16_t *)rows->src + first, 0);
    }
  }
}

// One row of the matrix as float32, times scale: an embedding.
void gather_row(const tl_matrix *w, int row, float scale, float *out) {
  const int c = columns_per_step(w->dtype), n_scales = scale_count(w);
  const uint8_t *base = (const uint8_t *)w->data + element_offset(w->dtype, w->n_in, row, 0);
  const float *scales = scale_data(w) + (uint64_t)(row / kPanelRows) * n_scales * kPanelRows + row % kPanelRows;
  const uint64_t hop = (uint64_t)kPanelRows * c;
  float t[kLanes];
  for (int k = 0; k < w->n_in; k += kLanes) {
    const int n = w->n_in - k < kLanes ? w->n_in - k : kLanes;
    uint16_t half[kLanes] = {};
    for (int i = 0; i < n; i++) {
      const uint64_t at = (uint64_t)((k + i) / c) * hop + (k + i) % c;
      if (w->dtype == TL_F32)
        t[i] = ((const float *)base)[at];
      else if (w->dtype == TL_INT8)
        t[i] = (float)(int8_t)(base[at] ^ (TL_ISA == 3 ? 0x80 : 0)) * scales[w->group_size ? (k + i) / w->group_size * kPanelRows : 0];
      else
        half[i] = ((const uint16_t *)base)[at];
    }
    if (w->dtype == TL_BF16) store(t, load_bf16(half));
    if (w->dtype == TL_F16) store(t, load_f16(half));
    for (int i = 0; i < n; i++) out[k + i] = t[i] * scale;
  }
}

int block_rows(int dtype) { return dtype == TL_INT8 ? kBlockRowsInt8 : kBlockRows; }

uint64_t block_nbytes(int dtype, int n_in, int n_rows) {
  uint64_t n = (uint64_t)steps(dtype, n_in) * n_rows * 4;
  if (dtype == TL_INT8) n += (uint64_t)(round_up(n_in, TL_INT8_GROUP) / TL_INT8_GROUP) * n_rows * 8;
  return (n + 63) / 64 * 64;
}

// Quantises one group of TL_INT8_GROUP values: q = nearest(x * 127 / max|x|), scale = max|x| / 127. A NaN or an infinity
// among them makes the scale NaN, since no integer stands for it.
static float quantise_group(const float *x, int n, int8_t *q) {
  vf v[TL_INT8_GROUP / kLanes], top = zero(), spoilt = zero();
  for (int i = 0; i < TL_INT8_GROUP / kLanes; i++) {
    const int left = n - i * kLanes;
    v[i] = left > 0 ? load_part(x + i * kLanes, left) : zero();
    top = max(top, abs(v[i]));
    spoilt = fma(v[i], zero(), spoilt);
  }
  const float m = hmax(top) + hsum(spoilt), inverse = m > 0.0f ? 127.0f / m : 0.0f;
  for (int i = 0; i < TL_INT8_GROUP / kLanes; i++) store_i8(q + i * kLanes, mul(v[i], set1(inverse)));
  return m * (1.0f / 127.0f);
}

static void place_group(const Int8Block &b, int g, const int8_t *q, float scale, int n_rows, int row) {
  int sum = 0;
  for (int i = 0; i < TL_INT8_GROUP; i++) sum += q[i];
  b.scale[g * n_rows + row] = scale;
  b.correction[g * n_rows + row] = TL_ISA == 3 ? -128 * sum : 0;
  uint32_t *words = b.quads + (uint64_t)g * Int8Dot::kGroupSteps * n_rows + row;
  for (int s = 0; s < Int8Dot::kGroupSteps; s++) {
    const int8_t *p = q + s * Int8Dot::kColumns;
    uint32_t word;
    if (Int8Dot::kColumns == 4)
      __builtin_memcpy(&word, p, 4);
    else
      word = (uint32_t)(uint16_t)(int16_t)p[0] | (uint32_t)(uint16_t)(int16_t)p[1] << 16;
    words[(uint64_t)s * n_rows] = word;
  }
}

static void write_int8_row(int n_in, const float *x, void *block, int n_rows, int row) {
  const int n_groups = int8_groups(n_in);
  const Int8Block b = int8_block(block, n_groups, n_rows);
  for (int g = 0; g < n_groups; g++) {
    int8_t q[TL_INT8_GROUP];
    const float scale = quantise_group(x + g * TL_INT8_GROUP, n_in - g * TL_INT8_GROUP, q);
    place_group(b, g, q, scale, n_rows, row);
  }
}

// One row of a float block: words[step * n_rows] of this row, from sixteen values at a time.
static void write_float_row(int dtype, int n_in, const float *x, uint32_t *words, int n_rows) {
  const int n_columns = round_up(n_in, columns_per_step(dtype));
  for (int k = 0; k < n_columns; k += kLanes) {
    const int n = n_in - k < kLanes ? n_in - k : kLanes;
    vf v = load_part(x + k, n);
    uint32_t t[kLanes];
    int n_words = n_columns - k < kLanes ? n_columns - k : kLanes;
    if (dtype == TL_BF16 && DotBf16::kColumns == 2) {
      store_bf16((uint16_t *)t, v);
      n_words /= 2;
    } else {
      uint16_t half[kLanes];
      if (dtype == TL_BF16) {
        store_bf16(half, v);
        v = load_bf16(half);
      } else if (dtype == TL_F16) {
        store_f16(half, clamp_f16(v));
        v = load_f16(half);
      }
      store((float *)t, v);
    }
    for (int i = 0; i < n_words; i++) words[(uint64_t)i * n_rows] = t[i];
    words += (uint64_t)n_words * n_rows;
  }
}

void write_block_row(int dtype, int n_in, const float *x, void *block, int n_rows, int row) {
  if (dtype == TL_INT8)
    write_int8_row(n_in, x, block, n_rows, row);
  else
    write_float_row(dtype, n_in, x, (uint32_t *)block + row, n_rows);
}

// ---- operands that outlive their batch, one row at operand_row_nbytes: float types as they are, int8 as codes, then scales

void store_operand(int dtype, int n_in, const float *x, void *out) {
  if (dtype == TL_INT8) {
    const int n_groups = int8_groups(n_in);
    int8_t *q = (int8_t *)out;
    float *scale = (float *)(q + n_groups * TL_INT8_GROUP);
    for (int g = 0; g < n_groups; g++) scale[g] = quantise_group(x + g * TL_INT8_GROUP, n_in - g * TL_INT8_GROUP, q + g * TL_INT8_GROUP);
    return;
  }
  if (dtype == TL_F32) return (void)__builtin_memcpy(out, x, n_in * sizeof(float));
  for (int i = 0; i < n_in; i += kLanes) {
    const int n = n_in - i < kLanes ? n_in - i : kLanes;
    const vf v = load_part(x + i, n);
    uint16_t half[kLanes];
    dtype == TL_BF16 ? store_bf16(half, v) : store_f16(half, clamp_f16(v));
    __builtin_memcpy((uint16_t *)out + i, half, n * sizeof(uint16_t));
  }
}

// The row of a block that write_block_row made of what was stored; work: (n_in,) floats.
void load_operand(int dtype, int n_in, const void *stored, float *work, void *block, int n_rows, int row) {
  if (dtype == TL_INT8) {
    const int n_groups = int8_groups(n_in);
    const int8_t *q = (const int8_t *)stored;
    const float *scale = (const float *)(q + n_groups * TL_INT8_GROUP);
    const Int8Block b = int8_block(block, n_groups, n_rows);
    for (int g = 0; g < n_groups; g++) place_group(b, g, q + g * TL_INT8_GROUP, scale[g], n_rows, row);
    return;
  }
  if (dtype == TL_F32) return write_block_row(dtype, n_in, (const float *)stored, block, n_rows, row);
  for (int i = 0; i < n_in; i += kLanes) {
    const int n = n_in - i < kLanes ? n_in - i : kLanes;
    uint16_t half[kLanes] = {};
    __builtin_memcpy(half, (const uint16_t *)stored + i, n * sizeof(uint16_t));
    store_part(work + i, dtype == TL_BF16 ? load_bf16(half) : load_f16(half), n);
  }
  write_block_row(dtype, n_in, work, block, n_rows, row);
}

}  // namespace TL_ISA_NS
}  // namespace tl
