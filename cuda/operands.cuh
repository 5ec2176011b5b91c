// Operands of the QKV products beyond their batch: pages of 16 rows a layer, and canonical copies of pages. See operands.cu.
#pragma once

#include "launch.h"
#include "layout.cuh"
#include "place.cuh"

namespace tl {

struct OperandRowsArgs {
  Rows rows;         // page_table: of operand pages
  uint8_t *base;     // of the part's pages
  uint64_t page_nbytes, layer_offset;
  int32_t n_in;      // values of a row
  Operand operand;
  int32_t loads;     // from the pages; else to them
};

struct OperandPageArgs {
  const uint8_t *from;
  uint8_t *to;
  uint64_t n_used, n_bytes;  // multiples of 16; what follows those in use becomes zeros
};

void launch_operand_rows(const Launcher &launcher, const OperandRowsArgs &args);
void launch_operand_page(const Launcher &launcher, const OperandPageArgs &args);

}  // namespace tl
