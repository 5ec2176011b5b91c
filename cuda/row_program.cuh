// Operations on whole rows of the residual stream, as a short program that one CTA runs for one row: embedding, initial
// state, additions and RMSNorms in any order, then the rounding to the operand of the next matrix product. The same code
// runs in a kernel of its own (rows.cu) and at the head of the one-row product (gemv.cu), in float32 registers: a thread
// owns the values 4 f .. 4 f + 3 for f = thread, thread + kThreads, ...
#pragma once

#include "math.cuh"
#include "philox.h"
#include "sums.cuh"

namespace tl {

enum RowOpKind { kRowLoad, kRowAdd, kRowNorm, kRowStore, kRowSums, kRowEmbed, kRowZero, kRowNoise };

struct RowOp {
  int32_t kind;
  int32_t stride;  // floats between rows: load, add, store
  const float *p;  // load, add: rows; store: where to; norm: (dim,) weights
  float factor;    // embed: scale; noise: standard deviation
  uint64_t seed;   // noise
};

constexpr int kMaxRowOps = 12;
constexpr int kGemvQuads = 4, kMaxQuads = 8;  // most quads of a thread: at the head of a product, in a kernel of its own

struct RowProgram {
  int32_t n_ops, dim;
  float eps;
  RowOp op[kMaxRowOps];
  const int32_t *source_row;  // load and add read row source_row[i] for row i; NULL: row i
  const int32_t *token;       // embed
  const int32_t *pos;         // noise
  Matrix embedding;
  ChunkSums sums;             // sums: a product's outputs, to be added up; only as the first operation
  const float *tail;          // appended to the operand: (rows, dim), stride tail_stride; or NULL
  int32_t tail_stride;
};

inline bool has_sums(const RowProgram &p) { return p.n_ops && p.op[0].kind == kRowSums; }

// Whether its rows are whole quads, and come from rows or sums: what may run at the head of a product, but for sums.
inline bool is_plain(const RowProgram &p) {
  for (int o = 0; o < p.n_ops; o++)
    if (p.op[o].kind > kRowSums || p.op[o].stride % 4 || (uint64_t)p.op[o].p % 16) return false;
  if (p.tail && (p.tail_stride % 4 || (uint64_t)p.tail % 16)) return false;
  return p.dim % 4 == 0 && p.dim <= 4 * kThreads * kGemvQuads;
}
inline bool fits_gemv(const RowProgram &p) { return is_plain(p) && !has_sums(p); }

TL_DEVICE int quad_index(int j) { return 4 * ((int)threadIdx.x + kThreads * j); }

// Four values from i on, zeros from n on. kAligned: n and p are multiples of four.
template <bool kAligned>
TL_DEVICE float4 load_quad(const float *p, int i, int n) {
  if constexpr (!kAligned) {
    if (i + 3 >= n || (uint64_t)(p + i) % 16) {
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) v[j] = i + j < n ? p[i + j] : 0.0f;
      return make_float4(v[0], v[1], v[2], v[3]);
    }
  }
  return *(const float4 *)(p + i);
}

template <bool kAligned>
TL_DEVICE void store_quad(float *p, int i, int n, float4 v) {
  if (kAligned || (i + 3 < n && (uint64_t)(p + i) % 16 == 0)) {
    *(float4 *)(p + i) = v;
    return;
  }
  const float a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (i + j < n) p[i + j] = a[j];
}

template <int kQuads, bool kAligned>
TL_DEVICE void load_quads(float4 (&q)[kQuads], const float *p, int n) {
#pragma unroll
  for (int j = 0; j < kQuads; j++) q[j] = quad_index(j) < n ? load_quad<kAligned>(p, quad_index(j), n) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

TL_DEVICE float embedding_value(const Matrix &m, int row, int column) {
  const uint8_t *at = m.data + element_offset(m.dtype, m.n_in, row, column);
  if (m.dtype == TL_F32) return *(const float *)at;
  if (m.dtype != TL_INT8) return unpack_one(m.dtype, *(const uint16_t *)at);
  const float scale = m.scales[scale_offset(m, row, m.group_size ? column / m.group_size : 0)];
  return (float)(*at - kInt8Offset) * (1.0f / kInt8Parts) * scale;
}

TL_DEVICE float4 embedding_quad(const Matrix &m, int row, int i, float factor) {
  float v[4];
#pragma unroll
  for (int j = 0; j < 4; j++) v[j] = i + j < m.n_in ? embedding_value(m, row, i + j) * factor : 0.0f;
  return make_float4(v[0], v[1], v[2], v[3]);
}

TL_DEVICE float4 noise_quad(uint64_t seed, int pos, int i, int n, float std) {
  uint32_t word[4];
  float v[4];
  philox4x32((uint32_t)(i / 4), (uint32_t)pos, kPhiloxState, 0, seed, word);
#pragma unroll 1
  for (int j = 0; j < 4; j++) v[j] = i + j < n ? std * truncated_normal(unit_interval(word[j])) : 0.0f;
  return make_float4(v[0], v[1], v[2], v[3]);
}

// What a program needs of weights that never change: its last norm's, loaded before the kernel may read what others wrote.
template <int kQuads, bool kAligned>
struct EarlyNorm {
  const float *of = nullptr;
  float4 q[kQuads];
  TL_DEVICE_MEMBER void load(const RowProgram &p) {
    if (!p.n_ops || p.op[p.n_ops - 1].kind != kRowNorm) return;
    of = p.op[p.n_ops - 1].p;
    load_quads<kQuads, kAligned>(q, of, p.dim);
  }
};

// v = weight * v / rms(v), the weight's quads being weight(j); `partial`: kWarps shared floats that no other norm in flight uses; `meet`: a
// barrier of the threads.
template <int kQuads, class Weight, class Meet>
TL_DEVICE void norm_quads(float4 (&v)[kQuads], const Weight &weight, int n, float eps, float *partial, const Meet &meet) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kQuads; j++)
    if (quad_index(j) < n) sum = fmaf(v[j].w, v[j].w, fmaf(v[j].z, v[j].z, fmaf(v[j].y, v[j].y, fmaf(v[j].x, v[j].x, sum))));
  const float inverse = inverse_rms(block_sum(sum, partial, meet), n, eps);
#pragma unroll
  for (int j = 0; j < kQuads; j++) {
    if (quad_index(j) >= n) break;
    const float4 w = weight(j);
    v[j] = make_float4(v[j].x * inverse * w.x, v[j].y * inverse * w.y, v[j].z * inverse * w.z, v[j].w * inverse * w.w);
  }
}

// What a program that begins with sums begins with: these, added up, with the row that is added next, where one is.
struct NoSums {
  template <int kQuads>
  TL_DEVICE_MEMBER int begin(float4 (&)[kQuads]) const {
    return 0;
  }
};
template <int kQuads, bool kAligned>
struct SummedRow {
  const float *sums;  // shared
  int n;
  bool adds;
  TL_DEVICE_MEMBER int begin(float4 (&v)[kQuads]) const {  // how many operations more that is
    load_quads<kQuads, kAligned>(v, sums, n);
    return adds;
  }
};

// Runs the program for one row, leaving each thread's values in `v` (padding zero); stores only where `storing`. kPlain:
// is_plain(p). `partial`: 2 * kWarps shared floats.
template <int kQuads, bool kPlain, class Sums = NoSums>
TL_DEVICE void run_row_program(const RowProgram &p, int row, bool storing, float4 (&v)[kQuads], float *partial,
                               const EarlyNorm<kQuads, kPlain> &early, const Sums &sums = {}) {
  const int n = p.dim, from = p.source_row ? p.source_row[row] : row;
  int n_norms = 0;
#pragma unroll 1
  for (int o = 0; o < p.n_ops; o++) {
    const RowOp &op = p.op[o];
    if (op.kind == kRowLoad) {
      load_quads<kQuads, kPlain>(v, op.p + (int64_t)from * op.stride, n);
    } else if (op.kind == kRowAdd) {
      float4 b[kQuads];
      load_quads<kQuads, kPlain>(b, op.p + (int64_t)from * op.stride, n);
#pragma unroll
      for (int j = 0; j < kQuads; j++) v[j] = make_float4(v[j].x + b[j].x, v[j].y + b[j].y, v[j].z + b[j].z, v[j].w + b[j].w);
    } else if (op.kind == kRowNorm) {
      float4 w[kQuads];
      const bool known = op.p == early.of;
      if (!known) load_quads<kQuads, kPlain>(w, op.p, n);
#pragma unroll
      for (int j = 0; j < kQuads; j++)
        if (known) w[j] = early.q[j];
      norm_quads<kQuads>(v, [&](int j) { return w[j]; }, n, p.eps, partial + n_norms++ % 2 * kWarps, [] { __syncthreads(); });
    } else if (op.kind == kRowStore) {
      float *to = const_cast<float *>(op.p) + (int64_t)row * op.stride;
#pragma unroll
      for (int j = 0; j < kQuads; j++)
        if (storing && quad_index(j) < n) store_quad<kPlain>(to, quad_index(j), n, v[j]);
    } else if (op.kind == kRowSums) {
      o += sums.begin(v);
    } else if (!kPlain) {
#pragma unroll 1
      for (int i = quad_index(0); i < n; i += 4 * kThreads) {
        float4 q = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (op.kind == kRowEmbed) q = embedding_quad(p.embedding, p.token[row], i, op.factor);
        if (op.kind == kRowNoise) q = noise_quad(op.seed, p.pos[row], i, n, op.factor);
#pragma unroll
        for (int j = 0; j < kQuads; j++)
          if (quad_index(j) == i) v[j] = q;
      }
    }
  }
}

// Rounds each thread's own values, and the tail, to the operand: put(column, lo, hi, count) for pairs at even columns,
// or single values (count 1) at any; the padding to sixteen columns is zero.
template <int kQuads, bool kPlain, class Put>
TL_DEVICE void emit_operand(const RowProgram &p, int row, const float4 (&v)[kQuads], Put put) {
  const int n = p.dim, n_in = p.tail ? 2 * n : n;
  const auto put_quad = [&](int column, int i, float4 q) {
    if (n % 4 == 0) {
      put(column, q.x, q.y, 2);
      put(column + 2, q.z, q.w, 2);
      return;
    }
    const float a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (i + k < n) put(column + k, a[k], 0.0f, 1);
  };
#pragma unroll
  for (int j = 0; j < kQuads; j++)
    if (quad_index(j) < n) put_quad(quad_index(j), quad_index(j), v[j]);
  if (p.tail) {
    float4 t[kQuads];
    load_quads<kQuads, kPlain>(t, p.tail + (int64_t)row * p.tail_stride, n);
#pragma unroll
    for (int j = 0; j < kQuads; j++)
      if (quad_index(j) < n) put_quad(n + quad_index(j), quad_index(j), t[j]);
  }
  if ((int)threadIdx.x < pad16(n_in) - n_in) put(n_in + threadIdx.x, 0.0f, 0.0f, 1);
}

}  // namespace tl
