// wgmma.mma_async of Hopper with the left operand in registers: d += a b, or d = a b, for 64 x N float32 accumulators of a
// warpgroup; a is 64 x 16 (a warp's 16 rows as mma.sync has them), b is N columns of 16 values in shared memory, K-major
// without swizzle: 8 x 8 tiles of 128 bytes, the two of a column group 128 bytes apart.
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

// Where b lies; column groups of eight are `group_bytes` apart.
TL_DEVICE uint64_t wgmma_columns(shared_t b, int group_bytes) {
  return (uint64_t)((b & 0x3ffff) >> 4) | (uint64_t)(128 >> 4) << 16 | (uint64_t)(group_bytes >> 4) << 32;
}
TL_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TL_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
TL_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define TL_WGMMA_32(type)                                                                                                                    \
  asm volatile(                                                                                                                              \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"                                                                                       \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                                                                            \
      " {"                                                                                                                                   \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "                                                              \
      "{%16, %17, %18, %19}, %20, add, 1, 1, 0;\n}"                                                                                          \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), \
        "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])                                                                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"((int)add))

template <class T>
TL_DEVICE void wgmma(float (&d)[16], const uint32_t (&a)[4], uint64_t columns, bool add) {
  if (T::kDtype == TL_BF16)
    TL_WGMMA_32("bf16");
  else
    TL_WGMMA_32("f16");
}

#define TL_WGMMA_64(type)                                                                                                                    \
  asm volatile(                                                                                                                              \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                                                                       \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                                                            \
      " {"                                                                                                                                   \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                                               \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                                                    \
      "{%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"                                                                                          \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), \
        "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),    \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),    \
        "+f"(d[31])                                                                                                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"((int)add))

template <class T>
TL_DEVICE void wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t columns, bool add) {
  if (T::kDtype == TL_BF16)
    TL_WGMMA_64("bf16");
  else
    TL_WGMMA_64("f16");
}

#define TL_WGMMA_128(type)                                                                                                                   \
  asm volatile(                                                                                                                              \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"                                                                                       \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                                                           \
      " {"                                                                                                                                   \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                                               \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                                     \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                                     \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                                                    \
      "{%64, %65, %66, %67}, %68, add, 1, 1, 0;\n}"                                                                                          \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), \
        "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),    \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),    \
        "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),    \
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]),    \
        "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]),    \
        "+f"(d[61]), "+f"(d[62]), "+f"(d[63])                                                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"((int)add))

template <class T>
TL_DEVICE void wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t columns, bool add) {
  if (T::kDtype == TL_BF16)
    TL_WGMMA_128("bf16");
  else
    TL_WGMMA_128("f16");
}

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
