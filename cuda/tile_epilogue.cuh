// The end of a product over many rows: a warp takes 128 outputs of one row, four neighbours a lane, and puts them where they
// belong in whole runs of bytes. The same numbers as epilogue.cuh, and q, k and v placed at once (place.cuh).
#pragma once

#include "epilogue.cuh"
#include "gemm.cuh"
#include "place.cuh"

namespace tl {

constexpr int kTileOutputs = 128;

// Four outputs of a row from output `output` on.
TL_DEVICE void store_operand_quad(const Operand &o, int row, int column, float4 v) {  // column a multiple of four
  if (o.dtype != TL_F32 && o.layout == kOperandTiles) {
    *(uint2 *)((uint16_t *)o.data + operand_index(o, row, column)) = make_uint2(pack_pair(o.dtype, v.x, v.y), pack_pair(o.dtype, v.z, v.w));
    return;
  }
  store_operand_pair(o, row, column, v.x, v.y);
  store_operand_pair(o, row, column + 2, v.z, v.w);
}

// Rows begin, begin + step, .. below end of a tile, by one warp; sum(row) gives its lane's four sums of a row.
template <bool kInt8>
struct TileRows {
  const GemmArgs &g;
  int first_panel, first_row;  // of the tile, in the product
  int begin, end, step;        // rows of the tile
  float *scratch;              // kMaxHeadDim shared floats of this warp

  template <class Sum>
  TL_DEVICE_MEMBER void finish(Sum sum) const {
    if (g.epilogue.kind == kAddToRows) return add_to_rows(sum);
    if (g.epilogue.kind == kPlace) return place_rows(sum);
#pragma unroll 1
    for (int row = begin; row < end; row += step) {
      const float4 y = complete(sum(row));
      if (g.epilogue.kind == kToRows) {
        if (exists()) *(float4 *)out(row) = y;
      } else if (g.epilogue.kind == kActivate) {
        activate_row(first_row + row, y);
      } else {
        store_logits(row, y);
      }
    }
  }

 private:
  TL_DEVICE_MEMBER int output() const { return first_panel * kPanelRows + lane_id() * 4; }
  TL_DEVICE_MEMBER bool exists() const { return output() < g.weight.n_out; }
  TL_DEVICE_MEMBER float *out(int row) const { return g.epilogue.out + (int64_t)(first_row + row) * g.epilogue.stride + output(); }

  TL_DEVICE_MEMBER float4 complete(float4 y) const {
    if (!exists()) return y;
    if (kInt8) {
      const float4 s = *(const float4 *)(g.weight.scales + output());
      y = make_float4(y.x * s.x, y.y * s.y, y.z * s.z, y.w * s.w);
    }
    if (!g.bias) return y;
    const float4 b = *(const float4 *)(g.bias + output());
    return make_float4(y.x + b.x, y.y + b.y, y.z + b.z, y.w + b.w);
  }

  // Four rows at a time, so that their loads run side by side.
  template <class Sum>
  TL_DEVICE_MEMBER void add_to_rows(Sum sum) const {
    if (!exists()) return;
    const float *addend = g.epilogue.addend + (int64_t)first_row * g.epilogue.stride + output();
#pragma unroll 1
    for (int first = begin; first < end; first += 4 * step) {
      float4 x[4];
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (first + j * step < end) x[j] = *(const float4 *)(addend + (int64_t)(first + j * step) * g.epilogue.stride);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int row = first + j * step;
        if (row >= end) break;
        const float4 y = complete(sum(row));
        *(float4 *)out(row) = make_float4(x[j].x + y.x, x[j].y + y.y, x[j].z + y.z, x[j].w + y.w);
      }
    }
  }

  TL_DEVICE_MEMBER void activate_row(int row, float4 y) const {
    const Epilogue &e = g.epilogue;
    if (!e.gated) {
      if (exists())
        store_operand_quad(e.operand, row, output(),
                           make_float4(activate(e.act, y.x), activate(e.act, y.y), activate(e.act, y.z), activate(e.act, y.w)));
      return;
    }
    // Sixteen gates, then their ups: four lanes further.
    const float4 up = make_float4(__shfl_xor_sync(0xffffffffu, y.x, 4), __shfl_xor_sync(0xffffffffu, y.y, 4), __shfl_xor_sync(0xffffffffu, y.z, 4),
                                  __shfl_xor_sync(0xffffffffu, y.w, 4));
    if (lane_id() % 8 >= 4 || !exists()) return;
    const float4 h = make_float4(activate(e.act, y.x) * up.x, activate(e.act, y.y) * up.y, activate(e.act, y.z) * up.z, activate(e.act, y.w) * up.w);
    store_operand_quad(e.operand, row, output() / 32 * 16 + output() % 16, h);
  }

  TL_DEVICE_MEMBER void store_logits(int row, float4 y) const {
    const float a[4] = {y.x, y.y, y.z, y.w};
    float *to = out(row);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (output() + i < g.epilogue.n_valid) to[i] = scale_softcap(a[i], g.epilogue.scale, g.epilogue.cap);
  }

  // The tile's outputs are whole heads of q, k or v. Positions and pages of all rows first, angles one row ahead.
  template <class Sum>
  TL_DEVICE_MEMBER void place_rows(Sum sum) const {
    const PlaceArgs &p = g.place;
    const int head_pad = p.kv.head_pad, own = begin + lane_id() * step, dim = lane_id() * 8;
    const int own_pos = own < end ? p.rows.pos[first_row + own] : -1;
    const int own_page = own_pos < 0 ? -1 : page_of(p.rows, p.rows.seq[first_row + own], own_pos);
    Pairs next;
    load_angles(next, p, max(__shfl_sync(0xffffffffu, own_pos, 0), 0));
#pragma unroll 1
    for (int row = begin, i = 0; row < end; row += step, i++) {
      const int pos = __shfl_sync(0xffffffffu, own_pos, i), page = __shfl_sync(0xffffffffu, own_page, i);
      const Pairs angle = next;
      load_angles(next, p, max(__shfl_sync(0xffffffffu, own_pos, min(i + 1, 31)), 0));
      const float4 y = complete(sum(row));
      __syncwarp();
      *(float4 *)(scratch + lane_id() * 4) = y;
      __syncwarp();
#pragma unroll 1
      for (int j = 0; j < kTileOutputs / head_pad; j++) {
        const int head = first_panel * kPanelRows / head_pad + j;
        if (head >= p.n_heads + 2 * p.n_kv_heads) break;
        float *v = scratch + j * head_pad;
        finish_head(p, v, head, angle, 0.0f, v);
        if (dim < head_pad) store_eight(p, first_row + row, head, dim, v + dim, page, pos % TL_PAGE_POSITIONS);
      }
    }
  }
};

}  // namespace tl
