// What becomes of an output of a matrix product: bias, residual addition, activation, logits. Float32 throughout; the
// operand of the next product is rounded here, once.
#pragma once

#include "math.cuh"

namespace tl {

enum EpilogueKind {
  kToRows,      // out[row] = y
  kAddToRows,   // out[row] = addend[row] + y
  kActivate,    // operand[row] = act(y), or act(y of a gate panel) * (y of the up panel after it)
  kToLogits,    // out[row] = softcap(y * scale), without the padding
  kToSums,      // the sums of chunks as they are to out, for the next kernel (sums.cuh); by wgmma only
  kPlace        // heads of q, k and v to where attention reads them (place.cuh); by wgmma only
};

struct Epilogue {
  int32_t kind, act, gated;
  int32_t stride;       // floats between rows of out and addend
  int32_t n_valid;      // logits: outputs that exist
  float scale, cap;     // logits
  float *out;
  const float *addend;  // may be out
  Operand operand;
};

TL_DEVICE void store_operand(const Operand &o, int row, int column, float v) {
  const int at = operand_index(o, row, column);
  if (o.dtype == TL_F32)
    ((float *)o.data)[at] = v;
  else
    ((uint16_t *)o.data)[at] = (uint16_t)pack_pair(o.dtype, v, 0.0f);
}

TL_DEVICE void store_operand_pair(const Operand &o, int row, int column, float lo, float hi) {  // column even
  const int at = operand_index(o, row, column);
  if (o.dtype == TL_F32) {
    ((float *)o.data)[at] = lo;
    ((float *)o.data)[at + 1] = hi;
  } else {
    *(uint32_t *)((uint16_t *)o.data + at) = pack_pair(o.dtype, lo, hi);
  }
}

// Four neighbouring values.
TL_DEVICE void store_operand_quad(const Operand &o, int row, int column, float4 v) {  // column a multiple of four
  if (o.dtype != TL_F32 && o.layout == kOperandTiles) {
    *(uint2 *)((uint16_t *)o.data + operand_index(o, row, column)) = make_uint2(pack_pair(o.dtype, v.x, v.y), pack_pair(o.dtype, v.z, v.w));
    return;
  }
  store_operand_pair(o, row, column, v.x, v.y);
  store_operand_pair(o, row, column + 2, v.z, v.w);
}

// One output (bias already in it) of one row.
TL_DEVICE void finish_output(const Epilogue &e, int row, int output, float y) {
  const int64_t at = (int64_t)row * e.stride + output;
  switch (e.kind) {
    case kToRows: e.out[at] = y; break;
    case kAddToRows: e.out[at] = e.addend[at] + y; break;
    case kActivate: store_operand(e.operand, row, output, activate(e.act, y)); break;
    default:
      if (output < e.n_valid) e.out[at] = scale_softcap(y, e.scale, e.cap);
  }
}

// A gate and an up output, sixteen packed rows apart, of one row; `output` is the gate's packed row.
TL_DEVICE void finish_gated(const Epilogue &e, int row, int output, float gate, float up) {
  store_operand(e.operand, row, output / 32 * 16 + output % 16, activate(e.act, gate) * up);
}

}  // namespace tl
