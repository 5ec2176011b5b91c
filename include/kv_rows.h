/* Keys and values as every backend has them: which types are codes, what turns together, and rows outside of a page (tinyloop.h). */
#ifndef TINYLOOP_KV_ROWS_H
#define TINYLOOP_KV_ROWS_H

#include "tinyloop.h"
#include "tl_shared.h"

TL_SHARED int is_quantised(int kv_dtype) { return kv_dtype == TL_INT8 || kv_dtype == TL_INT4; }

/* Quantised types turn q, K and V, and the attention output back, in blocks of this many dims; 1 is no turn. */
TL_SHARED int rotation_block(int kv_dtype, int head_dim) { return is_quantised(kv_dtype) ? head_dim & -head_dim : 1; }

/* Bytes of one token of one layer and KV head. */
TL_SHARED int key_row_nbytes(int kv_dtype, int head_dim) { return is_quantised(kv_dtype) ? head_dim + 2 : head_dim * (kv_dtype == TL_F32 ? 4 : 2); }
TL_SHARED int value_row_nbytes(int kv_dtype, int head_dim) {
  return kv_dtype == TL_INT4 ? head_dim / 2 + 4 * ((head_dim + TL_KV_GROUP - 1) / TL_KV_GROUP) : key_row_nbytes(kv_dtype, head_dim);
}

#endif /* TINYLOOP_KV_ROWS_H */
