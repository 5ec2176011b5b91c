#pragma once

#include <sched.h>

#include "kernels.h"

namespace tl {

using CpuSet = cpu_set_t;

// The cores that this process's threads may run on.
CpuSet usable_cpus();

}  // namespace tl
