// How the K and V of one layer and KV head lie in a page of 16 tokens: a block, the blocks of a page one after the other.
//
// Float types hold K as (head_dim, 16) and V as (16, head_pad) values. Quantised types hold codes, four of them beside each
// other, and behind them the bfloat16 scales, and for V of int4 zeros, as (groups, 16):
//   K of both, V of int8: (pad / 4, 16, 4) and (4, pad, 4), a byte is a code plus 128; one group
//   V of int4: (4, pad / 32, 16, 4), a byte is dimension 32 i + j, and 32 i + 16 + j above it; groups of TL_KV_GROUP
// No two tokens share a byte, since different threads may write them.
#pragma once

#include "kv_rows.h"

namespace tl {

constexpr int kMaxKvGroups = 256 / TL_KV_GROUP;  // head_dim is at most 256

struct KvLayout {
  int pad;       // head_dim in whole vectors
  int v_group;   // dimensions that share a scale of V
  int n_groups;  // of V
  uint64_t v, k_scale, v_scale, v_zero;  // byte offsets in a block; K lies at 0
  uint64_t nbytes;
};

inline KvLayout kv_layout(int kv_dtype, int head_dim) {
  const bool is_int4 = kv_dtype == TL_INT4;
  const int pad = (head_dim + 15) / 16 * 16, group = is_int4 ? TL_KV_GROUP : pad, n_groups = (head_dim + group - 1) / group;
  const int size = is_quantised(kv_dtype) ? 1 : kv_dtype == TL_F32 ? 4 : 2;
  const uint64_t scales = is_quantised(kv_dtype) ? TL_PAGE_POSITIONS * 2 : 0;  // bytes of a group's
  KvLayout a = {pad, group, n_groups, 0, 0, 0, 0, 0};
  a.v = (uint64_t)(is_quantised(kv_dtype) ? pad : head_dim) * TL_PAGE_POSITIONS * size;
  a.k_scale = a.v + TL_PAGE_POSITIONS * (is_int4 ? (uint64_t)(head_dim + 31) / 32 * 16 : (uint64_t)pad * size);
  a.v_scale = a.k_scale + scales;
  a.v_zero = a.v_scale + scales * n_groups;
  a.nbytes = (a.v_zero + (is_int4 ? scales * n_groups : 0) + 63) / 64 * 64;
  return a;
}

}  // namespace tl
