// y = W a for any number of batch rows whose operand lies in tiles. See gemm.cu and gemm_wgmma.cu; float32 weights: gemm_f32.cu.
#pragma once

#include "epilogue.cuh"
#include "launch.h"
#include "place.cuh"
#include "sums.cuh"

namespace tl {

struct GemmArgs {
  Matrix weight;
  const float *bias;  // (n_out,) or NULL
  int32_t n_rows;
  Operand source;     // tiles; plain float32 rows for float32 weights
  Epilogue epilogue;
  PlaceArgs place;    // kPlace
};

// Whether a product's epilogue may be kPlace: its tiles are whole heads, no norm goes over several, and K and V are values.
bool gemm_places(const tl_context &context, const Matrix &weight, const PlaceArgs &place);

bool gemm_takes_wgmma(const tl_context &context, const Matrix &weight);
void launch_gemm(const Launcher &launcher, const GemmArgs &args);
void launch_gemm_wgmma(const Launcher &launcher, const GemmArgs &args);  // no groups of int8 columns
void launch_gemm_tiles(const Launcher &launcher, const GemmArgs &args);  // the same, for many rows
bool gemm_takes_tiles(const tl_context &context, const GemmArgs &args);
// The same for some rows, whose chunks' sums go to memory, (n_chunks, n_rows, n_out): whether it may be, and what the next kernel adds up.
bool gemm_leaves_sums(const tl_context &context, const Matrix &weight, int n_rows);
ChunkSums launch_gemm_sums(const Launcher &launcher, const Matrix &weight, const float *bias, int n_rows, const Operand &source, float *sums);
void launch_gemm_gated(const Launcher &launcher, const GemmArgs &args);  // gates and ups of some rows
bool gemm_takes_gates(const GemmArgs &args);
void launch_gemm_f32(const Launcher &launcher, const GemmArgs &args);

}  // namespace tl
