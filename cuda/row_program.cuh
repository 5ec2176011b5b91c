// Operations on whole rows of the residual stream, as a short program that one CTA runs for one row: embedding, initial
// state, additions and RMSNorms in any order, then the rounding to the operand of the next matrix product. The same code
// runs in a kernel of its own (rows.cu) and at the head of the one-row product (gemv.cu), in float32.
#pragma once

#include "math.cuh"
#include "philox.h"

namespace tl {

enum RowOpKind { kRowLoad, kRowEmbed, kRowZero, kRowNoise, kRowAdd, kRowNorm, kRowStore };

struct RowOp {
  int32_t kind;
  int32_t stride;  // floats between rows: load, add, store
  const float *p;  // load, add: rows; store: where to; norm: (dim,) weights
  float factor;    // embed: scale; noise: standard deviation
  uint64_t seed;   // noise
};

constexpr int kMaxRowOps = 12;

struct RowProgram {
  int32_t n_ops, dim;
  float eps;
  RowOp op[kMaxRowOps];
  const int32_t *source_row;  // load and add read row source_row[i] for row i; NULL: row i
  const int32_t *token;       // embed
  const int32_t *pos;         // noise
  Matrix embedding;
  const float *tail;          // appended to the operand: (rows, dim), stride tail_stride; or NULL
  int32_t tail_stride;
};

// A thread owns the values 4 f .. 4 f + 3 for f = thread, thread + kThreads, ...
template <class Body>
TL_DEVICE void for_own_quads(int n, Body body) {
  for (int i = 4 * threadIdx.x; i < n; i += 4 * kThreads) body(i);
}

// Four values from i on, zeros from n on. Rows may be an earlier kernel's, so past L1.
TL_DEVICE float4 load_quad(const float *p, int i, int n) {
  if (i + 3 < n && (uint64_t)(p + i) % 16 == 0) return load_fresh((const float4 *)(p + i));
  float v[4];
#pragma unroll
  for (int j = 0; j < 4; j++) v[j] = i + j < n ? load_fresh(p + i + j) : 0.0f;
  return make_float4(v[0], v[1], v[2], v[3]);
}

TL_DEVICE void store_quad(float *p, int i, int n, float4 v) {
  if (i + 3 < n && (uint64_t)(p + i) % 16 == 0) {
    *(float4 *)(p + i) = v;
    return;
  }
  const float a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (i + j < n) p[i + j] = a[j];
}

TL_DEVICE float embedding_value(const Matrix &m, int row, int column) {
  const uint8_t *at = m.data + element_offset(m.dtype, m.n_in, row, column);
  if (m.dtype == TL_F32) return *(const float *)at;
  if (m.dtype != TL_INT8) return unpack_one(m.dtype, *(const uint16_t *)at);
  const float scale = m.scales[scale_offset(m, row, m.group_size ? column / m.group_size : 0)];
  return (float)*(const int8_t *)at * scale;
}

TL_DEVICE float4 embedding_quad(const Matrix &m, int row, int i, float factor) {
  float v[4];
#pragma unroll
  for (int j = 0; j < 4; j++) v[j] = i + j < m.n_in ? embedding_value(m, row, i + j) * factor : 0.0f;
  return make_float4(v[0], v[1], v[2], v[3]);
}

TL_DEVICE float4 noise_quad(uint64_t seed, int pos, int i, float std) {
  uint32_t word[4];
  philox4x32((uint32_t)(i / 4), (uint32_t)pos, kPhiloxState, 0, seed, word);
  return make_float4(std * truncated_normal(unit_interval(word[0])), std * truncated_normal(unit_interval(word[1])),
                     std * truncated_normal(unit_interval(word[2])), std * truncated_normal(unit_interval(word[3])));
}

// Own quads again, four at a time: load(i) of each comes first, then use(i, loaded), so that the loads run side by side.
template <class Load, class Use>
TL_DEVICE void for_loaded_quads(int n, Load load, Use use) {
  for (int first = 4 * threadIdx.x; first < n; first += 16 * kThreads) {
    float4 q[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (first + 4 * kThreads * j < n) q[j] = load(first + 4 * kThreads * j);
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (first + 4 * kThreads * j < n) use(first + 4 * kThreads * j, q[j]);
  }
}

// A thread's own weights of the program's last norm, loaded before the kernel may read what others wrote.
struct EarlyWeights {
  const float *of = nullptr;
  float4 q[4];

  TL_DEVICE_MEMBER void load(const RowProgram &p) {
    if (!p.n_ops || p.op[p.n_ops - 1].kind != kRowNorm || p.dim > 16 * kThreads) return;
    of = p.op[p.n_ops - 1].p;
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (4 * (int)threadIdx.x + 4 * kThreads * j < p.dim) q[j] = load_quad(of, 4 * threadIdx.x + 4 * kThreads * j, p.dim);
  }
};

// v = weight * v / rms(v) over n values in shared memory. `partial`: kWarps floats that no other norm in flight uses.
TL_DEVICE void norm_row(float *v, int n, float eps, const float *weight, float *partial, const EarlyWeights &early) {
  float sum = 0.0f;
  for_own_quads(n, [&](int i) {
    const float4 q = *(const float4 *)(v + i);  // beyond n: zeros
    sum = fmaf(q.w, q.w, fmaf(q.z, q.z, fmaf(q.y, q.y, fmaf(q.x, q.x, sum))));
  });
  const float inverse = inverse_rms(block_sum(sum, partial), n, eps);
  const auto scale = [&](int i, float4 w) {
    const float4 q = *(const float4 *)(v + i);
    *(float4 *)(v + i) = make_float4(q.x * inverse * w.x, q.y * inverse * w.y, q.z * inverse * w.z, q.w * inverse * w.w);
  };
  if (weight != early.of) return for_loaded_quads(n, [&](int i) { return load_quad(weight, i, n); }, scale);
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (4 * (int)threadIdx.x + 4 * kThreads * j < n) scale(4 * threadIdx.x + 4 * kThreads * j, early.q[j]);
}

// Floats of shared memory that a program needs: the row, and partial sums of two norms in turn.
TL_BOTH int row_program_floats(int dim) { return pad16(dim) + 2 * kWarps; }

// Runs the program for one row; each thread is left with its own values in `v` (padding zero). Stores only where `storing`.
TL_DEVICE void run_row_program(const RowProgram &p, int row, bool storing, float *v, const EarlyWeights &early) {
  const int n = p.dim, width = pad16(n);
  float *partial = v + width;
  int n_norms = 0;
  for (int o = 0; o < p.n_ops; o++) {
    const RowOp &op = p.op[o];
    const int64_t from = p.source_row && (op.kind == kRowLoad || op.kind == kRowAdd) ? load_fresh(p.source_row + row) : row;
    const float *rows = op.p + from * op.stride;
    switch (op.kind) {
      case kRowLoad:
        for_loaded_quads(
            width, [&](int i) { return load_quad(rows, i, n); }, [&](int i, float4 q) { *(float4 *)(v + i) = q; });
        break;
      case kRowEmbed: {
        const int token = load_fresh(p.token + row);
        for_own_quads(width, [&](int i) { *(float4 *)(v + i) = embedding_quad(p.embedding, token, i, op.factor); });
        break;
      }
      case kRowZero:
        for_own_quads(width, [&](int i) { *(float4 *)(v + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f); });
        break;
      case kRowNoise: {
        const int pos = load_fresh(p.pos + row);
        for_own_quads(width, [&](int i) {
          const float4 q = noise_quad(op.seed, pos, i, op.factor);
          *(float4 *)(v + i) = make_float4(i < n ? q.x : 0.0f, i + 1 < n ? q.y : 0.0f, i + 2 < n ? q.z : 0.0f, i + 3 < n ? q.w : 0.0f);
        });
        break;
      }
      case kRowAdd:
        for_loaded_quads(
            n, [&](int i) { return load_quad(rows, i, n); },
            [&](int i, float4 b) {
              const float4 a = *(const float4 *)(v + i);
              *(float4 *)(v + i) = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
            });
        break;
      case kRowNorm: norm_row(v, n, p.eps, op.p, partial + n_norms++ % 2 * kWarps, early); break;
      default:  // kRowStore
        if (storing) for_own_quads(n, [&](int i) { store_quad((float *)rows, i, n, *(const float4 *)(v + i)); });
    }
  }
}

// Rounds each thread's own values, and the tail, to the operand: put(column, pair of values) for even columns.
template <class Put>
TL_DEVICE void emit_operand(const RowProgram &p, int row, const float *v, Put put) {
  const int n = p.dim, n_in = p.tail ? 2 * n : n;
  if (!p.tail) {
    for_own_quads(pad16(n), [&](int i) {
      const float4 q = *(const float4 *)(v + i);
      put(i, q.x, q.y);
      put(i + 2, q.z, q.w);
    });
    return;
  }
  // The tail may begin inside a quad: pairs are put together from any thread's values.
  __syncthreads();
  const float *tail = p.tail + (int64_t)row * p.tail_stride;
  for (int k = 2 * threadIdx.x; k < pad16(n_in); k += 2 * kThreads) {
    float x[2];
#pragma unroll
    for (int j = 0; j < 2; j++) x[j] = k + j < n ? v[k + j] : k + j < n_in ? load_fresh(tail + k + j - n) : 0.0f;
    put(k, x[0], x[1]);
  }
}

}  // namespace tl
