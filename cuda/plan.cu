// Sizes and scratch layout of a plan.
#include "plan.h"

#include <algorithm>
#include <utility>

#include "attend.cuh"
#include "gemm.cuh"
#include "sample.cuh"
#include "step.cuh"

namespace tl {
namespace {

// Bytes of the right operand of a product with these weights, in any layout.
uint64_t operand_nbytes(const tl_matrix &weight, uint64_t rows) {
  return rows * round_up(weight.n_in, 64) * (operand_dtype(weight.dtype) == TL_F32 ? 4 : 2);
}

void lay_out(tl_plan &p) {
  const tl_plan_desc &d = p.desc;
  Scratch &s = p.scratch;
  const uint64_t rows = round_up(std::max(d.max_rows, d.max_out), kRowTile), heads = d.n_heads + 2 * d.n_kv_heads;
  uint64_t operand = 0, attn = 0, hidden = 0, sums = 0, at = 0;
  for (const tl_phase &phase : p.phases) {
    if (!phase.weight.data || phase.kind == TL_PHASE_EMBED) continue;
    uint64_t &widest = phase.kind == TL_PHASE_OUT ? attn : phase.kind == TL_PHASE_DOWN ? hidden : operand;
    widest = std::max(widest, operand_nbytes(phase.weight, rows));
    if (leaves_sums(p, phase, 1))
      sums = std::max(sums, n_chunks_of(phase.weight.n_in) * std::min<uint64_t>(rows, kMaxSumRows) * phase.weight.n_out * 4);
  }
  const auto take = [&at](uint64_t nbytes) { return std::exchange(at, at + (nbytes + 255) / 256 * 256); };
  for (uint64_t &x : s.x) x = take(rows * p.dim_pad * 4);
  s.e = take(rows * p.dim_pad * 4);
  s.y = take(rows * p.dim_pad * 4);
  s.qkv = take(rows * heads * p.head_pad * 4);
  s.q = take(rows * d.n_heads * query_nbytes(d.kv_dtype, p.head_pad));
  s.operand = take(operand);
  s.attn = take(attn);
  s.hidden = take(hidden);
  s.logits = take((uint64_t)d.max_out * d.vocab_size * 4);
  s.sample_work = take((uint64_t)d.max_out * sample_work_floats(d.vocab_size) * 4);
  s.n_clamped = take(8);
  s.sums = take(sums);
  s.states = take(attend_states_nbytes(p.context, d));
  s.step = take(step_nbytes(p));
  s.nbytes = at;
}

}  // namespace

bool leaves_sums(const tl_plan &p, const tl_phase &phase, int n_rows) {
  if (phase.kind == TL_PHASE_QKV && p.desc.qk_norm == TL_QK_NORM_FULL) return false;
  return (phase.kind == TL_PHASE_QKV || phase.kind == TL_PHASE_OUT || phase.kind == TL_PHASE_DOWN) &&
         gemm_leaves_sums(p.context, matrix_of(phase.weight), n_rows);
}

}  // namespace tl

tl_plan::tl_plan(tl_context &c, const tl_plan_desc &d) : context(c), desc(d), phases(d.phases, d.phases + d.n_phases) {
  desc.phases = nullptr;
  dim_pad = tl::pad16(d.dim);
  head_pad = tl::pad16(d.head_dim);
  q_dim = d.n_heads * d.head_dim;
  tl::lay_out(*this);
}
