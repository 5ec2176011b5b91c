// Sizes and scratch layout of a plan.
#include "plan.h"

#include <string.h>

#include <algorithm>
#include <utility>

#include "sampling.h"

namespace tl {

uint64_t page_nbytes(const tl_plan_desc &d, int part) { return (uint64_t)d.n_layers[part] * d.n_kv_heads * kv_layout(d.kv_dtype, d.head_dim).nbytes; }

namespace {
uint64_t align64(uint64_t n) { return (n + 63) / 64 * 64; }
}  // namespace

uint64_t operand_nbytes(const tl_plan_desc &d, int part, std::vector<uint64_t> *offsets) {
  uint64_t at = 0;
  for (int i = 0; i < d.n_phases; i++) {
    const tl_phase &p = d.phases[i];
    if (p.kind != TL_PHASE_QKV || p.part != part) continue;
    if (offsets) (*offsets)[i] = at;
    at += TL_PAGE_POSITIONS * operand_row_nbytes(p.weight.dtype, p.weight.n_in);
  }
  return at;
}

uint64_t operand_page_nbytes(const tl_plan_desc &d, int part) { return align64(operand_nbytes(d, part)); }

namespace {

// Operand bytes of n rows: full blocks, and the remainder as a block of its own.
uint64_t operand_nbytes(const Kernels &k, const tl_matrix &w, int n_rows) {
  const int per_block = k.block_rows(w.dtype), n_blocks = (n_rows + per_block - 1) / per_block;
  return n_blocks * k.block_nbytes(w.dtype, w.n_in, std::min(per_block, n_rows));
}

struct Widest {
  uint64_t operand = 0, thread_operand = 0;
  int n_in = 0;
};

Widest widest_matrices(const tl_plan &p) {
  Widest w;
  const int max_rows = std::max(p.desc.max_rows, p.desc.max_out);
  for (const tl_phase &phase : p.phases) {
    if (!phase.weight.data || phase.kind == TL_PHASE_EMBED) continue;
    w.operand = std::max(w.operand, operand_nbytes(p.k, phase.weight, max_rows));
    w.thread_operand = std::max(w.thread_operand, p.k.block_nbytes(phase.weight.dtype, phase.weight.n_in, kPrivateRows));
    w.n_in = std::max(w.n_in, (int)phase.weight.n_in);
  }
  return w;
}

void lay_out_thread(tl_plan &p, const Widest &w) {
  Scratch &s = p.scratch;
  const int head_panels = p.head_pad / kPanelRows;
  const int tile = std::max(kUnitRows * std::max(kUnitPanels, head_panels), kPrivateRows * std::max(kPrivatePanels, head_panels));
  uint64_t at = 0;
  const auto take = [&at](uint64_t nbytes) { return std::exchange(at, at + align64(nbytes)); };
  s.t_x = take((uint64_t)kPrivateRows * p.dim_pad * 4);
  s.t_e = take((uint64_t)kPrivateRows * p.dim_pad * 4);
  s.t_operand = take(w.thread_operand);
  s.t_tile = take((uint64_t)tile * kPanelRows * 4);
  s.t_row = take(2 * (uint64_t)pad16(std::max({w.n_in, p.dim_pad, p.q_dim})) * 4);
  s.t_states = take(3 * (uint64_t)std::max(kBlockQueries, p.group) * (kStateHead + p.head_pad) * 4);
  s.t_sample = take(sampling_work_floats(p.desc.vocab_size) * 4);
  s.thread_nbytes = at;
}

void lay_out(tl_plan &p) {
  Scratch &s = p.scratch;
  const tl_plan_desc &d = p.desc;
  const Widest w = widest_matrices(p);
  const uint64_t rows = std::max(d.max_rows, d.max_out);
  lay_out_thread(p, w);
  uint64_t at = 0;
  const auto take = [&at](uint64_t nbytes) { return std::exchange(at, at + align64(nbytes)); };
  s.x = take(rows * p.dim_pad * 4);
  s.e = take(rows * p.dim_pad * 4);
  s.y = take(rows * p.dim_pad * 4);
  s.z = take((uint64_t)kPrivateRows * p.dim_pad * 4);
  s.q = take(rows * d.n_heads * p.head_pad * 4);
  s.qkv = take(d.qk_norm == TL_QK_NORM_FULL ? rows * (d.n_heads + 2 * d.n_kv_heads) * p.head_pad * 4 : 0);
  s.attn = take(rows * pad16(p.q_dim) * 4);
  s.hidden = take(rows * p.ffn_pad * 4);
  s.operand = take(w.operand);
  s.logits = take((uint64_t)d.max_out * d.vocab_size * 4);
  s.partials = take((uint64_t)kSplitRows * d.n_heads * p.max_chunks() * (kStateHead + p.head_pad) * 4);
  s.thread = at;
  s.nbytes = at + p.context.pool.size() * s.thread_nbytes;
}

}  // namespace
}  // namespace tl

tl_plan::tl_plan(tl_context &c, const tl_plan_desc &d) : context(c), k(c.kernels), desc(d), phases(d.phases, d.phases + d.n_phases) {
  operand_offset.resize(d.n_phases);
  for (int part = 0; part < 3; part++) {
    operand_nbytes[part] = tl::operand_nbytes(d, part, &operand_offset);
    operand_page_nbytes[part] = tl::operand_page_nbytes(d, part);
  }
  desc.phases = nullptr;
  dim_pad = tl::pad16(d.dim);
  head_pad = tl::pad16(d.head_dim);
  ffn_pad = tl::pad16(d.ffn_dim);
  q_dim = d.n_heads * d.head_dim;
  group = d.n_heads / d.n_kv_heads;
  kv = tl::kv_layout(d.kv_dtype, d.head_dim);
  rotation = rotation_block(d.kv_dtype, d.head_dim);
  for (int part = 0; part < 3; part++) page_nbytes[part] = tl::page_nbytes(d, part);
  uint64_t weight_nbytes = 0;
  for (const tl_phase &p : phases)
    if (p.weight.data && p.kind != TL_PHASE_EMBED) weight_nbytes += k.matrix_nbytes(&p.weight);
  from_memory = weight_nbytes > tl::kCacheNbytes;
  tl::lay_out(*this);
}
