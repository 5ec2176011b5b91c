// Rows of operands between a product's layout and plain rows in pages, value by value and never changed: one CTA a row.
#include "operands.cuh"

namespace tl {
namespace {

template <class T>
TL_DEVICE void move_row(const OperandRowsArgs &a, int row, T *kept) {
  T *operand = (T *)a.operand.data;
  for (int i = threadIdx.x; i < a.operand.n_in; i += kThreads) {
    T &value = operand[operand_index(a.operand, row, i)];
    if (a.loads)
      value = i < a.n_in ? kept[i] : T(0);
    else if (i < a.n_in)
      kept[i] = value;
  }
}

__global__ void __launch_bounds__(kThreads) move_operand_rows(const OperandRowsArgs a) {
  const int row = blockIdx.x, pos = a.rows.pos[row], page = pos < 0 ? -1 : page_of(a.rows, a.rows.seq[row], pos);
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (page < 0) return;
  uint8_t *kept = a.base + page * a.page_nbytes + a.layer_offset;
  const int at = pos % TL_PAGE_POSITIONS * a.n_in;
  if (a.operand.dtype == TL_F32)
    move_row(a, row, (uint32_t *)kept + at);
  else
    move_row(a, row, (uint16_t *)kept + at);
}

__global__ void __launch_bounds__(kThreads) copy_operand_page(const OperandPageArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  for (uint64_t i = threadIdx.x * 16; i < a.n_bytes; i += kThreads * 16)
    *(uint4 *)(a.to + i) = i < a.n_used ? *(const uint4 *)(a.from + i) : make_uint4(0, 0, 0, 0);
}

}  // namespace

void launch_operand_rows(const Launcher &launcher, const OperandRowsArgs &args) {
  launcher.launch(move_operand_rows, Shape{dim3(args.rows.n_rows), kThreads, 0, 1}, args);
}

void launch_operand_page(const Launcher &launcher, const OperandPageArgs &args) {
  launcher.launch(copy_operand_page, Shape{dim3(1), kThreads, 0, 1}, args);
}

}  // namespace tl
