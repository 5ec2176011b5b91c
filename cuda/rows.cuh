// Row programs as a kernel, and copies of chosen rows. See rows.cu.
#pragma once

#include "launch.h"
#include "row_program.cuh"

namespace tl {

struct RowsArgs {
  RowProgram program;
  Operand operand;  // data == NULL: none is asked for
  int32_t n_rows;   // set where they run together
};

struct CopyArgs {
  int32_t dim, stride;
  const float *from;          // rows `stride` apart
  const int32_t *source_row;  // (n,)
  float *to;                  // (n, dim)
};

void launch_rows(const Launcher &launcher, int n_rows, const RowsArgs &args);
void launch_copy_rows(const Launcher &launcher, int n, const CopyArgs &args);

}  // namespace tl
