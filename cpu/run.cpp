// The walk over a batch's steps, and the phases that touch one row at a time.
#include "run.h"

#include <string.h>

#include <algorithm>

namespace tl {

Worker::Worker(const Run &r, int t)
    : plan(r.plan), batch(r.batch), run(r), k(r.plan.k), pool(r.plan.context.pool), thread(t), memory(r.plan.thread_memory(t)) {
  const tl_plan_desc &d = plan.desc;
  few = batch.n_rows <= kPrivateRows;
  owns_heads = few && !(batch.sections & TL_RUN_REBUILD) && !plan.from_memory && d.qk_norm != TL_QK_NORM_FULL && d.n_kv_heads % pool.n_active() == 0;
}

float *Worker::row_buffer(int i) const {
  const uint64_t half = (plan.scratch.t_states - plan.scratch.t_row) / 2;
  return (float *)(memory + plan.scratch.t_row + i * half);
}

uint8_t *page_at(const Worker &w, int seq, int stage, int part, int pos) {
  const int64_t at = (int64_t)stage * w.plan.desc.table_stride + pos / TL_PAGE_POSITIONS;
  return (uint8_t *)w.plan.desc.kv_base[part] + w.batch.page_table[seq][at] * w.plan.page_nbytes[part];
}

namespace {

bool is_row_wise(const Step &s) {
  if (!s.phase) return s.copy != kBoundary;
  const int kind = s.phase->kind;
  return kind == TL_PHASE_EMBED || kind == TL_PHASE_STATE_INIT || kind == TL_PHASE_NORM || (kind == TL_PHASE_INJECT && !s.phase->weight.data);
}

void state_init(Worker &w, const tl_phase &p, int row) {
  const int n = w.plan.desc.dim;
  if (p.flags & TL_PHASE_SAVE_INPUT) memcpy(w.e(row), w.x(row), n * sizeof(float));
  if (w.batch.e_out && w.tells()) memcpy(w.batch.e_out + (int64_t)row * n, w.x(row), n * sizeof(float));
  if (w.batch.x_in)
    memcpy(w.x(row), w.batch.x_in + (int64_t)row * n, n * sizeof(float));
  else if (p.option == TL_INIT_ZERO)
    memset(w.x(row), 0, n * sizeof(float));
  else if (p.option == TL_INIT_NORMAL)
    w.k.noise(n, p.seed, w.batch.pos[row], p.scale, w.x(row));
}

void copy_row(Worker &w, Copy copy, int row) {
  const int64_t n = w.plan.desc.dim, at = row * n;
  if (copy == kRowsOut) {
    if (w.tells()) memcpy(w.batch.x_out + at, w.x(row), n * sizeof(float));
    return;
  }
  memcpy(w.x(row), w.batch.x_in + at, n * sizeof(float));
  if (w.batch.e_in) memcpy(w.e(row), w.batch.e_in + at, n * sizeof(float));
}

void run_row_phase(Worker &w, const tl_phase &p, int row) {
  const int n = w.plan.desc.dim;
  switch (p.kind) {
    case TL_PHASE_EMBED: return w.k.gather_row(&p.weight, w.batch.token[row], p.scale, w.x(row));
    case TL_PHASE_STATE_INIT: return state_init(w, p, row);
    case TL_PHASE_INJECT: return w.k.add(n, w.x(row), w.e(row), w.x(row));
    default: return w.k.rms_norm(n, w.plan.desc.norm_eps, w.x(row), p.norm, w.x(row));
  }
}

void copy_boundary(Worker &w, const Step &s) {
  const int n = w.plan.desc.dim;
  w.share(w.batch.n_out, [&](int i) {
    float *to = w.batch.boundary_x + ((int64_t)(s.loop - w.batch.loop_begin) * w.batch.n_out + i) * n;
    memcpy(to, w.x(w.batch.out_row[i]), n * sizeof(float));
  });
}

// Row-wise phases that follow each other run back to back on each row.
size_t run_row_wise(Worker &w, size_t i) {
  const std::vector<Step> &steps = w.run.steps;
  size_t end = i;
  while (end < steps.size() && is_row_wise(steps[end])) end++;
  w.each_row([&](int row) {
    for (size_t j = i; j < end; j++)
      if (steps[j].phase)
        run_row_phase(w, *steps[j].phase, row);
      else
        copy_row(w, steps[j].copy, row);
  });
  return end;
}

void run_step(Worker &w, const Step &s) {
  if (!s.phase) return copy_boundary(w, s);
  switch (s.phase->kind) {
    case TL_PHASE_INJECT: return run_inject_matrix(w, s);
    case TL_PHASE_QKV: return run_qkv(w, s);
    case TL_PHASE_ATTEND: return run_attend(w, s);
    case TL_PHASE_OUT:
    case TL_PHASE_DOWN: return run_residual(w, s);
    case TL_PHASE_GATE_UP: return run_gate_up(w, s);
    default: return run_head(w, s);
  }
}

void run_thread(void *arg, int thread) {
  const Run &run = *(const Run *)arg;
  tl_plan &p = run.plan;
  Worker w(run, thread);
  const uint32_t mode = p.k.enter_float_mode();
  for (size_t i = 0; i < run.steps.size();) {
    if (is_row_wise(run.steps[i])) {
      i = run_row_wise(w, i);
    } else if (w.owns_heads && run.steps[i].phase && run.steps[i].phase->kind == TL_PHASE_QKV) {
      run_qkv_attend(w, run.steps[i], run.steps[i + 1]);
      i += 2;
    } else {
      run_step(w, run.steps[i++]);
    }
  }
  p.k.leave_float_mode(mode);
  if (w.n_clamped) p.n_clamped.fetch_add(w.n_clamped, std::memory_order_relaxed);
}

void add_section(Run &r, int section, int stage, int loop) {
  const bool rebuild = r.batch.sections & TL_RUN_REBUILD;
  for (int i = r.plan.desc.section[section]; i < r.plan.desc.section[section + 1]; i++)
    if (!rebuild || r.plan.phases[i].kind == TL_PHASE_QKV) r.steps.push_back({&r.plan.phases[i], stage, loop});
}

void lay_steps(Run &r) {
  const tl_batch &b = r.batch;
  const auto copy = [&r](Copy what, int loop) { r.steps.push_back({nullptr, 0, loop, what}); };
  if (b.sections & TL_RUN_PRELUDE)
    add_section(r, 0, TL_STAGE_PRELUDE, 0);
  else if (b.n_rows && b.x_in)
    copy(kLoadRows, 0);
  if (b.sections & TL_RUN_CORE)
    for (int loop = b.loop_begin; loop < b.loop_end; loop++) {
      add_section(r, 1, TL_STAGE_CORE + loop, loop);
      if (b.boundary_x && b.n_out) copy(kBoundary, loop);
    }
  if (b.x_out) copy(kRowsOut, 0);
  if (b.sections & TL_RUN_CODA) add_section(r, 2, TL_STAGE_CODA, 0);
  if ((b.sections & TL_RUN_HEAD) && b.n_out) add_section(r, 3, 0, 0);
}

void lay_blocks(Run &r) {
  const tl_batch &b = r.batch;
  const int most = std::max(1, kBlockQueries / r.plan.group);
  for (int row = 0; row < b.n_rows;) {
    int n = 1;
    while (row + n < b.n_rows && n < most && b.seq[row + n] == b.seq[row] && b.pos[row + n] == b.pos[row] + n) n++;
    r.blocks.push_back({row, n});
    row += n;
  }
}

}  // namespace

void run_batch(tl_plan &plan, const tl_batch &batch) {
  Run run{plan, batch, {}, {}};
  run.steps.reserve(plan.phases.size() + (size_t)(batch.loop_end - batch.loop_begin) * (plan.desc.section[2] - plan.desc.section[1] + 1));
  lay_steps(run);
  lay_blocks(run);
  plan.context.pool.run(run_thread, &run);
}

}  // namespace tl
