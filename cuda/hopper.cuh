// What sm_90 has and earlier devices lack: barriers in shared memory, bulk copies that they count, registers that warps hand over, clusters.
// Elsewhere a cluster is one CTA.
#pragma once

#include "device.cuh"

namespace tl {

#if TL_HOPPER && !defined(TL_EMULATOR)

TL_DEVICE void barrier_init(shared_t barrier, int n_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(n_arrivals) : "memory");
}
TL_DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
TL_DEVICE void barrier_arrive(shared_t barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
TL_DEVICE void barrier_arrive(shared_t barrier, int n) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n) : "memory");
}
TL_DEVICE void barrier_arrive_expecting(shared_t barrier, int nbytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(nbytes) : "memory");
}
TL_DEVICE void barrier_wait(shared_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra wait;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Whether a wait would end at once.
TL_DEVICE bool barrier_passed(shared_t barrier, int parity) {
  uint32_t passed;
  asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
               : "=r"(passed)
               : "r"(barrier), "r"(parity)
               : "memory");
  return passed;
}
TL_DEVICE uint64_t keep_policy() {
  uint64_t p;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
  return p;
}
TL_DEVICE uint64_t pass_policy() {
  uint64_t p;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  return p;
}
// A whole run of bytes (a multiple of 16) by the copy engine; the barrier counts them.
TL_DEVICE void copy_bulk(shared_t to, const void *from, int nbytes, shared_t barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
               "r"(nbytes), "r"(barrier), "l"(policy)
               : "memory");
}
TL_DEVICE void copy_bulk(shared_t to, const void *from, int nbytes, shared_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(nbytes),
               "r"(barrier)
               : "memory");
}
// To L2, where a copy will find it.
TL_DEVICE void fetch_bulk(const void *from, int nbytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(nbytes) : "memory");
}
TL_DEVICE uint32_t clock_now() {
  uint32_t t;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(t));
  return t;
}
// True for one lane of a warp, which all of it asks for: bulk copies take uniform registers, and a single lane, known to be one, needs no
// loop over lanes for each.
TL_DEVICE bool elected() {
  uint32_t is = 0;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "@one mov.u32 %0, 1;\n"
      "}"
      : "+r"(is));
  return is;
}
// Moves a warpgroup's registers up or down to n a thread, where the target has that.
template <int n>
TL_DEVICE void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
#endif
}
template <int n>
TL_DEVICE void give_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
#endif
}

// ---- clusters

// The same run of bytes to each CTA whose bit of `ranks` is set, at the same place in its shared memory, and counted there.
TL_DEVICE void copy_bulk_to(shared_t to, const void *from, int nbytes, shared_t barrier, uint32_t ranks) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
               "r"(nbytes), "r"(barrier), "h"((uint16_t)ranks)
               : "memory");
}
// Eight bytes to the same place in another CTA's shared memory, counted there: no fence, which waits for all that is under way, and no meeting.
TL_DEVICE void send8(shared_t to, float2 v, shared_t barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there, counted;\n"
      "mapa.shared::cluster.u32 there, %0, %4;\n"
      "mapa.shared::cluster.u32 counted, %3, %4;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%1, %2}, [counted];\n"
      "}" ::"r"(to),
      "f"(v.x), "f"(v.y), "r"(barrier), "r"(rank)
      : "memory");
}
TL_DEVICE void barrier_arrive_at(shared_t barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
TL_DEVICE int cluster_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return (int)r;
}
TL_DEVICE int cluster_size() {
  uint32_t n;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return (int)n;
}
// cluster_sync() in two steps, without an order of memory: after the second every CTA of the cluster has begun.
TL_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
TL_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
TL_DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }
// The address of another CTA's shared variable, from the address of one's own.
template <class T>
TL_DEVICE const T *of_cluster_rank(const T *p, int rank) {
  uint64_t q;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(q) : "l"(p), "r"(rank));
  return (const T *)q;
}

#elif !TL_HOPPER

TL_DEVICE int cluster_rank() { return 0; }
TL_DEVICE int cluster_size() { return 1; }
TL_DEVICE void cluster_sync() { __syncthreads(); }
template <class T>
TL_DEVICE const T *of_cluster_rank(const T *p, int) {
  return p;
}

#endif

}  // namespace tl
