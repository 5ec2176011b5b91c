// The instructions that kernels use beyond plain C++, one small function each, and the limits of a CTA.
//
// The host emulator (tests/cuda_emulator) gives the same functions on fibers, so that every kernel also runs, slowly,
// where no GPU is.
#pragma once

#include <stdint.h>

#if defined(TL_EMULATOR)
#include "emulator.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#if defined(TL_EMULATOR) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
#define TL_HOPPER 1  // bulk copies on barriers, clusters, dependent launches
#else
#define TL_HOPPER 0
#endif

#define TL_DEVICE static __device__ __forceinline__
#define TL_DEVICE_MEMBER __device__ __forceinline__
#define TL_BOTH static __host__ __device__ __forceinline__

namespace tl {

constexpr int kThreads = 256;  // of nearly every kernel: the reduction trees are laid out for it
constexpr int kWarps = kThreads / 32;

TL_DEVICE int lane_id() { return threadIdx.x % 32; }
TL_DEVICE int warp_id() { return threadIdx.x / 32; }

#if !defined(TL_EMULATOR)

template <class T>
TL_DEVICE T *shared_memory() {
  extern __shared__ __align__(1024) uint8_t tl_shared_memory[];
  return (T *)tl_shared_memory;
}

// An address in shared memory as the instructions below take it.
using shared_t = uint32_t;
TL_DEVICE shared_t shared_of(const void *p) { return (shared_t)__cvta_generic_to_shared(p); }

// ---- tensor cores: d += a b, float32 accumulators. a is 16 x 16, b is 16 x 8.

TL_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
TL_DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of signed bytes with int32 sums: a is 16 x 32, b is 32 x 8.
TL_DEVICE void mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 tiles of 16-bit values; lane i gives the address of row i % 8 of tile i / 8.
TL_DEVICE void ldmatrix4(uint32_t (&r)[4], shared_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
TL_DEVICE void ldmatrix4_transposed(uint32_t (&r)[4], shared_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// ---- pairs of 16-bit floats, the first in the low half

TL_DEVICE uint32_t pack_bf16(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
}
TL_DEVICE uint32_t pack_f16(float lo, float hi) {
  const __half2 v = __floats2half2_rn(lo, hi);
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
}
TL_DEVICE float2 unpack_f16(uint32_t u) {
  __half2 v;
  memcpy(&v, &u, 4);
  return __half22float2(v);
}
// Four bytes of a (0..3) and b (4..7): a hexadecimal digit of `which` for each, the lowest first.
TL_DEVICE uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t which) { return __byte_perm(a, b, which); }
// a b + c of bfloat16 pairs, rounded once; subnormal numbers count.
TL_DEVICE uint32_t multiply_add_bf16(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// The larger and the smaller of two, NaN where one is.
TL_DEVICE float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
TL_DEVICE float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
// The largest of a warp's, for all its lanes.
TL_DEVICE uint32_t warp_maximum(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }
// The nearest integer, ties to even; of a NaN any.
TL_DEVICE int nearest(float x) { return __float2int_rn(x); }

// 1 / x, one unit in the last place, subnormals flushed.
TL_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 2^x, two units in the last place, subnormals flushed.
TL_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- copies from memory to shared memory

TL_DEVICE void copy16_async(shared_t to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
TL_DEVICE void copy16_async(void *to, const void *from) { copy16_async(shared_of(to), from); }
TL_DEVICE uint32_t load_shared4(shared_t p) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(p) : "memory");
  return v;
}
TL_DEVICE uint2 load_shared8(shared_t p) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(p) : "memory");
  return v;
}
TL_DEVICE uint4 load_shared16(shared_t p) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory");
  return v;
}
TL_DEVICE void store_shared1(shared_t p, uint32_t v) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(p), "r"(v) : "memory"); }
TL_DEVICE void store_shared2(shared_t p, uint32_t v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(p), "h"((uint16_t)v) : "memory"); }
TL_DEVICE void store_shared4(shared_t p, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(p), "r"(v) : "memory"); }
// Where it is wanted, without a branch.
TL_DEVICE void store_shared4_if(bool wanted, shared_t p, uint32_t v) {
  asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %0, 0;\n@wanted st.shared.u32 [%1], %2;\n}" ::"r"((uint32_t)wanted), "r"(p), "r"(v)
               : "memory");
}
TL_DEVICE void store_shared8(shared_t p, float2 v) { asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(p), "f"(v.x), "f"(v.y) : "memory"); }
TL_DEVICE void store_shared16(shared_t p, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
TL_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's latest groups are still under way.
template <int pending>
TL_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- the order of kernels: a dependent kernel starts early and waits here for all memory of those before it

TL_DEVICE void wait_for_previous_kernel() {
#if TL_HOPPER
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
TL_DEVICE void let_next_kernel_start() {
#if TL_HOPPER
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// What this thread wrote to shared memory comes before bulk copies to it that are asked for later.
TL_DEVICE void fence_bulk_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier of some of a CTA's warps: id 1..15, n_threads a multiple of 32.
TL_DEVICE void sync_threads(int id, int n_threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory"); }

#endif  // TL_EMULATOR

// What an earlier kernel of the batch wrote, read by who has not waited for it: never from L1.
#if defined(TL_EMULATOR)
TL_DEVICE float load_fresh(const float *p) { return *p; }
TL_DEVICE int load_fresh(const int32_t *p) { return *p; }
TL_DEVICE uint4 load_fresh(const uint4 *p) { return *p; }
#else
TL_DEVICE float load_fresh(const float *p) { return __ldcg(p); }
TL_DEVICE int load_fresh(const int32_t *p) { return __ldcg(p); }
TL_DEVICE uint4 load_fresh(const uint4 *p) { return __ldcg(p); }
#endif
template <class T>
TL_DEVICE void load_fresh(T &to, const T *from) {
  static_assert(sizeof(T) % 16 == 0 && alignof(T) % 16 == 0, "whole words of sixteen bytes");
  uint4 word[sizeof(T) / 16];
#pragma unroll
  for (int i = 0; i < (int)sizeof(T) / 16; i++) word[i] = load_fresh((const uint4 *)from + i);
  memcpy(&to, word, sizeof(T));
}

// Brings a kernel's arguments near before it waits for others: one that is first looked at later costs a way to memory then. What is read
// is used, if only to be there: else the compiler leaves it out.
template <class Args>
TL_DEVICE void touch_arguments(const Args &args) {
#if !defined(TL_EMULATOR)
  constexpr int kLine = 64;
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < (int)sizeof(Args); i += kLine) all ^= *(const uint32_t *)((const uint8_t *)&args + i);
  asm volatile("{\n.reg .pred never;\nsetp.eq.u32 never, %0, 0x9e3779b9;\n@never nanosleep.u32 1;\n}" ::"r"(all));
#endif
}

TL_DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
TL_DEVICE float bits_float(uint32_t u) { return __uint_as_float(u); }

}  // namespace tl

#include "hopper.cuh"
