// States of attention for some rows in memory: attend_states.cu leaves them, attend_merge.cu merges them.
#pragma once

#include "attend_spans.cuh"

namespace tl {

struct StatesArgs {
  AttendArgs attend;
  const SpanPlan *plan;
  float *o;    // (n_states, head_pad)
  float2 *ml;  // (n_states,)
};

void launch_merge_states(const Launcher &launcher, const StatesArgs &args);

}  // namespace tl
