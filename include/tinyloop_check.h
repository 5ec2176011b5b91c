/* Validation that both native libraries share: each function returns NULL, or what is wrong. C++ only. */
#pragma once

#include "tinyloop.h"

namespace tl {

inline const char *check_matrix(const tl_matrix &m, bool packed) {
  if (m.size != sizeof(tl_matrix)) return "tl_matrix.size does not match this library";
  if (m.dtype < TL_F32 || m.dtype > TL_INT8) return "tl_matrix.dtype is unknown";
  if (m.n_out <= 0 || m.n_out % 16) return "tl_matrix.n_out is not a positive multiple of 16";
  if (m.n_in <= 0) return "tl_matrix.n_in is not positive";
  if (m.group_size < 0 || m.group_size % TL_INT8_GROUP) return "tl_matrix.group_size is not a multiple of TL_INT8_GROUP";
  if (m.group_size && m.dtype != TL_INT8) return "tl_matrix.group_size is set for a float matrix";
  if (packed && (!m.data || (uint64_t)m.data % 64)) return "tl_matrix.data is not 64-byte aligned memory";
  return nullptr;
}

inline const char *check_pack(const tl_matrix &m, const tl_pack_rows &r) {
  if (const char *error = check_matrix(m, true)) return error;
  if (r.size != sizeof(tl_pack_rows)) return "tl_pack_rows.size does not match this library";
  if (r.n_rows <= 0 || r.block <= 0 || r.stride < r.block || r.offset < 0) return "tl_pack_rows does not map its rows";
  const int64_t last = r.n_rows - 1;
  if (last / r.block * r.stride + r.offset + last % r.block >= m.n_out) return "tl_pack_rows reaches past tl_matrix.n_out";
  if (!r.src || (m.dtype == TL_INT8 && !r.scales)) return "tl_pack_rows lacks its source or its scales";
  return nullptr;
}

inline const char *check_sizes(const tl_plan_desc &d) {
  if (d.size != sizeof(tl_plan_desc)) return "tl_plan_desc.size does not match this library";
  if (d.vocab_size <= 0 || d.dim <= 0 || d.ffn_dim <= 0 || d.n_heads <= 0 || d.n_kv_heads <= 0) return "tl_plan_desc has a size that is not positive";
  if (d.n_heads % d.n_kv_heads) return "tl_plan_desc.n_kv_heads does not divide n_heads";
  if (d.head_dim <= 0 || d.head_dim % 2 || d.head_dim > 256) return "tl_plan_desc.head_dim is not an even number up to 256";
  if (d.rotary_dim < 0 || d.rotary_dim % 2 || d.rotary_dim > d.head_dim) return "tl_plan_desc.rotary_dim is not an even number up to head_dim";
  for (int part = 0; part < 3; part++)
    if (d.n_layers[part] < 0) return "tl_plan_desc.n_layers is negative";
  if (d.kv_dtype < TL_F32 || d.kv_dtype > TL_INT4) return "tl_plan_desc.kv_dtype is not a KV type";
  return nullptr;
}

struct MatrixShape {
  int64_t n_out, n_in;
};

/* What the matrix of a phase must measure, where the phase has one. */
inline MatrixShape shape_of(const tl_plan_desc &d, const tl_phase &p) {
  const auto padded = [](int64_t n) { return (n + 15) / 16 * 16; };
  switch (p.kind) {
    case TL_PHASE_EMBED:
    case TL_PHASE_HEAD: return {padded(d.vocab_size), d.dim};
    case TL_PHASE_INJECT: return {padded(d.dim), 2 * (int64_t)d.dim};
    case TL_PHASE_QKV: return {((int64_t)d.n_heads + 2 * (int64_t)d.n_kv_heads) * padded(d.head_dim), d.dim};
    case TL_PHASE_OUT: return {padded(d.dim), (int64_t)d.n_heads * d.head_dim};
    case TL_PHASE_GATE_UP: return {padded(d.ffn_dim) * (p.flags & TL_PHASE_GATED ? 2 : 1), d.dim};
    case TL_PHASE_DOWN: return {padded(d.dim), d.ffn_dim};
    default: return {0, 0};
  }
}

inline const char *check_phase(const tl_plan_desc &d, const tl_phase &p) {
  if (p.size != sizeof(tl_phase)) return "tl_phase.size does not match this library";
  if (p.kind < TL_PHASE_EMBED || p.kind > TL_PHASE_HEAD) return "tl_phase.kind is unknown";
  if (p.part < 0 || p.part > 2) return "tl_phase.part is unknown";
  const bool layered = p.kind >= TL_PHASE_QKV && p.kind <= TL_PHASE_DOWN;
  if (layered && (p.layer < 0 || p.layer >= d.n_layers[p.part])) return "tl_phase.layer is outside its part";
  const bool needs_weight = p.kind == TL_PHASE_EMBED || p.kind == TL_PHASE_HEAD || (layered && p.kind != TL_PHASE_ATTEND);
  if (needs_weight && !p.weight.data) return "tl_phase lacks its weight";
  if (p.weight.data) {
    if (const char *error = check_matrix(p.weight, true)) return error;
    const MatrixShape shape = shape_of(d, p);
    if (p.weight.n_out != shape.n_out || p.weight.n_in != shape.n_in) return "tl_phase.weight is not of the shape that its phase has";
  }
  if (p.kind == TL_PHASE_NORM && !p.norm) return "tl_phase of a norm lacks its weight";
  if ((p.kind == TL_PHASE_OUT || p.kind == TL_PHASE_DOWN) && p.block_norm != TL_NORM_PRE && !p.post_norm) return "tl_phase lacks its post_norm";
  if (p.kind == TL_PHASE_QKV && d.qk_norm != TL_QK_NORM_NONE && (!p.q_norm || !p.k_norm)) return "tl_phase lacks its q_norm or k_norm";
  return nullptr;
}

inline const char *check_plan(const tl_plan_desc &d) {
  if (const char *error = check_sizes(d)) return error;
  if (d.max_rows <= 0 || d.max_out <= 0 || d.max_pos <= 0) return "tl_plan_desc.max_rows, max_out or max_pos is not positive";
  if ((int64_t)d.table_stride * TL_PAGE_POSITIONS < d.max_pos) return "tl_plan_desc.table_stride does not cover max_pos";
  if (d.rotary_dim && (!d.rope_cos || !d.rope_sin)) return "tl_plan_desc lacks its rope tables";
  if (!d.phases || d.n_phases <= 0) return "tl_plan_desc has no phases";
  if (d.section[0] != 0 || d.section[4] != d.n_phases) return "tl_plan_desc.section does not span the phases";
  for (int i = 0; i < 4; i++)
    if (d.section[i] > d.section[i + 1]) return "tl_plan_desc.section is not ascending";
  for (int part = 0; part < 3; part++)
    if (d.n_layers[part] && !d.kv_base[part]) return "tl_plan_desc.kv_base is NULL for a part with layers";
  for (int part = 0; part < 3; part++)
    if (d.n_layers[part] && !d.operand_base[part] && (d.operand_base[0] || d.operand_base[1] || d.operand_base[2]))
      return "tl_plan_desc.operand_base is NULL for a part with layers";
  for (int i = 0; i < d.n_phases; i++) {
    if (const char *error = check_phase(d, d.phases[i])) return error;
    if ((d.phases[i].kind == TL_PHASE_HEAD) != (i >= d.section[3])) return "tl_plan_desc.section has a head elsewhere, or something else in the head";
  }
  return nullptr;
}

/* A tl_sampling that the host can read. */
inline const char *check_sampling(const tl_sampling &s) {
  if (s.size != sizeof(tl_sampling)) return "tl_sampling.size does not match this library";
  if (!(s.temperature >= 0.0f)) return "tl_sampling.temperature is negative or NaN";
  if (!(s.repetition_penalty > 0.0f)) return "tl_sampling.repetition_penalty is not positive";
  if (!(s.top_p > 0.0f) || !(s.min_p >= 0.0f)) return "tl_sampling.top_p or min_p is out of range";
  if (s.n_bias < 0 || (s.n_bias && (!s.bias_ids || !s.bias_values))) return "tl_sampling lacks its biases";
  if (s.n_history < 0 || (s.n_history && !s.history)) return "tl_sampling lacks its history";
  return nullptr;
}

/* Rows that start behind the prelude bring along what the loops inject. */
inline const char *check_injected(const tl_phase *phases, int n_phases, const tl_batch &b) {
  if (!(b.sections & TL_RUN_CORE) || (b.sections & (TL_RUN_PRELUDE | TL_RUN_REBUILD)) || b.e_in) return nullptr;
  for (int i = 0; i < n_phases; i++)
    if (phases[i].kind == TL_PHASE_INJECT) return "tl_batch leaves the prelude out and lacks e_in, which the loops inject";
  return nullptr;
}

/* Sizes and pointers only: what the rows hold is device data on CUDA, and the caller's to check. */
inline const char *check_batch(const tl_plan_desc &d, const tl_batch &b) {
  if (b.size != sizeof(tl_batch)) return "tl_batch.size does not match this library";
  if (!(b.sections & TL_RUN_ALL) || (b.sections & ~(TL_RUN_ALL | TL_RUN_REBUILD))) return "tl_batch.sections names no section";
  if (b.n_rows < 0 || b.n_rows > d.max_rows) return "tl_batch.n_rows is outside 0..max_rows";
  if (b.n_out < 0 || b.n_out > d.max_out) return "tl_batch.n_out is outside 0..max_out";
  if (b.window < 0) return "tl_batch.window is negative";
  const bool head_only = b.sections == TL_RUN_HEAD;
  if (head_only ? (!b.x_in || b.n_rows || !b.n_out) : !b.n_rows) return "tl_batch has no rows, or a head-only batch has some or lacks x_in";
  const bool rebuild = b.sections & TL_RUN_REBUILD;
  if (rebuild && ((b.sections & TL_RUN_HEAD) || b.n_out || !b.operand_table)) return "tl_batch of a rebuild has the head, or lacks operand_table";
  if (b.operand_table && !d.operand_base[0] && !d.operand_base[1] && !d.operand_base[2])
    return "tl_batch.operand_table needs operand_base in the plan";
  if (!head_only && ((!b.token && !rebuild) || !b.pos || !b.seq || !b.page_table)) return "tl_batch lacks its rows";
  if ((b.sections & TL_RUN_CORE) && (b.loop_begin < 0 || b.loop_end < b.loop_begin)) return "tl_batch.loop_begin and loop_end are not a range";
  if (b.n_out && !head_only && !b.out_row) return "tl_batch lacks out_row";
  if (!(b.sections & TL_RUN_PRELUDE) && !b.x_in && !rebuild) return "tl_batch leaves the prelude out and lacks x_in";
  if (b.x_out && !(b.sections & TL_RUN_CORE)) return "tl_batch.x_out needs the core";
  if (b.e_out && !(b.sections & TL_RUN_PRELUDE)) return "tl_batch.e_out needs the prelude";
  if (b.sampling && ((!b.sampled && !b.decode) || !(b.sections & TL_RUN_HEAD))) return "tl_batch.sampling needs sampled and the head";
  if (b.decode && (!b.sampling || b.n_out != b.n_rows)) return "tl_batch.decode needs sampling, and a head for every row";
  return nullptr;
}

}  // namespace tl
