// Runs the kernels of cuda/ on the host: a CUDA thread is a fiber, a cluster of CTAs runs at a time, and the instructions
// of device.cuh are functions here. It is for tests where no GPU is: indices, barriers, orders and every path's logic are
// the kernels' own; the bits of a tensor core's sums are not.
//
// It is stricter than a GPU where it can be: shared memory starts as NaN, an asynchronous copy spoils its target until it
// has been waited for, and a barrier that cannot be met ends the program.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

typedef void *cudaStream_t;
typedef int cudaError_t;
enum { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
inline const char *cudaGetErrorString(cudaError_t) { return "an error of the emulator"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

namespace emulator {

constexpr int kMultiprocessors = 3;  // few, so that CTAs take many units each

struct Thread {
  dim3 thread, block, grid;
  int warp, lane, cta, rank, cluster_size;  // cta: of those that run together; rank: in its cluster
};
extern Thread *current;

// Runs body as every thread of the grid, a cluster after another or all together.
void run(dim3 grid, int n_threads, int shared_nbytes, int cluster, bool together, const std::function<void()> &body);
// The same, now or, while a graph is recorded, with each launch of it.
void launch(dim3 grid, int n_threads, int shared_nbytes, int cluster, bool together, const std::function<void()> &body);
void wait_for(const uint64_t *word, uint64_t value);  // until it has that

uint8_t *shared_memory(int cta);
void sync_cta(int id, int n_threads);
void arrive_in_cluster();
void wait_in_cluster();
// Meets the other lanes of the warp: combine(in, out) runs once, on 32 slots of 64 bytes each.
void meet_warp(int kind, const void *in, int in_nbytes, void *out, int out_nbytes, void (*combine)(const uint8_t (*in)[64], uint8_t (*out)[64]));

void queue_copy(void *to, const void *from, int nbytes);
void commit_copies();
void wait_copies(int pending);

void barrier_init(uint64_t *barrier, int n_arrivals);
void barrier_arrive(uint64_t *barrier, int nbytes);
void barrier_wait(uint64_t *barrier, int parity);
extern volatile uint8_t fetched;  // what fetch_bulk has looked at
void barrier_copy(void *to, const void *from, int nbytes, uint64_t *barrier);
void barrier_count(uint64_t *barrier, int nbytes);  // bytes that are there

uint16_t bf16_of(float x);
uint16_t f16_of(float x);
float of_bf16(uint16_t u);
float of_f16(uint16_t u);

// A warp operation on values: out[i] = f(in, i).
template <class In, class Out, Out (*f)(const In *, int)>
Out warp_operation(int kind, In x) {
  static_assert(sizeof(In) <= 64 && sizeof(Out) <= 64, "a slot holds 64 bytes");
  Out y;
  meet_warp(kind, &x, sizeof x, &y, sizeof y, [](const uint8_t (*in)[64], uint8_t (*out)[64]) {
    In all[32];
    for (int i = 0; i < 32; i++) memcpy(&all[i], in[i], sizeof(In));
    for (int i = 0; i < 32; i++) {
      const Out r = f(all, i);
      memcpy(out[i], &r, sizeof r);
    }
  });
  return y;
}

inline int nothing(const int *, int) { return 0; }
inline uint32_t largest(const uint32_t *in, int) { return *std::max_element(in, in + 32); }
inline uint32_t votes(const int *in, int) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; i++) bits |= (uint32_t)(in[i] != 0) << i;
  return bits;
}

template <class T>
struct Shuffle {
  T value;
  int from;
};
template <class T>
T shuffled(const Shuffle<T> *in, int i) {
  return in[in[i].from].value;
}

struct Mma {
  float d[4];
  uint32_t a[4], b[2];
};
struct IntegerMma {
  int d[4];
  uint32_t a[4], b[2];
};
struct Integers {
  int d[4];
};
inline Integers multiply_bytes(const IntegerMma *in, int lane) {
  const int g = lane / 4, t = lane % 4;
  Integers s;
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    int sum = in[lane].d[i];
    for (int k = 0; k < 32; k++) {
      const uint32_t a = in[row % 8 * 4 + k % 16 / 4].a[k / 16 * 2 + row / 8], b = in[column * 4 + k % 16 / 4].b[k / 16];
      sum += (int8_t)(a >> k % 4 * 8) * (int8_t)(b >> k % 4 * 8);
    }
    s.d[i] = sum;
  }
  return s;
}
struct Four {
  uint32_t r[4];
};
struct Sums {
  float d[4];
};
template <float (*widen)(uint16_t)>
Sums multiply(const Mma *in, int lane) {
  const int g = lane / 4, t = lane % 4;
  Sums s;
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    float sum = in[lane].d[i];
    for (int k = 0; k < 16; k++) {
      const uint32_t a = in[row % 8 * 4 + k % 8 / 2].a[k / 8 * 2 + row / 8], b = in[column * 4 + k % 8 / 2].b[k / 8];
      sum = fmaf(widen((uint16_t)(k % 2 ? a >> 16 : a)), widen((uint16_t)(k % 2 ? b >> 16 : b)), sum);
    }
    s.d[i] = sum;
  }
  return s;
}
template <bool transposed>
Four load_tiles(const uint8_t *const *row, int lane) {
  Four f;
  for (int i = 0; i < 4; i++) {
    uint16_t v[2];
    for (int j = 0; j < 2; j++) {
      const int r = transposed ? lane % 4 * 2 + j : lane / 4, c = transposed ? lane / 4 : lane % 4 * 2 + j;
      memcpy(&v[j], row[8 * i + r] + 2 * c, 2);
    }
    f.r[i] = (uint32_t)v[1] << 16 | v[0];
  }
  return f;
}

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block)
#define gridDim (emulator::current->grid)

inline void __syncthreads() { emulator::sync_cta(0, 0); }
inline void __syncwarp() { emulator::warp_operation<int, int, emulator::nothing>(1, 0); }

template <class T>
T __shfl_sync(uint32_t, T x, int from) {
  return emulator::warp_operation<emulator::Shuffle<T>, T, emulator::shuffled<T>>(2, {x, from & 31});
}
template <class T>
T __shfl_xor_sync(uint32_t, T x, int mask) {
  return emulator::warp_operation<emulator::Shuffle<T>, T, emulator::shuffled<T>>(3, {x, emulator::current->lane ^ mask});
}
template <class T>
T __shfl_up_sync(uint32_t, T x, int delta, int width = 32) {
  const int lane = emulator::current->lane;
  return emulator::warp_operation<emulator::Shuffle<T>, T, emulator::shuffled<T>>(4, {x, lane % width >= delta ? lane - delta : lane});
}
inline uint32_t __ballot_sync(uint32_t, int x) { return emulator::warp_operation<int, uint32_t, emulator::votes>(5, x); }
inline int __any_sync(uint32_t mask, int x) { return __ballot_sync(mask, x) != 0; }
inline int __ffs(uint32_t x) { return __builtin_ffs((int)x); }

template <class T, class U>
T atomicAdd(T *p, U x) {
  const T old = *p;
  *p += (T)x;
  return old;
}
inline uint32_t atomicOr(uint32_t *p, uint32_t x) {
  const uint32_t old = *p;
  *p |= x;
  return old;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
inline float __uint_as_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
using std::max;
using std::min;

namespace tl {

template <class T>
T *shared_memory() {
  return (T *)emulator::shared_memory(emulator::current->cta);
}

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const emulator::Mma m{{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  const emulator::Sums s = emulator::warp_operation<emulator::Mma, emulator::Sums, emulator::multiply<emulator::of_bf16>>(6, m);
  memcpy(d, s.d, sizeof s.d);
}
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const emulator::Mma m{{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  const emulator::Sums s = emulator::warp_operation<emulator::Mma, emulator::Sums, emulator::multiply<emulator::of_f16>>(7, m);
  memcpy(d, s.d, sizeof s.d);
}
inline void mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const emulator::IntegerMma m{{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  const emulator::Integers s = emulator::warp_operation<emulator::IntegerMma, emulator::Integers, emulator::multiply_bytes>(11, m);
  memcpy(d, s.d, sizeof s.d);
}
using shared_t = uintptr_t;
inline shared_t shared_of(const void *p) { return (shared_t)p; }

inline void ldmatrix4(uint32_t (&r)[4], shared_t row) {
  const emulator::Four f = emulator::warp_operation<const uint8_t *, emulator::Four, emulator::load_tiles<false>>(8, (const uint8_t *)row);
  memcpy(r, f.r, sizeof f.r);
}
inline void ldmatrix4_transposed(uint32_t (&r)[4], shared_t row) {
  const emulator::Four f = emulator::warp_operation<const uint8_t *, emulator::Four, emulator::load_tiles<true>>(9, (const uint8_t *)row);
  memcpy(r, f.r, sizeof f.r);
}

inline uint32_t pack_bf16(float lo, float hi) { return (uint32_t)emulator::bf16_of(hi) << 16 | emulator::bf16_of(lo); }
inline uint32_t pack_f16(float lo, float hi) { return (uint32_t)emulator::f16_of(hi) << 16 | emulator::f16_of(lo); }
inline float2 unpack_f16(uint32_t u) { return {emulator::of_f16((uint16_t)u), emulator::of_f16((uint16_t)(u >> 16))}; }
inline uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t y = 0;
  for (int i = 0; i < 4; i++) y |= (uint32_t)(bytes >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
  return y;
}
inline uint32_t multiply_add_bf16(uint32_t a, uint32_t b, uint32_t c) {
  using emulator::of_bf16;
  const auto one = [](uint32_t a, uint32_t b, uint32_t c) { return fmaf(of_bf16((uint16_t)a), of_bf16((uint16_t)b), of_bf16((uint16_t)c)); };
  return pack_bf16(one(a, b, c), one(a >> 16, b >> 16, c >> 16));
}
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }
inline float min_nan(float a, float b) { return a != a || b != b ? NAN : fminf(a, b); }
inline uint32_t warp_maximum(uint32_t x) { return emulator::warp_operation<uint32_t, uint32_t, emulator::largest>(12, x); }
inline int nearest(float x) { return x == x ? (int)rintf(x) : 0; }
inline float exp2_fast(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline uint32_t load_shared4(shared_t p) { return *(const uint32_t *)p; }
inline uint2 load_shared8(shared_t p) { return *(const uint2 *)p; }
inline void store_shared1(shared_t p, uint32_t v) { *(uint8_t *)p = (uint8_t)v; }
inline void store_shared2(shared_t p, uint32_t v) { *(uint16_t *)p = (uint16_t)v; }
inline void store_shared4(shared_t p, uint32_t v) { *(uint32_t *)p = v; }
inline void store_shared4_if(bool wanted, shared_t p, uint32_t v) {
  if (wanted) store_shared4(p, v);
}
inline uint4 load_shared16(shared_t p) { return *(const uint4 *)p; }
inline void store_shared8(shared_t p, float2 v) { *(float2 *)p = v; }
inline void store_shared16(shared_t p, uint4 v) { *(uint4 *)p = v; }

// Where an operand of wgmma lies: address, distance of its groups of eight rows or columns, and of its two tiles of the inner dimension.
inline uint64_t wgmma_tiles(shared_t p, int group_bytes, int inner_bytes = 128) {
  const int cta = emulator::current->cta;
  return (uint64_t)(p - (shared_t)emulator::shared_memory(cta)) | (uint64_t)group_bytes << 32 | (uint64_t)inner_bytes << 48;
}
inline uint64_t wgmma_tiles_at(uint64_t tiles, int nbytes) { return tiles + nbytes; }
inline const uint8_t *tile_of(uint64_t tiles, int group, int inner) {
  return emulator::shared_memory(emulator::current->cta) + (uint32_t)tiles + group * (int)(tiles >> 32 & 0xffff) + inner * (int)(tiles >> 48);
}
template <int n>
void take_registers() {}
template <int n>
void give_registers() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int pending>
void wgmma_wait() {
  emulator::warp_operation<int, int, emulator::nothing>(10, 0);
}
template <class T, bool kTurned = false, int n>
void wgmma(float (&d)[n], const uint32_t (&a)[4], uint64_t columns, bool add) {
  const int lane = emulator::current->lane;
  for (int j = 0; j < n / 4; j++) {  // eight columns at a time, with the sums of mma.sync
    float part[4];
    for (int i = 0; i < 4; i++) part[i] = add ? d[4 * j + i] : 0.0f;
    uint32_t word[2];
    for (int k = 0; k < 2; k++) {
      uint16_t v[2];
      for (int i = 0; i < 2; i++) {
        const int column = lane / 4, inner = lane % 4 * 2 + i;
        memcpy(&v[i], tile_of(columns, j, k) + (kTurned ? inner * 16 + column * 2 : column * 16 + inner * 2), 2);
      }
      word[k] = (uint32_t)v[1] << 16 | v[0];
    }
    T::mma(part, a, word[0], word[1]);
    memcpy(d + 4 * j, part, sizeof part);
  }
}
template <class T, int n>
void wgmma(float (&d)[n], uint64_t rows, uint64_t columns, bool add) {
  const int lane = emulator::current->lane, warp = emulator::current->warp % 4;
  uint32_t a[4];
  for (int i = 0; i < 4; i++) memcpy(&a[i], tile_of(rows, warp * 2 + i % 2, i / 2) + lane / 4 * 16 + lane % 4 * 4, 4);
  wgmma<T, false>(d, a, columns, add);
}

inline void copy16_async(void *to, const void *from) { emulator::queue_copy(to, from, 16); }
inline void copy16_async(shared_t to, const void *from) { emulator::queue_copy((void *)to, from, 16); }
inline void commit_copies() { emulator::commit_copies(); }
template <int pending>
void wait_copies() {
  emulator::wait_copies(pending);
}

inline void __threadfence() {}
inline bool elected() { return emulator::current->lane == 0; }
inline void barrier_init(shared_t barrier, int n_arrivals) { emulator::barrier_init((uint64_t *)barrier, n_arrivals); }
inline void barrier_init_done() {}
inline void barrier_arrive(shared_t barrier) { emulator::barrier_arrive((uint64_t *)barrier, 0); }
inline void barrier_arrive(shared_t barrier, int n) {
  for (int i = 0; i < n; i++) barrier_arrive(barrier);
}
inline void barrier_arrive_expecting(shared_t barrier, int nbytes) { emulator::barrier_arrive((uint64_t *)barrier, nbytes); }
inline void barrier_wait(shared_t barrier, int parity) { emulator::barrier_wait((uint64_t *)barrier, parity); }
inline bool barrier_passed(shared_t, int) { return false; }  // so that it is waited for
inline uint32_t clock_now() {
  static uint32_t clock = 0;
  return clock += 1000;
}
inline void fetch_bulk(const void *from, int nbytes) {
  emulator::fetched ^= *(const uint8_t *)from ^ ((const uint8_t *)from)[nbytes - 1];  // must be there
}
inline uint64_t keep_policy() { return 0; }
inline uint64_t pass_policy() { return 0; }
inline void copy_bulk(shared_t to, const void *from, int nbytes, shared_t barrier) {
  emulator::barrier_copy((void *)to, from, nbytes, (uint64_t *)barrier);
}
inline void copy_bulk(shared_t to, const void *from, int nbytes, shared_t barrier, uint64_t) { copy_bulk(to, from, nbytes, barrier); }

// Of a shared address of one's own, that of another CTA of the cluster.
inline shared_t in_cluster(shared_t p, int rank) {
  const int cta = emulator::current->cta;
  return p - (shared_t)emulator::shared_memory(cta) + (shared_t)emulator::shared_memory(cta - emulator::current->rank + rank);
}
inline void copy_bulk_to(shared_t to, const void *from, int nbytes, shared_t barrier, uint32_t ranks) {
  for (int rank = 0; rank < 16; rank++)
    if (ranks >> rank & 1) copy_bulk(in_cluster(to, rank), from, nbytes, in_cluster(barrier, rank));
}
inline void send8(shared_t to, float2 v, shared_t barrier, int rank) {
  memcpy((void *)in_cluster(to, rank), &v, 8);
  emulator::barrier_count((uint64_t *)in_cluster(barrier, rank), 8);
}
inline void barrier_arrive_at(shared_t barrier, int rank) { barrier_arrive(in_cluster(barrier, rank)); }

inline int cluster_rank() { return emulator::current->rank; }
inline int cluster_size() { return emulator::current->cluster_size; }
inline void cluster_arrive() { emulator::arrive_in_cluster(); }
inline void cluster_wait() { emulator::wait_in_cluster(); }
inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
template <class T>
const T *of_cluster_rank(const T *p, int rank) {
  return (const T *)(emulator::shared_memory(emulator::current->cta - emulator::current->rank + rank) +
                     ((const uint8_t *)p - emulator::shared_memory(emulator::current->cta)));
}
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}
inline void store_flagged(void *to, uint64_t data, uint64_t flag) {
  const uint64_t word[2] = {data, flag};
  memcpy(to, word, sizeof word);
}
struct Flagged {
  uint64_t data, flag;
};
inline Flagged load_flagged(const void *from) { return *(const Flagged *)from; }
template <int n, class At>
void ask_words(Flagged (&w)[n], int count, const At &at) {
  for (int i = 0; i < n; i++) w[i] = i < count ? load_flagged(at(i)) : Flagged{0, 0};
}
template <int n, class At>
void await_words(uint64_t (&data)[n], Flagged (&w)[n], int count, uint64_t flag, const At &at) {
  for (int i = 0; i < n; i++) {
    data[i] = w[i].data;
    if (i >= count || w[i].flag == flag) continue;
    const uint64_t *word = (const uint64_t *)at(i);
    emulator::wait_for(word + 1, flag);
    data[i] = *word;
  }
}
template <int n, class At>
void await_words(uint64_t (&data)[n], int count, uint64_t flag, const At &at) {
  Flagged w[n];
  ask_words(w, count, at);
  await_words(data, w, count, flag, at);
}
inline uint64_t await_word(const void *from, uint64_t flag) {
  emulator::wait_for((const uint64_t *)from + 1, flag);
  return *(const uint64_t *)from;
}
template <class T>
void work_out(T &) {}
inline void fence_bulk_copies() {}
inline int thread_now() { return (int)threadIdx.x; }
inline void sync_threads(int id, int n_threads) { emulator::sync_cta(id, n_threads); }

}  // namespace tl
