// Sums of K-chunks that a product leaves in memory (gemm_sums.cu), for the kernel after it to add up in index order.
#pragma once

#include "launch.h"
#include "layout.cuh"

namespace tl {

constexpr int kMaxSumRows = 128;  // of a product that leaves them

inline int n_chunks_of(int n_in) { return (n_in + TL_K_CHUNK - 1) / TL_K_CHUNK; }

struct ChunkSums {
  const float *data;  // (n_chunks, n_rows, n_out), or NULL
  int32_t n_chunks, n_rows, n_out;
  const float *scales, *bias;  // (n_out,) or NULL
};

TL_DEVICE void load_floats(float (&v)[2], const float *p) {
  const float2 q = *(const float2 *)p;
  v[0] = q.x, v[1] = q.y;
}
TL_DEVICE void load_floats(float (&v)[4], const float *p) {
  const float4 q = *(const float4 *)p;
  v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
}

// Outputs from `output` on of a row, scaled and with their bias. kReads chunks are read at a time.
template <int kReads, int n>
TL_DEVICE void add_chunks(float (&y)[n], const ChunkSums &s, int row, int output) {
  const int64_t step = (int64_t)s.n_rows * s.n_out;
  const float *from = s.data + (int64_t)row * s.n_out + output;
  float scale[n], bias[n];
#pragma unroll
  for (int i = 0; i < n; i++) y[i] = 0.0f, scale[i] = 1.0f, bias[i] = 0.0f;
  if (s.scales) load_floats(scale, s.scales + output);
  if (s.bias) load_floats(bias, s.bias + output);
#pragma unroll 1
  for (int first = 0; first < s.n_chunks; first += kReads) {
    float q[kReads][n];
#pragma unroll
    for (int c = 0; c < kReads; c++, from += step)
      if (first + c < s.n_chunks) load_floats(q[c], from);
#pragma unroll
    for (int c = 0; c < kReads; c++)
#pragma unroll
      for (int i = 0; i < n; i++)
        if (first + c < s.n_chunks) y[i] = y[i] + q[c][i];
  }
#pragma unroll
  for (int i = 0; i < n; i++) {
    if (s.scales) y[i] = y[i] * scale[i];
    if (s.bias) y[i] = y[i] + bias[i];
  }
}

}  // namespace tl
