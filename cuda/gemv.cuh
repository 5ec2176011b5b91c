// y = W a for one to eight batch rows, where the weights' bytes are the cost. See gemv.cu.
#pragma once

#include "epilogue.cuh"
#include "launch.h"
#include "row_program.cuh"

namespace tl {

constexpr int kGemvRows = 8;

struct GemvArgs {
  Matrix weight;
  const float *bias;    // (n_out,) or NULL
  int32_t n_rows;
  int32_t unit_panels;  // panels that stay together: 2 where gated
  Operand source;       // rows laid out by an earlier kernel, where the program is empty
  RowProgram program;   // one row: computed here, by every CTA
  Epilogue epilogue;
};

// The panels of one CTA: of units in order, those of the first units_more CTAs one more each.
struct CtaShare {
  int first_panel, n_panels;
};
TL_DEVICE CtaShare share_of(int cta, int units_each, int units_more, int unit_panels) {
  return {(cta * units_each + min(cta, units_more)) * unit_panels, (units_each + (cta < units_more)) * unit_panels};
}

// Bytes of shared memory that a product needs.
int gemv_shared_nbytes(const tl_context &context, const GemvArgs &args);
void launch_gemv(const Launcher &launcher, const GemvArgs &args);

}  // namespace tl
