// Reading and writing one KV page in the canonical layout, value by value: one CTA a layer and KV head.
#include "page.cuh"

namespace tl {
namespace {

template <class T>
TL_DEVICE void convert(const PageArgs &a, T *k, T *v, int64_t first) {
  const int head_pad = a.kv.head_pad;
  T *keys = (T *)a.keys + first, *values = (T *)a.values + first;
  for (int i = threadIdx.x; i < TL_PAGE_POSITIONS * head_pad; i += kThreads) {
    const int slot = i / head_pad, dim = i % head_pad, at = slot * a.head_dim + dim;
    const bool exists = dim < a.head_dim;
    T &key = k[sizeof(T) == 4 ? i : k_index(slot, dim)], &value = v[sizeof(T) == 4 ? i : v_index(slot, dim)];
    if (a.imports) {
      key = exists ? keys[at] : T(0);
      value = exists ? values[at] : T(0);
    } else if (exists) {
      keys[at] = key;
      values[at] = value;
    }
  }
}

// Bytes of a page against canonical ones, moved one way or the other.
struct ByteMover {
  bool imports;
  TL_DEVICE_MEMBER void operator()(uint8_t *in_page, uint8_t *outside) const {
    if (imports)
      *in_page = *outside;
    else
      *outside = *in_page;
  }
};

// Sixteen scales or zeros of each group, behind `first` bytes of a canonical row.
TL_DEVICE void convert_scales(const ByteMover &move, uint8_t *in_page, uint8_t *rows, int row_bytes, int first, int n_groups) {
  for (int i = threadIdx.x; i < TL_PAGE_POSITIONS * n_groups * 2; i += kThreads) {
    const int slot = i / 2 % TL_PAGE_POSITIONS, group = i / kScaleBytes;
    move(in_page + i, rows + slot * row_bytes + first + group * 2 + i % 2);
  }
}

// Values of int4: a byte of the page has two dims sixteen apart, a canonical one two neighbours.
TL_DEVICE void convert_halves(const PageArgs &a, uint8_t *values, uint8_t *rows, int row_bytes) {
  const auto in_page = [&](int slot, int dim) { return values + v_code_row(TL_INT4, dim) * TL_PAGE_POSITIONS + key_place(slot); };
  const auto half = [](const uint8_t *byte, int upper) { return *byte >> 4 * upper & 15; };
  if (a.imports) {
    for (int i = threadIdx.x; i < TL_PAGE_POSITIONS * code_pad(a.kv.head_pad) / 2; i += kThreads) {
      const int slot = i % TL_PAGE_POSITIONS, row = i / TL_PAGE_POSITIONS, dim = row / 16 * 32 + row % 16;
      const uint8_t *from = rows + slot * row_bytes;
      const int lower = dim < a.head_dim ? half(from + dim / 2, dim % 2) : 0;
      const int upper = dim + 16 < a.head_dim ? half(from + (dim + 16) / 2, dim % 2) : 0;
      *in_page(slot, dim) = (uint8_t)(lower | upper << 4);
    }
  } else {
    for (int i = threadIdx.x; i < TL_PAGE_POSITIONS * a.head_dim / 2; i += kThreads) {
      const int slot = i / (a.head_dim / 2), dim = i % (a.head_dim / 2) * 2, upper = dim / 16 % 2;
      rows[slot * row_bytes + dim / 2] = (uint8_t)(half(in_page(slot, dim), upper) | half(in_page(slot, dim + 1), upper) << 4);
    }
  }
}

TL_DEVICE void convert_codes(const PageArgs &a, uint8_t *keys, uint8_t *values, int64_t n_rows_before) {
  const int head_dim = a.head_dim, head_pad = a.kv.head_pad, dtype = a.kv.dtype, groups = n_value_groups(dtype, head_pad);
  const int k_bytes = key_row_nbytes(dtype, head_dim), v_bytes = value_row_nbytes(dtype, head_dim);
  uint8_t *k_rows = (uint8_t *)a.keys + n_rows_before * k_bytes, *v_rows = (uint8_t *)a.values + n_rows_before * v_bytes;
  const ByteMover move{a.imports != 0};
  for (int i = threadIdx.x; i < TL_PAGE_POSITIONS * head_dim; i += kThreads) {
    const int slot = i / head_dim, dim = i % head_dim;
    move(keys + k_code_at(slot, dim) + dim % 2, k_rows + slot * k_bytes + dim);
    if (dtype == TL_INT8) move(values + dim * TL_PAGE_POSITIONS + key_place(slot), v_rows + slot * v_bytes + dim);
  }
  if (dtype == TL_INT4) convert_halves(a, values, v_rows, v_bytes);
  const int v_codes = dtype == TL_INT4 ? head_dim / 2 : head_dim;
  convert_scales(move, keys + k_scale_at(head_pad), k_rows, k_bytes, head_dim, 1);
  convert_scales(move, values + v_scale_at(dtype, head_pad), v_rows, v_bytes, v_codes, groups);
  if (dtype == TL_INT4) convert_scales(move, values + v_zero_at(dtype, head_pad), v_rows, v_bytes, v_codes + 2 * groups, groups);
}

__global__ void __launch_bounds__(kThreads) convert_page(const PageArgs a) {
  const int layer = blockIdx.x / a.n_kv_heads, kv_head = blockIdx.x % a.n_kv_heads;
  KvLayer kv = a.kv;
  kv.layer_offset = layer * a.layer_nbytes;
  const int64_t n_rows_before = (int64_t)blockIdx.x * TL_PAGE_POSITIONS, first = n_rows_before * a.head_dim;
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (is_quantised(kv.dtype))
    convert_codes(a, k_of(kv, a.page, kv_head), v_of(kv, a.page, kv_head), n_rows_before);
  else if (kv.dtype == TL_F32)
    convert(a, (uint32_t *)k_of(kv, a.page, kv_head), (uint32_t *)v_of(kv, a.page, kv_head), first);
  else
    convert(a, (uint16_t *)k_of(kv, a.page, kv_head), (uint16_t *)v_of(kv, a.page, kv_head), first);
}

}  // namespace

void launch_convert_page(const Launcher &launcher, const PageArgs &args) {
  launcher.launch(convert_page, Shape{dim3(args.n_layers * args.n_kv_heads), kThreads, 0, 1}, args);
}

}  // namespace tl
