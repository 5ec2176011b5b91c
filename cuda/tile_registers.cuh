// The end of a tile of gemm_tiles.cu straight from the registers that hold its sums, in four parts, so that it can run under the first
// products of the next tile: what a part needs from memory is loaded a part ahead, nothing branches, and stores are whole sectors.
// The numbers are those of epilogue.cuh and place.cuh.
#pragma once

#include "gates.cuh"

namespace tl {

// How a tile ends: float32 rows, a gated activation, q, k and v in their places; or row by row through shared memory.
enum class TileEnd { kRows, kGated, kPlaceBf16, kPlaceF16, kByRow };
TL_BOTH constexpr bool places(TileEnd end) { return end == TileEnd::kPlaceBf16 || end == TileEnd::kPlaceF16; }

constexpr int kTileRows = 128;  // batch rows of a tile
constexpr int kEndParts = 4;

// Where a row's keys and values go: its position, and the page that holds it; below 0: nowhere.
struct RowPlace {
  int32_t pos, page;
};

// Two of a lane's sums are turned together, or are a gate and its up output: panels `distance` apart lie beside each other in a stage.
TL_BOTH int panel_distance(const GemmArgs &g, TileEnd end) { return places(end) ? g.place.kv.head_pad / 2 / kPanelRows : 1; }
// Where a panel of the tile lies in a stage, and which panel lies at 2 * pair + upper.
TL_DEVICE int panel_place(int panel, int distance) { return (panel / (2 * distance) * distance + panel % distance) * 2 + panel / distance % 2; }
TL_DEVICE int panel_at(int pair, int upper, int distance) { return pair / distance * 2 * distance + pair % distance + upper * distance; }

// Whether q, k and v can be placed from registers: q and k are not normed, and whole heads turn by halves.
inline bool turns_halves(const PlaceArgs &p) {
  const int pad = p.kv.head_pad;
  return p.qk_norm == TL_QK_NORM_NONE && !p.interleaved && p.rotary_dim == pad && p.head_dim == pad && (pad == 64 || pad == 128) &&
         kv_element_nbytes(p.kv.dtype) == 2;
}

inline TileEnd tile_end(const GemmArgs &g) {
  const Epilogue &e = g.epilogue;
  if (e.kind == kToRows || e.kind == kAddToRows) return TileEnd::kRows;
  if (g.weight.n_in <= TL_K_CHUNK) return TileEnd::kByRow;  // there is no first chunk before the last
  if (takes_gates(e)) return TileEnd::kGated;
  if (e.kind != kPlace || !turns_halves(g.place)) return TileEnd::kByRow;
  return g.place.kv.dtype == TL_BF16 ? TileEnd::kPlaceBf16 : TileEnd::kPlaceF16;
}

#if TL_WGMMA

struct Tile {
  int first_panel, first_row;
};

using TileSums = float[kTileRows / 2];

constexpr int kEndSums = kTileRows / 2 / kEndParts;  // of a part

template <TileEnd kEnd, bool kInt8>
struct TileRegisters {
  using Early = float[kEndSums];  // what a part loads: addends; or for each eight rows two cosines and two sines

  const GemmArgs &g;
  int warp;
  Tile tile;
  // Of places alone:
  const RowPlace *rows;  // of the tile
  bool is_head, is_q, turns;
  int dim;               // the lower of two neighbours, whose upper half is head_pad / 2 further
  uint8_t *first;        // of the first row in q, or of the first slot in the first page

  TL_DEVICE_MEMBER TileRegisters(const GemmArgs &g, int warp) : g(g), warp(warp), tile{0, 0} {}

  TL_DEVICE_MEMBER void begin(Tile of, const RowPlace *rows_of) {
    tile = of;
    if constexpr (places(kEnd)) {
      const PlaceArgs &p = g.place;
      const int head = output(0) / p.kv.head_pad, kv_head = head - p.n_heads;
      rows = rows_of;
      dim = output(0) % p.kv.head_pad & ~1;
      is_head = kv_head < 2 * p.n_kv_heads;
      is_q = kv_head < 0;
      turns = kv_head < p.n_kv_heads;
      if (is_q)
        first = (uint8_t *)p.q + (((int64_t)tile.first_row * p.n_heads + head) * p.kv.head_pad + dim) * 2;
      else
        first = turns ? k_of(p.kv, 0, kv_head) + k_index(0, dim) * 2 : v_of(p.kv, 0, kv_head - p.n_kv_heads) + v_index(0, dim) * 2;
    }
  }

  TL_DEVICE_MEMBER void load(Early &early, int part) const {
    if constexpr (kEnd == TileEnd::kRows)
      if (g.epilogue.kind == kAddToRows) whole() ? load_addends<true>(early, part) : load_addends<false>(early, part);
    if constexpr (places(kEnd)) load_angles(early, part);
  }

  // `y`: all sums.
  TL_DEVICE_MEMBER void finish(TileSums &y, const Early &early, int part) const {
    complete(y, part);
    if constexpr (kEnd == TileEnd::kRows) store_rows(y, early, part);
    if constexpr (kEnd == TileEnd::kGated)
      store_gates<kEndSums>(g.epilogue, y, kEndSums * part, {tile.first_panel, g.weight.n_out / kPanelRows, tile.first_row, g.n_rows}, warp);
    if constexpr (kEnd == TileEnd::kPlaceBf16) place<Bf16>(y, early, part);
    if constexpr (kEnd == TileEnd::kPlaceF16) place<F16>(y, early, part);
  }

 private:
  TL_DEVICE_MEMBER int pair() const { return warp % 4; }
  TL_DEVICE_MEMBER int odd() const { return lane_id() / 4 % 2; }
  TL_DEVICE_MEMBER int output(int i) const {
    return (tile.first_panel + panel_at(pair(), i % 4 / 2, panel_distance(g, kEnd))) * kPanelRows + warp / 4 * 8 + lane_id() / 4;
  }
  TL_DEVICE_MEMBER bool exists(int i) const { return tile.first_row + row_of(i) < g.n_rows && output(i) < g.weight.n_out; }
  TL_DEVICE_MEMBER bool whole() const {
    return tile.first_row + kTileRows <= g.n_rows && tile.first_panel + kTilePanels <= g.weight.n_out / kPanelRows;
  }

  // Scales and biases of this lane's outputs.
  TL_DEVICE_MEMBER void complete(TileSums &y, int part) const {
    if (!kInt8 && !g.bias) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int at = min(output(2 * h), g.weight.n_out - 1);
      const float scale = kInt8 ? g.weight.scales[at] : 1.0f, bias = g.bias ? g.bias[at] : 0.0f;
#pragma unroll
      for (int i = kEndSums * part + 2 * h; i < kEndSums * (part + 1); i += i % 2 ? 3 : 1) {
        if (kInt8) y[i] = y[i] * scale;
        if (g.bias) y[i] = y[i] + bias;
      }
    }
  }

  // ---- float32 rows. kWhole: all of the tile exists, so that nothing stands between the loads, which then run side by side.

  TL_DEVICE_MEMBER int64_t first_at() const { return (int64_t)(tile.first_row + row_of(0)) * g.epilogue.stride + output(0); }
  TL_DEVICE_MEMBER int at(int i) const { return (i / 4 * 8 + i % 2) * g.epilogue.stride + i % 4 / 2 * kPanelRows; }

  template <bool kWhole>
  TL_DEVICE_MEMBER void load_addends(Early &early, int part) const {
    const float *addend = g.epilogue.addend + first_at();
#pragma unroll
    for (int i = 0; i < kEndSums; i++)
      if (kWhole || exists(kEndSums * part + i)) early[i] = load_fresh(addend + at(kEndSums * part + i));
  }

  template <bool kAdds, bool kWhole>
  TL_DEVICE_MEMBER void store_rows(const TileSums &y, const Early &early, int part) const {
    float *out = g.epilogue.out + first_at();
#pragma unroll
    for (int k = 0; k < kEndSums; k++) {
      const int i = kEndSums * part + k;
      if (kWhole || exists(i)) out[at(i)] = kAdds ? early[k] + y[i] : y[i];
    }
  }

  TL_DEVICE_MEMBER void store_rows(const TileSums &y, const Early &early, int part) const {
    if (g.epilogue.kind == kAddToRows)
      whole() ? store_rows<true, true>(y, early, part) : store_rows<true, false>(y, early, part);
    else
      whole() ? store_rows<false, true>(y, early, part) : store_rows<false, false>(y, early, part);
  }

  // ---- q, k and v: values 0, 1 are of a dim's lower half and 2, 3 of its upper one. Two lanes exchange one of each, so that each has
  // two neighbouring dims, and those they turn with, of one row.

  TL_DEVICE_MEMBER int own_row(int i) const { return row_of(i) + odd(); }  // i a multiple of four

  TL_DEVICE_MEMBER void load_angles(Early &early, int part) const {
    const int half = g.place.kv.head_pad / 2;
#pragma unroll
    for (int k = 0; k < kEndSums; k += 4) {
      const int at = max(rows[own_row(kEndSums * part + k)].pos, 0) * half + dim;
      float2 c = make_float2(0.0f, 0.0f), s = c;
      if (turns) c = *(const float2 *)(g.place.cos + at), s = *(const float2 *)(g.place.sin + at);
      early[k] = c.x;
      early[k + 1] = c.y;
      early[k + 2] = s.x;
      early[k + 3] = s.y;
    }
  }

  // Where a row's values go from `first` on.
  TL_DEVICE_MEMBER int64_t row_offset(int row) const {
    const RowPlace at = rows[row];
    return is_q ? (int64_t)row * (g.place.n_heads * g.place.kv.head_pad * 2)
                : at.page * (int64_t)g.place.kv.page_nbytes + at.pos % TL_PAGE_POSITIONS * 16;
  }
  TL_DEVICE_MEMBER bool stores(int row) const { return is_head && tile.first_row + row < g.n_rows && (is_q || rows[row].page >= 0); }

  template <class T>
  TL_DEVICE_MEMBER void place(const TileSums &y, const Early &early, int part) const {
    const int half = g.place.kv.head_pad / 2, step = 2 * (is_q ? half : half * TL_PAGE_POSITIONS);  // from a value to the one it turns with
    int n_clamped = 0;
#pragma unroll
    for (int k = 0; k < kEndSums; k += 4) {
      const int i = kEndSums * part + k;
      const float lower = __shfl_xor_sync(0xffffffffu, odd() ? y[i] : y[i + 1], 4),
                  upper = __shfl_xor_sync(0xffffffffu, odd() ? y[i + 2] : y[i + 3], 4);
      const float2 a = make_float2(odd() ? lower : y[i], odd() ? y[i + 1] : lower),
                   b = make_float2(odd() ? upper : y[i + 2], odd() ? y[i + 3] : upper);
      const float2 c = make_float2(early[k], early[k + 1]), s = make_float2(early[k + 2], early[k + 3]);
      const float2 u = make_float2(turns ? fmaf(a.x, c.x, -(b.x * s.x)) : a.x, turns ? fmaf(a.y, c.y, -(b.y * s.y)) : a.y);
      const float2 v = make_float2(turns ? fmaf(b.x, c.x, a.x * s.x) : b.x, turns ? fmaf(b.y, c.y, a.y * s.y) : b.y);
      uint8_t *to = first + row_offset(own_row(i));
      const bool there = stores(own_row(i));
      if (there) *(uint32_t *)to = T::pack(u.x, u.y);
      if (there) *(uint32_t *)(to + step) = T::pack(v.x, v.y);
      if (T::kDtype == TL_F16) n_clamped += there && !is_q ? T::n_clamped(u.x, u.y) + T::n_clamped(v.x, v.y) : 0;
    }
    if (T::kDtype == TL_F16 && n_clamped && g.place.n_clamped) atomicAdd(g.place.n_clamped, (unsigned long long)n_clamped);
  }
};

#endif

}  // namespace tl
