// Gates and ups of a tile, activated in the registers that hold their sums, to the operand of the next product: both products on wgmma that
// end so share it (tile_registers.cuh, gemm_gated.cu).
#pragma once

#include "gemm_stages.cuh"

namespace tl {

inline bool takes_gates(const Epilogue &e) {
  return e.kind == kActivate && e.gated && e.operand.dtype != TL_F32 && e.operand.layout == kOperandTiles;
}

#if TL_WGMMA

// The panels and rows of a tile, up to where they end.
struct TileExtent {
  int first_panel, end_panel, first_row, end_row;
};

// The n values from `begin` on of a lane. Gates and ups are values 0, 1 and 2, 3 of four. Two lanes exchange one, so that each has two
// columns of a row. kSilu: the usual activation, known before the loop.
template <int n, class T, bool kSilu, int n_sums>
TL_DEVICE void store_gates(const Epilogue &e, const float (&y)[n_sums], int begin, const TileExtent &tile, int warp) {
  const int odd = lane_id() / 4 % 2, panel = tile.first_panel + warp % 4 * 2, act = kSilu ? (int)TL_ACT_SILU : e.act;
  const int column = panel / 2 * 16 + warp / 4 * 8 + lane_id() / 4 / 2 * 2, first_row = tile.first_row + row_of(0) + odd;
  uint16_t *to = (uint16_t *)e.operand.data + operand_index(e.operand, first_row, column);
  const bool exists = panel < tile.end_panel;
#pragma unroll
  for (int i = begin; i < begin + n; i += 4) {
    const float h0 = activate(act, y[i]) * y[i + 2], h1 = activate(act, y[i + 1]) * y[i + 3];
    const float other = __shfl_xor_sync(0xffffffffu, odd ? h0 : h1, 4);
    if (exists && first_row + i * 2 < tile.end_row) *(uint32_t *)(to + i / 4 * 512) = T::pack(odd ? other : h0, odd ? h1 : other);
  }
}

template <int n, int n_sums>
TL_DEVICE void store_gates(const Epilogue &e, const float (&y)[n_sums], int begin, const TileExtent &tile, int warp) {
  const bool silu = e.act == TL_ACT_SILU;
  if (e.operand.dtype == TL_BF16)
    silu ? store_gates<n, Bf16, true>(e, y, begin, tile, warp) : store_gates<n, Bf16, false>(e, y, begin, tile, warp);
  else
    silu ? store_gates<n, F16, true>(e, y, begin, tile, warp) : store_gates<n, F16, false>(e, y, begin, tile, warp);
}

#endif

}  // namespace tl
