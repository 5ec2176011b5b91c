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

__global__ void __launch_bounds__(kThreads) convert_page(const PageArgs a) {
  const int layer = blockIdx.x / a.n_kv_heads, kv_head = blockIdx.x % a.n_kv_heads;
  KvLayer kv = a.kv;
  kv.layer_offset = layer * a.layer_nbytes;
  const int64_t first = (int64_t)blockIdx.x * TL_PAGE_POSITIONS * a.head_dim;
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (kv.dtype == TL_F32)
    convert(a, (uint32_t *)k_of(kv, a.page, kv_head), (uint32_t *)v_of(kv, a.page, kv_head), first);
  else
    convert(a, (uint16_t *)k_of(kv, a.page, kv_head), (uint16_t *)v_of(kv, a.page, kv_head), first);
}

}  // namespace

void launch_convert_page(const Launcher &launcher, const PageArgs &args) {
  launcher.launch(convert_page, Shape{dim3(args.n_layers * args.n_kv_heads), kThreads, 0, 1}, args);
}

}  // namespace tl
