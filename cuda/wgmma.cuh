// wgmma.mma_async of Hopper: d += a b, or d = a b, for 64 x N float32 accumulators of a warpgroup. a is 64 x 16, in registers
// (a warp's 16 rows as mma.sync has them) or in shared memory; b is N columns of 16 values in shared memory. What lies there
// is 8 x 8 tiles of 128 bytes without swizzle, a row or column of values contiguous; `turned`: a row of b, as V has keys.
//
// Value i of a lane is row lane / 4 + 8 (i % 4 / 2), column 8 (i / 4) + 2 (lane % 4) + i % 2. Measured bit-identical to
// mma.sync over K-chunks (bench/results), which is what lets both serve one model.
#pragma once

#include "math.cuh"

#if defined(TL_EMULATOR) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TL_WGMMA 1
#else
#define TL_WGMMA 0
#endif

namespace tl {

#if TL_WGMMA && !defined(TL_EMULATOR)

// Where an operand lies: groups of eight rows of a, or columns of b, are `group_bytes` apart, its two tiles of eight values of
// the inner dimension `inner_bytes`.
TL_DEVICE uint64_t wgmma_tiles(shared_t p, int group_bytes, int inner_bytes = 128) {
  return (uint64_t)((p & 0x3ffff) >> 4) | (uint64_t)(inner_bytes >> 4) << 16 | (uint64_t)(group_bytes >> 4) << 32;
}
// The same, nbytes further.
TL_DEVICE uint64_t wgmma_tiles_at(uint64_t tiles, int nbytes) { return tiles + (uint32_t)(nbytes >> 4); }
TL_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TL_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
TL_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// ---- the instruction for N columns, by its number of sums a lane: the left operand in registers or in shared memory

#define TL_SUMS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TL_SUMS_16 TL_SUMS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TL_SUMS_32 TL_SUMS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TL_SUMS_64                                                                     \
  TL_SUMS_32                                                                           \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TL_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TL_OUT_8 TL_FOUR(0), TL_FOUR(4)
#define TL_OUT_16 TL_OUT_8, TL_FOUR(8), TL_FOUR(12)
#define TL_OUT_32 TL_OUT_16, TL_FOUR(16), TL_FOUR(20), TL_FOUR(24), TL_FOUR(28)
#define TL_OUT_64 TL_OUT_32, TL_FOUR(32), TL_FOUR(36), TL_FOUR(40), TL_FOUR(44), TL_FOUR(48), TL_FOUR(52), TL_FOUR(56), TL_FOUR(60)

#define TL_WGMMA_CODE(n, type, sums, a, columns, add, turns)                                                                                      \
  "{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" sums "}, " a ", " columns \
  ", add, 1, 1, " turns ";\n}"

#define TL_WGMMA_FROM_REGISTERS(n_sums, n, a0, a1, a2, a3, columns_at, add_at, turned_at)                                        \
  template <class T, bool kTurned = false>                                                                                       \
  TL_DEVICE void wgmma(float (&d)[n_sums], const uint32_t (&a)[4], uint64_t columns, bool add) {                                 \
    if (T::kDtype == TL_BF16)                                                                                                    \
      asm volatile(TL_WGMMA_CODE(n, "bf16", TL_SUMS_##n_sums, "{" a0 ", " a1 ", " a2 ", " a3 "}", columns_at, add_at, turned_at) \
                   : TL_OUT_##n_sums                                                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"((int)add), "n"((int)kTurned));                \
    else                                                                                                                         \
      asm volatile(TL_WGMMA_CODE(n, "f16", TL_SUMS_##n_sums, "{" a0 ", " a1 ", " a2 ", " a3 "}", columns_at, add_at, turned_at)  \
                   : TL_OUT_##n_sums                                                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"((int)add), "n"((int)kTurned));                \
  }
TL_WGMMA_FROM_REGISTERS(8, "16", "%8", "%9", "%10", "%11", "%12", "%13", "%14")
TL_WGMMA_FROM_REGISTERS(16, "32", "%16", "%17", "%18", "%19", "%20", "%21", "%22")
TL_WGMMA_FROM_REGISTERS(32, "64", "%32", "%33", "%34", "%35", "%36", "%37", "%38")
TL_WGMMA_FROM_REGISTERS(64, "128", "%64", "%65", "%66", "%67", "%68", "%69", "%70")

#define TL_WGMMA_FROM_SHARED(n_sums, n, rows_at, columns_at, add_at)                               \
  template <class T>                                                                               \
  TL_DEVICE void wgmma(float (&d)[n_sums], uint64_t rows, uint64_t columns, bool add) {            \
    if (T::kDtype == TL_BF16)                                                                      \
      asm volatile(TL_WGMMA_CODE(n, "bf16", TL_SUMS_##n_sums, rows_at, columns_at, add_at, "0, 0") \
                   : TL_OUT_##n_sums                                                               \
                   : "l"(rows), "l"(columns), "r"((int)add));                                      \
    else                                                                                           \
      asm volatile(TL_WGMMA_CODE(n, "f16", TL_SUMS_##n_sums, rows_at, columns_at, add_at, "0, 0")  \
                   : TL_OUT_##n_sums                                                               \
                   : "l"(rows), "l"(columns), "r"((int)add));                                      \
  }
TL_WGMMA_FROM_SHARED(8, "16", "%8", "%9", "%10")
TL_WGMMA_FROM_SHARED(16, "32", "%16", "%17", "%18")
TL_WGMMA_FROM_SHARED(32, "64", "%32", "%33", "%34")
TL_WGMMA_FROM_SHARED(64, "128", "%64", "%65", "%66")

#endif

// Keeps the compiler from using accumulators before a wait that stands above.
template <int n>
TL_DEVICE void accumulators_ready(float (&d)[n]) {
#if !defined(TL_EMULATOR)
#pragma unroll
  for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i])::"memory");
#endif
}

}  // namespace tl
