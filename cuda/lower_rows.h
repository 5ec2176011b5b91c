// What a batch is lowered to, as it comes (lower.cu): kernels in order, of which those of a one-row step wait for each other, and row operations,
// which wait for whoever runs them.
#pragma once

#include <vector>

#include "rows.cuh"
#include "step.cuh"

namespace tl {

// The kernels of a batch. Those that a one-row step may run as one are kept back until another comes, or the end.
class Kernels {
 public:
  Kernels(tl_plan &plan, cudaStream_t stream) : plan_(plan), launcher_{plan.context, stream} {}

  void keep(const GemvArgs &args) { parts_.push_back(StepPart{false, args, {}}); }
  void keep(const AttendArgs &args) { parts_.push_back(StepPart{true, {}, args}); }
  // A core loop begins here, or the last one has ended.
  void mark_loop() { loops_.push_back((int)parts_.size()); }

  void release() {
    const bool whole = !loops_.empty() && loops_.back() <= (int)parts_.size();
    if (!parts_.empty() && !launch_step(launcher_, plan_, parts_, whole ? loops_ : std::vector<int>()))
      for (const StepPart &part : parts_) part.attends ? launch_attend_split(launcher_, part.attend) : launch_gemv(launcher_, part.gemv);
    parts_.clear();
    loops_.clear();
  }

  // For another kernel: what was kept back goes before it.
  const Launcher &launcher() {
    release();
    return launcher_;
  }

 private:
  tl_plan &plan_;
  Launcher launcher_;
  std::vector<StepPart> parts_;  // kept back
  std::vector<int> loops_;       // how many were, where each core loop began and the last one ended
};

// The rows x of a batch: what lies in one of two buffers, and the row program from there to what they are by now.
class RowState {
 public:
  RowState(const tl_plan &plan, const tl_batch &batch, Kernels &kernels) : plan_(plan), batch_(batch), kernels_(kernels) { restart(); }

  RowProgram program{};

  float *x() const { return buffer(current_); }
  float *other() const { return buffer(1 - current_); }
  bool changed() const { return changed_; }

  void add(RowOpKind kind, const float *p = nullptr, int stride = 0, float factor = 0.0f, uint64_t seed = 0) {
    if (kind == kRowLoad || kind == kRowEmbed || kind == kRowZero || kind == kRowNoise ||
        kind == kRowSums) {  // what was there is overwritten, unless stored
      if (program.n_ops && program.op[program.n_ops - 1].kind != kRowStore) program.n_ops = 0;
    }
    program.op[program.n_ops++] = RowOp{kind, stride, p, factor, seed};
    changed_ = true;
  }
  void add_x() { add(kRowAdd, x(), plan_.dim_pad); }
  void store(float *to) { add(kRowStore, to, plan_.dim_pad); }

  // An empty program that reads x where it is.
  void restart() {
    program = {};
    program.dim = plan_.desc.dim;
    program.eps = plan_.desc.norm_eps;
    program.token = batch_.token;
    program.pos = batch_.pos;
    add(kRowLoad, x(), plan_.dim_pad);
    changed_ = false;
  }
  // The same, where x is what a kernel has left in the other buffer.
  void restart_other() {
    current_ = 1 - current_;
    restart();
  }

  // Runs the program by itself.
  void flush() { flush_to(current_); }
  // The same, with its result in the first buffer.
  void flush_first() { flush_to(0); }

 private:
  float *buffer(int i) const { return plan_.buffer(plan_.scratch.x[i]); }

  void flush_to(int i) {
    if (!changed_ && i == current_) return;
    store(buffer(i));
    launch_rows(kernels_.launcher(), batch_.n_rows, RowsArgs{program, Operand{}});
    current_ = i;
    restart();
  }

  const tl_plan &plan_;
  const tl_batch &batch_;
  Kernels &kernels_;
  int current_ = 0;       // which of the two buffers
  bool changed_ = false;  // whether the program does anything
};

}  // namespace tl
