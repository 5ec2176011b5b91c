// Running a batch: every thread walks the same steps, shares out the units of each, and meets the others after it.
#pragma once

#include <vector>

#include "plan.h"

namespace tl {

enum Copy { kLoadRows, kBoundary, kRowsOut };  // x_in and e_in to the rows; the out rows' x to boundary_x; every row's x to x_out

struct Step {
  const tl_phase *phase;  // NULL: a copy
  int stage;              // row of the page table
  int loop;
  Copy copy = kLoadRows;  // where phase is NULL
};

// Consecutive rows of one sequence at consecutive positions.
struct RowBlock {
  int begin, n_rows;
};

struct Run {
  tl_plan &plan;
  const tl_batch &batch;
  std::vector<Step> steps;
  std::vector<RowBlock> blocks;
};

// One thread's view of a run.
struct Worker {
  tl_plan &plan;
  const tl_batch &batch;
  const Run &run;
  const Kernels &k;
  ThreadPool &pool;
  int thread;
  uint8_t *memory;   // this thread's scratch
  bool few;          // rows: every thread has its own x and e, all alike, and does what is row by row for itself
  bool owns_heads;   // and, of the heads, those that it computed: attention follows q, k and v without a barrier
  int n_clamped = 0;

  Worker(const Run &r, int thread);

  float *x(int row) const { return (few ? own(plan.scratch.t_x) : plan.buffer(plan.scratch.x)) + (int64_t)row * plan.dim_pad; }
  float *e(int row) const { return (few ? own(plan.scratch.t_e) : plan.buffer(plan.scratch.e)) + (int64_t)row * plan.dim_pad; }
  float *y(int row) const { return plan.buffer(plan.scratch.y) + (int64_t)row * plan.dim_pad; }
  float *q(int row) const { return plan.buffer(plan.scratch.q) + (int64_t)row * plan.desc.n_heads * plan.head_pad; }
  float *attn(int row) const { return plan.buffer(plan.scratch.attn) + (int64_t)row * pad16(plan.q_dim); }
  float *hidden(int row) const { return plan.buffer(plan.scratch.hidden) + (int64_t)row * plan.ffn_pad; }
  float *own(uint64_t offset) const { return (float *)(memory + offset); }
  float *row_buffer(int i) const;

  // Calls body(unit) for 0 <= unit < n over all threads, then waits for them; `help` as in ThreadPool::share.
  template <class Body>
  void share(int n, Body body, bool help = false) {
    pool.share(thread, n, help, body);
  }

  // Whether it falls to this thread to write what all that work on a row would write alike.
  bool tells() const { return !few || thread == 0; }

  // Calls body(row) for what is done to each row's x alone.
  template <class Body>
  void each_row(Body body) {
    if (!few) return share(batch.n_rows, body);
    for (int row = 0; row < batch.n_rows; row++) body(row);
  }
};

// Page of a sequence at a stage that holds `pos`.
uint8_t *page_at(const Worker &w, int seq, int stage, int part, int pos);
// K and V of a layer and KV head inside a page (kv_layout.h).
inline uint8_t *block_of(const Worker &w, uint8_t *page, int layer, int head) {
  return page + ((uint64_t)layer * w.plan.desc.n_kv_heads + head) * w.plan.kv.nbytes;
}

// Few rows with few keys: attention leaves the states of a row's chunks in scratch, and whoever lays out the next operand
// merges them (merge_row, for itself) instead of meeting at one more barrier.
bool merges_late(const Worker &w, const Step &attend);
void merge_row(Worker &w, const Step &attend, int row, float *out);

void run_qkv(Worker &w, const Step &s);
void run_attend(Worker &w, const Step &s);
void run_qkv_attend(Worker &w, const Step &qkv, const Step &attend);  // where the worker owns heads
// Attention of all rows for the KV heads begin <= head < end, by one thread.
void attend_heads(Worker &w, const Step &s, int begin, int end);
void run_residual(Worker &w, const Step &s);  // OUT and DOWN
void run_gate_up(Worker &w, const Step &s);
void run_inject_matrix(Worker &w, const Step &s);
void run_head(Worker &w, const Step &s);

}  // namespace tl
