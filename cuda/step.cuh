// The products and attentions of a one-row step as one kernel. See step.cu.
#pragma once

#include <vector>

#include "attend.cuh"
#include "gemv.cuh"
#include "plan.h"

namespace tl {

// A kernel of the step, in order: one of the two.
struct StepPart {
  bool attends;
  GemvArgs gemv;
  AttendArgs attend;
};

// Runs the parts as one kernel; false, with nothing launched, where this device or these parts do not suit it. `loops`: where in
// the parts each core loop begins, and where the last one ends.
bool launch_step(const Launcher &launcher, tl_plan &plan, const std::vector<StepPart> &parts, const std::vector<int> &loops);

// Bytes of scratch memory that a plan keeps for it.
uint64_t step_nbytes(const tl_plan &plan);

}  // namespace tl
