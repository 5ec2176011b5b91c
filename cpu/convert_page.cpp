// Pages between this backend's layout and the canonical rows.
#include <string.h>

#include "plan.h"

namespace tl {
namespace {

// One token's row against its place in a block, moved one way or the other a few bytes at a time.
struct RowMover {
  const KvLayout &a;
  int kv_dtype, head_dim;
  uint8_t *block;
  int slot;
  bool to_page;

  void move(uint8_t *in_page, uint8_t *outside, uint64_t nbytes) const { memcpy(to_page ? in_page : outside, to_page ? outside : in_page, nbytes); }

  void move_floats(bool is_key, uint8_t *row) const {
    const uint64_t size = kv_dtype == TL_F32 ? 4 : 2;
    if (!is_key) return move(block + a.v + slot * a.pad * size, row, head_dim * size);
    for (int d = 0; d < head_dim; d++) move(block + (d * TL_PAGE_POSITIONS + slot) * size, row + d * size, size);
  }

  void move_int8(bool is_key, uint8_t *row) const {
    for (int d = 0; d < head_dim; d++) {
      uint8_t &code = is_key ? block[(d / 4 * TL_PAGE_POSITIONS + slot) * 4 + d % 4] : block[a.v + (slot / 4 * a.pad + d) * 4 + slot % 4];
      if (to_page)
        code = row[d] ^ 0x80;  // a code plus 128
      else
        row[d] = code ^ 0x80;
    }
  }

  void move_v_int4(uint8_t *row) const {
    const int n_pairs = (head_dim + 31) / 32;
    for (int d = 0; d < head_dim; d++) {
      uint8_t &byte = block[a.v + ((slot / 4 * n_pairs + d / 32) * 16 + d % 16) * 4 + slot % 4];
      const int in_page = d / 16 % 2 * 4, outside = d % 2 * 4;
      if (to_page)
        byte = (uint8_t)((byte & ~(15 << in_page)) | (row[d / 2] >> outside & 15) << in_page);
      else
        row[d / 2] = (uint8_t)((outside ? row[d / 2] : 0) | (byte >> in_page & 15) << outside);
    }
    move_scales(a.v_scale, row + head_dim / 2);
    move_scales(a.v_zero, row + head_dim / 2 + 2 * a.n_groups);
  }

  void move_scales(uint64_t at, uint8_t *row) const {
    for (int g = 0; g < a.n_groups; g++) move(block + at + (g * TL_PAGE_POSITIONS + slot) * 2, row + 2 * g, 2);
  }

  void move_row(bool is_key, uint8_t *row) const {
    if (!is_quantised(kv_dtype)) return move_floats(is_key, row);
    if (!is_key && kv_dtype == TL_INT4) return move_v_int4(row);
    move_int8(is_key, row);
    move(block + (is_key ? a.k_scale : a.v_scale) + slot * 2, row + head_dim, 2);
  }
};

}  // namespace

void convert_page(const tl_plan &plan, int part, int page, void *keys, void *values, bool to_page) {
  const tl_plan_desc &d = plan.desc;
  const uint64_t k_row = key_row_nbytes(d.kv_dtype, d.head_dim), v_row = value_row_nbytes(d.kv_dtype, d.head_dim);
  uint8_t *block = (uint8_t *)d.kv_base[part] + page * plan.page_nbytes[part], *k = (uint8_t *)keys, *v = (uint8_t *)values;
  for (int i = 0; i < d.n_layers[part] * d.n_kv_heads; i++, block += plan.kv.nbytes)
    for (int slot = 0; slot < TL_PAGE_POSITIONS; slot++, k += k_row, v += v_row) {
      const RowMover mover{plan.kv, d.kv_dtype, d.head_dim, block, slot, to_page};
      mover.move_row(true, k);
      mover.move_row(false, v);
    }
}

}  // namespace tl
