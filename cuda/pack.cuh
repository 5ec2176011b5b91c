// Packing of weights, and two small kernels that only tests and benchmarks call. See pack.cu.
#pragma once

#include "launch.h"
#include "layout.cuh"

namespace tl {

struct PackArgs {
  Matrix to;
  tl_pack_rows rows;
};

struct ActivationArgs {
  int32_t act;
  int64_t n;
  const float *gate, *up;  // gate may be NULL
  float *y;
};

struct ReadArgs {
  const uint4 *data;
  int64_t n;  // of 16 bytes each
  int32_t n_repeats;
  uint32_t *sink;
};

void launch_pack(const Launcher &launcher, const PackArgs &args);
void launch_activation(const Launcher &launcher, const ActivationArgs &args);
void launch_read(const Launcher &launcher, const ReadArgs &args);

}  // namespace tl
