// What sampling needs of a whole row of logits, and the table of this code path.
#include "matmul.h"
#include "philox.h"
#include "rows.h"

namespace tl {
namespace TL_ISA_NS {

int argmax(int n, const float *x) {
  vf top = set1(-__builtin_inff());
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) top = max(top, load(x + i));
  float m = hmax(top);
  for (; i < n; i++) m = x[i] > m ? x[i] : m;
  for (i = 0; i < n; i++)
    if (x[i] >= m) return i;
  return 0;  // all NaN
}

void block_maxima(int n, const float *x, float *out) {
  for (int b = 0; b * 64 < n; b++) {
    const int end = n - b * 64 < 64 ? n - b * 64 : 64;
    float m = -__builtin_inff();
    if (end == 64)
      m = hmax(max(max(load(x + b * 64), load(x + b * 64 + 16)), max(load(x + b * 64 + 32), load(x + b * 64 + 48))));
    else
      for (int i = 0; i < end; i++) m = x[b * 64 + i] > m ? x[b * 64 + i] : m;
    out[b] = m;
  }
}

int collect_ge(int n, const float *x, float bound, int32_t *index) {
  const vf b = set1(bound);
  int count = 0, i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (uint32_t m = mask_ge(load(x + i), b); m; m &= m - 1) index[count++] = i + __builtin_ctz(m);
  for (; i < n; i++)
    if (x[i] >= bound) index[count++] = i;
  return count;
}

void exp_scaled(int n, const float *x, float top, float scale, float *y) {
  for (int i = 0; i < n; i += kLanes) store_part(y + i, exp(mul(sub(load_part(x + i, n - i), set1(top)), set1(scale))), n - i);
}

float sum(int n, const float *x) {
  vf s[4] = {zero(), zero(), zero(), zero()};
  for (int i = 0, j = 0; i < n; i += kLanes, j = (j + 1) & 3) s[j] = add(s[j], load_part(x + i, n - i));
  return hsum(add(add(s[0], s[1]), add(s[2], s[3])));
}

void gumbel_row(int n, uint64_t seed, int position, int first_token, float *out) {
  for (int t = 0; t < n; t += 64) {
    float u[64];
    for (int c = 0; c < 16; c++) {
      uint32_t word[4];
      philox4x32((uint32_t)(first_token + t) / 4u + (uint32_t)c, (uint32_t)position, kPhiloxGumbel, 0, seed, word);
      for (int j = 0; j < 4; j++) u[4 * c + j] = unit_interval(word[j]);
    }
    for (int i = 0; i < 64; i++) u[i] = -tl_log(-tl_log(u[i]));
    for (int i = 0; i < 64 && t + i < n; i++) out[t + i] = u[i];
  }
}

extern const Kernels kKernels;
// clang-format off
const Kernels kKernels = {
    TL_ISA,
    TL_ISA == 3 ? "avx512" : TL_ISA == 2 ? "avx2" : "generic",
    matrix_nbytes, pack_rows, gather_row, block_rows, block_nbytes, write_block_row, store_operand, load_operand, matmul,
    rms_norm, add_rows, activation, activate_panels, rope, scale_softcap, noise,
    store_k, store_v, prepare_q, rotate, attend_chunk, merge_state, finish_state,
    argmax, block_maxima, collect_ge, exp_scaled, sum, gumbel_row,
    read, enter_float_mode, leave_float_mode,
};
// clang-format on

}  // namespace TL_ISA_NS
}  // namespace tl
