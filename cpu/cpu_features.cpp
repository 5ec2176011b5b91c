// Which code path this processor runs, and how many of its cores this process may use.
#include "cpu_features.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include <thread>

namespace tl {

const Kernels *select_kernels(int isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  if (avx512 && (isa == TL_ISA_BEST || isa == TL_ISA_AVX512)) return &avx512::kKernels;
  if (avx2 && (isa == TL_ISA_BEST || isa == TL_ISA_AVX2)) return &avx2::kKernels;
#endif
  return isa == TL_ISA_BEST || isa == TL_ISA_GENERIC ? &generic::kKernels : nullptr;
}

CpuSet usable_cpus() {
  CpuSet set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) {
    for (unsigned i = 0; i < std::thread::hardware_concurrency(); i++) CPU_SET(i, &set);
    return set;
  }
  // OpenMP's binding pins the calling thread to one core, and every thread that it starts: ask what a free one would get.
  const char *bind = getenv("OMP_PROC_BIND");
  if (bind && *bind && strcasecmp(bind, "false") != 0) {
    std::thread([&set] {
      CpuSet all;
      memset(&all, 0xff, sizeof all);
      if (sched_setaffinity(0, sizeof all, &all) == 0) sched_getaffinity(0, sizeof set, &set);
    }).join();
  }
  return set;
}

}  // namespace tl
