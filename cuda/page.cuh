// One KV page between the layout of layout.cuh and the canonical one. See page.cu.
#pragma once

#include "launch.h"
#include "layout.cuh"

namespace tl {

struct PageArgs {
  KvLayer kv;           // of layer 0
  uint64_t layer_nbytes;
  int32_t page, n_layers, n_kv_heads, head_dim;
  void *keys, *values;  // (n_layers, n_kv_heads, TL_PAGE_POSITIONS) rows each
  int32_t imports;      // from there to the page
};

void launch_convert_page(const Launcher &launcher, const PageArgs &args);

}  // namespace tl
