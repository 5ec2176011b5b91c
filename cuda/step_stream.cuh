// How a step as one kernel reads memory: a warp of its own asks for the weights of the CTA's panels and its pages of K and V, task
// after task, through one ring of shared memory, and never waits for anything but a free slot. Whatever the other warps wait for,
// memory goes on.
#pragma once

#include "step_task.cuh"

namespace tl {

constexpr int kSlotBytes = 8192;  // of the ring: an item of weights, or a page of a KV head (two slots where that is larger)

#if TL_HOPPER

// A slot, and the phase that its barriers are in.
struct RingPlace {
  int slot = 0, parity = 0;
  TL_DEVICE_MEMBER void advance(int n, int n_slots) {
    slot += n;
#pragma unroll 1
    while (slot >= n_slots) slot -= n_slots, parity ^= 1;
  }
};

struct Ring {
  shared_t slots, full, empty;
  int n_slots;
  TL_DEVICE_MEMBER Ring(shared_t shared, int n_slots)
      : slots(shared), full(shared + n_slots * kSlotBytes), empty(full + n_slots * 8), n_slots(n_slots) {}
  // By one thread, before a barrier of the CTA.
  TL_DEVICE_MEMBER void init() const {
    for (int i = 0; i < n_slots; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, 1);
    barrier_init_done();
  }
  TL_DEVICE_MEMBER shared_t wait(const RingPlace &at) const {
    barrier_wait(full + at.slot * 8, at.parity);
    return slots + at.slot * kSlotBytes;
  }
  // By a warp that has read a slot.
  TL_DEVICE_MEMBER void done(const RingPlace &at) const {
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(empty + at.slot * 8);
  }
  TL_DEVICE_MEMBER void request(RingPlace &at, const uint8_t *from, int nbytes) const {
    barrier_wait(empty + at.slot * 8, at.parity ^ 1);
    barrier_arrive_expecting(full + at.slot * 8, nbytes);
    copy_bulk(slots + at.slot * kSlotBytes, from, nbytes, full + at.slot * 8);
    at.advance(1, n_slots);
  }
};

TL_BOTH int page_slots(const KvLayer &kv) { return 2 * kv.k_nbytes > kSlotBytes ? 2 : 1; }

// The panels of a product, item by item.
TL_DEVICE void request_weights(const Ring &ring, RingPlace &at, const StepTask &t) {
  const StepProduct &p = t.product;
  const CtaShare share = share_of(p, blockIdx.x);
  const int block_bytes = p.weight.dtype == TL_INT8 ? 256 : 512, item_bytes = p.item_chunks * (TL_K_CHUNK / 16) * block_bytes;
  const int panel_bytes = p.n_blocks * block_bytes;
  const uint8_t *panel = p.weight.data + (int64_t)share.first_panel * panel_bytes;
#pragma unroll 1
  for (int i = 0; i < share.n_panels; i++, panel += panel_bytes)
#pragma unroll 1
    for (int begin = 0; begin < panel_bytes; begin += item_bytes) ring.request(at, panel + begin, min(item_bytes, panel_bytes - begin));
}

// The pages that the CTA's chunks read, chunk by chunk.
TL_DEVICE void request_pages(const Ring &ring, RingPlace &at, const StepTask &t, const Keys &keys, const int32_t *table) {
  const StepAttention &a = t.attention;
  const KvLayer &kv = a.attend.place.kv;
#pragma unroll 1
  for (int unit = blockIdx.x / a.n_ranks; unit < a.n_units; unit += gridDim.x / a.n_ranks) {
    const int kv_head = unit % a.attend.place.n_kv_heads;
    const CtaChunks chunks = chunks_of(a, keys, blockIdx.x % a.n_ranks);
#pragma unroll 1
    for (int chunk = chunks.first; chunk < chunks.end; chunk += a.n_ranks) {
      int page[kPagesOfChunk];
#pragma unroll
      for (int j = 0; j < kPagesOfChunk; j++) page[j] = page_is_read(keys, chunk, j) ? table[chunk * kPagesOfChunk + j] : -1;
#pragma unroll
      for (int j = 0; j < kPagesOfChunk; j++) {
        if (page[j] < 0) continue;
        const uint8_t *k = k_of(kv, page[j], kv_head);
        if (page_slots(kv) == 1) {
          ring.request(at, k, 2 * kv.k_nbytes);
        } else {
          ring.request(at, k, kv.k_nbytes);
          ring.request(at, k + kv.k_nbytes, kv.k_nbytes);
        }
      }
    }
  }
}

#endif

}  // namespace tl
