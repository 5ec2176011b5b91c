// How the K and V of one layer and KV head lie in a page of 16 tokens: a block, the blocks of a page one after the other.
//
// Float types hold K as (head_dim, 16) and V as (16, head_pad) values. Quantised types hold codes, four of them beside each
// other, and behind them the bfloat16 scales, and for int4 zeros, as (groups, 16):
//   int8  K (pad / 4, 16, 4), V (4, pad, 4): a byte is a code plus 128
//   int4  K (pad / 8, 16, 4): a byte is dimension 8 i + j, and 8 i + 4 + j above it; V (4, pad / 32, 16, 4): dimension 32 i + j,
//         and 32 i + 16 + j above it. No two tokens share a byte, since different threads may write them.
#pragma once

#include "tinyloop.h"

namespace tl {

constexpr int kMaxKvGroups = 256 / TL_KV_GROUP;  // head_dim is at most 256

inline bool is_quantised(int kv_dtype) { return kv_dtype == TL_INT8 || kv_dtype == TL_INT4; }

// Quantised types turn q, K and V, and the attention output back, in blocks of this many dimensions; 1 is no turn.
inline int rotation_block(int kv_dtype, int head_dim) { return is_quantised(kv_dtype) ? head_dim & -head_dim : 1; }

struct KvLayout {
  int pad;       // head_dim in whole vectors
  int group;     // dimensions that share a scale
  int n_groups;
  uint64_t v, k_scale, v_scale, k_zero, v_zero;  // byte offsets in a block; K lies at 0
  uint64_t nbytes;
};

inline KvLayout kv_layout(int kv_dtype, int head_dim) {
  const int pad = (head_dim + 15) / 16 * 16, pairs = (head_dim + 31) / 32;
  KvLayout a = {pad, head_dim, 1, 0, 0, 0, 0, 0, 0};
  uint64_t k_nbytes, v_nbytes;
  if (kv_dtype == TL_INT4) {
    a.group = TL_KV_GROUP;
    a.n_groups = (head_dim + TL_KV_GROUP - 1) / TL_KV_GROUP;
    k_nbytes = pad * TL_PAGE_POSITIONS / 2;
    v_nbytes = pairs * TL_PAGE_POSITIONS * 16;
  } else {
    const int size = kv_dtype == TL_INT8 ? 1 : kv_dtype == TL_F32 ? 4 : 2;
    k_nbytes = (uint64_t)(kv_dtype == TL_INT8 ? pad : head_dim) * TL_PAGE_POSITIONS * size;
    v_nbytes = (uint64_t)pad * TL_PAGE_POSITIONS * size;
  }
  const uint64_t scales = is_quantised(kv_dtype) ? a.n_groups * TL_PAGE_POSITIONS * 2 : 0, zeros = kv_dtype == TL_INT4 ? scales : 0;
  a.v = k_nbytes;
  a.k_scale = a.v + v_nbytes;
  a.v_scale = a.k_scale + scales;
  a.k_zero = a.v_scale + scales;
  a.v_zero = a.k_zero + zeros;
  a.nbytes = a.v_zero + zeros;
  return a;
}

// One token of one layer and KV head outside of a page: head_dim values; or head_dim codes (int8: signed; int4: two a byte, the
// even dimension below), then n_groups scales, then for int4 n_groups zeros, in bfloat16.
inline uint64_t kv_row_nbytes(int kv_dtype, int head_dim) {
  if (kv_dtype == TL_INT8) return head_dim + 2;
  if (kv_dtype == TL_INT4) return head_dim / 2 + 4 * ((head_dim + TL_KV_GROUP - 1) / TL_KV_GROUP);
  return (uint64_t)head_dim * (kv_dtype == TL_F32 ? 4 : 2);
}

}  // namespace tl
