// The end of a product over many rows: a warp takes 128 outputs of one row, four neighbours a lane, and puts them where they
// belong in whole runs of bytes. The same numbers as epilogue.cuh, and q, k and v placed at once (place.cuh).
#pragma once

#include "epilogue.cuh"
#include "gemm.cuh"
#include "place.cuh"

namespace tl {

constexpr int kTileOutputs = 128;

// Rows begin, begin + step, .. below end of a tile, by one warp; sum(row) gives its lane's four sums of a row.
template <bool kInt8>
struct TileRows {
  const GemmArgs &g;
  int first_panel, n_panels;  // of the tile; the last ones may not exist
  int first_row;              // of the tile, in the product
  int begin, end, step;        // rows of the tile
  float *scratch;              // kMaxHeadDim shared floats of this warp

  template <class Sum>
  TL_DEVICE_MEMBER void finish(Sum sum) const {
    if (g.epilogue.kind == kAddToRows) return add_to_rows(sum);
    if (g.epilogue.kind == kPlace) return turns_halves(g.place) ? place_plain_rows(sum) : place_rows(sum);
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
  TL_DEVICE_MEMBER bool exists() const { return output() < min(g.weight.n_out, (first_panel + n_panels) * kPanelRows); }
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
      if (exists() && output() + i < g.epilogue.n_valid) to[i] = scale_softcap(a[i], g.epilogue.scale, g.epilogue.cap);
  }

  // Whether q and k are not normed, and whole heads turn by halves: what takes no scratch memory.
  TL_DEVICE_MEMBER bool turns_halves(const PlaceArgs &p) const {
    const int pad = p.kv.head_pad;
    return p.qk_norm == TL_QK_NORM_NONE && !p.interleaved && p.rotary_dim == pad && p.head_dim == pad && (pad == 64 || pad == 128) &&
           kv_element_nbytes(p.kv.dtype) == 2;
  }

  // Four neighbours of a head to where attention reads them; `page` below 0: the row does nothing.
  TL_DEVICE_MEMBER void store_four(const PlaceArgs &p, int row, int head, int dim, float4 v, int page, int slot) const {
    const int n_qk = p.n_heads + p.n_kv_heads, dtype = p.kv.dtype;
    if (head >= p.n_heads && page < 0) return;
    uint16_t *to = (uint16_t *)p.q + ((int64_t)row * p.n_heads + head) * p.kv.head_pad + dim;
    if (head >= n_qk)
      to = (uint16_t *)v_of(p.kv, page, head - n_qk) + v_index(slot, dim);
    else if (head >= p.n_heads)
      to = (uint16_t *)k_of(p.kv, page, head - p.n_heads) + k_index(slot, dim);
    *(uint2 *)to = make_uint2(pack_pair(dtype, v.x, v.y), pack_pair(dtype, v.z, v.w));
    if (dtype != TL_F16 || head < p.n_heads || !p.n_clamped) return;
    if (const int n = F16::n_clamped(v.x, v.y) + F16::n_clamped(v.z, v.w)) atomicAdd(p.n_clamped, (unsigned long long)n);
  }

  // The numbers of finish_head, a pair's halves in two lanes. Four rows at a time, so that their loads run side by side.
  template <class Sum>
  TL_DEVICE_MEMBER void place_plain_rows(Sum sum) const {
    constexpr int kBatch = 4;
    const PlaceArgs &p = g.place;
    const int head_pad = p.kv.head_pad, half = head_pad / 2, own = begin + lane_id() * step;
    const int head = output() / head_pad, dim = output() % head_pad, n_qk = p.n_heads + p.n_kv_heads;
    const int own_pos = own < end ? p.rows.pos[first_row + own] : -1;
    const int own_page = own_pos < 0 ? -1 : page_of(p.rows, p.rows.seq[first_row + own], own_pos);
#pragma unroll 1
    for (int first = begin, n = 0; first < end; first += kBatch * step, n += kBatch) {
      float4 c[kBatch], s[kBatch];
      int pos[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; j++) {
        pos[j] = __shfl_sync(0xffffffffu, own_pos, min(n + j, 31));
        const int64_t at = (int64_t)max(pos[j], 0) * half + dim % half;
        c[j] = *(const float4 *)(p.cos + at);
        s[j] = *(const float4 *)(p.sin + at);
      }
#pragma unroll
      for (int j = 0; j < kBatch; j++) {
        const int row = first + j * step, page = __shfl_sync(0xffffffffu, own_page, min(n + j, 31));
        if (row >= end) break;
        const float4 y = complete(sum(row));
        const float4 z = make_float4(__shfl_xor_sync(0xffffffffu, y.x, half / 4), __shfl_xor_sync(0xffffffffu, y.y, half / 4),
                                     __shfl_xor_sync(0xffffffffu, y.z, half / 4), __shfl_xor_sync(0xffffffffu, y.w, half / 4));
        const float4 t = make_float4(z.x * s[j].x, z.y * s[j].y, z.z * s[j].z, z.w * s[j].w);
        const bool lower = dim < half;
        const float4 v = make_float4(fmaf(y.x, c[j].x, lower ? -t.x : t.x), fmaf(y.y, c[j].y, lower ? -t.y : t.y),
                                     fmaf(y.z, c[j].z, lower ? -t.z : t.z), fmaf(y.w, c[j].w, lower ? -t.w : t.w));
        if (head < n_qk + p.n_kv_heads) store_four(p, first_row + row, head, dim, head < n_qk ? v : y, page, pos[j] % TL_PAGE_POSITIONS);
      }
    }
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
