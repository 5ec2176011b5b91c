// How a step as one kernel reads memory: a thread of its own asks for each task's description, the weights of the CTA's panels and its
// pages of K and V, task after task, and waits for nothing but free memory. Whatever the other warps wait for, memory goes on: where the ring
// is full, to L2.
#pragma once

#include "step_task.cuh"

namespace tl {

constexpr int kSlotBytes = 8192;  // of the ring: an item of weights, or a page of a KV head
constexpr int kFetchedBytes = 16 * kSlotBytes;  // of weights that may be on their way to L2 while the ring is full
constexpr uint32_t kFetchClocks = 500;          // between two slots of them: about as fast as memory gives each CTA its share
constexpr int kArrivals = 2;      // that free a slot: of the warps of a team, or both of one warp
constexpr int kHeldTasks = 8, kTasksAhead = 4;  // descriptions in shared memory; how far ahead they are asked for

constexpr int kTaskRingBytes = kHeldTasks * (int)(sizeof(StepTask) + 16);

#if TL_HOPPER

// A slot of a ring, and the phase that its barriers are in.
struct RingPlace {
  int slot = 0, parity = 0;
  TL_DEVICE_MEMBER void next(int n_slots) {
    if (++slot == n_slots) slot = 0, parity ^= 1;
  }
  TL_DEVICE_MEMBER void advance(int n, int n_slots, uint32_t inverse) {
    slot += n;
    const int turns = quotient(slot, inverse);
    slot -= turns * n_slots;
    parity ^= turns & 1;
  }
};

struct Ring {
  shared_t slots, full, empty;
  int n_slots;
  uint32_t inverse;  // of n_slots
  TL_DEVICE_MEMBER Ring(shared_t shared, int n_slots, uint32_t inverse)
      : slots(shared), full(shared + n_slots * kSlotBytes), empty(full + n_slots * 8), n_slots(n_slots), inverse(inverse) {}
  // By one thread, before a barrier of the CTA.
  TL_DEVICE_MEMBER void init() const {
    for (int i = 0; i < n_slots; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, kArrivals);
  }
  TL_DEVICE_MEMBER shared_t address(const RingPlace &at) const { return slots + at.slot * kSlotBytes; }
  // Until what was asked for is there. A barrier tells only its latest phase from the one before it, so that the slot's last use must
  // have ended first; who waits is never two uses ahead, see run_product and run_attention.
  TL_DEVICE_MEMBER shared_t wait(const RingPlace &at) const {
    barrier_wait(empty + at.slot * 8, at.parity ^ 1);
    barrier_wait(full + at.slot * 8, at.parity);
    return address(at);
  }
  // Whether that would not wait, asked in the same order.
  TL_DEVICE_MEMBER bool is_there(const RingPlace &at) const {
    const bool emptied = barrier_passed(empty + at.slot * 8, at.parity ^ 1), filled = barrier_passed(full + at.slot * 8, at.parity);
    return emptied & filled;
  }
  // By one lane, n times for each slot in all: its warp has read the slot.
  TL_DEVICE_MEMBER void free(const RingPlace &at, int n) const { barrier_arrive(empty + at.slot * 8, n); }
};

// What the streaming thread asks for, slot after slot.
struct Requests {
  const Ring &ring;
  int left;         // that may be asked for before any has arrived
  uint64_t policy;  // what is read once does not drive out what CTAs hand to each other
  RingPlace at, arrives;         // where the next one goes, and which one must be there by then
  const uint8_t *fetched, *end;  // of the weights that come next: up to where L2 has been asked for them, and where they end
  uint32_t asked;                // clock at the last request of either kind
  TL_DEVICE_MEMBER Requests(const Ring &ring, int in_flight, uint64_t policy)
      : ring(ring), left(in_flight), policy(policy), fetched(nullptr), end(nullptr), asked(0) {}
  TL_DEVICE_MEMBER void await_one() {
    barrier_wait(ring.full + arrives.slot * 8, arrives.parity);
    arrives.next(ring.n_slots);
  }
  // Until the next slot is free, where `from` goes. Memory goes on meanwhile: what follows goes to L2, no faster than it would come here.
  TL_DEVICE_MEMBER void await_slot(const uint8_t *from) {
    if (fetched < from) fetched = from;
    const shared_t empty = ring.empty + at.slot * 8;
    while (!barrier_passed(empty, at.parity ^ 1)) {
      if (fetched >= end || fetched - from >= kFetchedBytes) return barrier_wait(empty, at.parity ^ 1);
      const uint32_t now = clock_now();
      if (now - asked < kFetchClocks) continue;
      const int nbytes = (int)min((int64_t)kSlotBytes, (int64_t)(end - fetched));
      fetch_bulk(fetched, nbytes);
      fetched += nbytes;
      asked = now;
    }
  }
  TL_DEVICE_MEMBER void request(const uint8_t *from, int nbytes) {
    if (left)
      left--;
    else
      await_one();
    await_slot(from);
    asked = clock_now();
    barrier_arrive_expecting(ring.full + at.slot * 8, nbytes);
    copy_bulk(ring.address(at), from, nbytes, ring.full + at.slot * 8, policy);
    at.next(ring.n_slots);
  }
};

// The descriptions of the tasks that run or are read for.
struct TaskRing {
  StepTask *tasks;
  shared_t full, empty;
  TL_DEVICE_MEMBER explicit TaskRing(uint8_t *shared)
      : tasks((StepTask *)shared), full(shared_of(shared + kHeldTasks * sizeof(StepTask))), empty(full + kHeldTasks * 8) {}
  TL_DEVICE_MEMBER void init() const {
    for (int i = 0; i < kHeldTasks; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, 1);
  }
  TL_DEVICE_MEMBER const StepTask &wait(uint32_t n) const {
    barrier_wait(full + n % kHeldTasks * 8, n / kHeldTasks % 2);
    return tasks[n % kHeldTasks];
  }
  TL_DEVICE_MEMBER void free(uint32_t n) const { barrier_arrive(empty + n % kHeldTasks * 8, 1); }
  TL_DEVICE_MEMBER void request(uint32_t n, const StepTask *from) const {
    const uint32_t slot = n % kHeldTasks;
    barrier_wait(empty + slot * 8, n / kHeldTasks % 2 ^ 1);
    barrier_arrive_expecting(full + slot * 8, sizeof(StepTask));
    copy_bulk(shared_of(tasks + slot), from, sizeof(StepTask), full + slot * 8);
  }
};

// The panels of a product, item by item.
TL_DEVICE void request_weights(Requests &requests, const StepProduct &p) {
  const CtaShare share = share_of(p.head, blockIdx.x);
  const int block_bytes = p.head.dtype == TL_INT8 ? 256 : 512, item_bytes = p.item_chunks * (TL_K_CHUNK / 16) * block_bytes;
  const int panel_bytes = p.head.n_blocks * block_bytes;
  const uint8_t *panel = p.weight.data + (int64_t)share.first_panel * panel_bytes;
  requests.fetched = panel;
  requests.end = panel + (int64_t)share.n_panels * panel_bytes;
#pragma unroll 1
  for (int i = 0; i < share.n_panels; i++, panel += panel_bytes)
#pragma unroll 1
    for (int begin = 0; begin < panel_bytes; begin += item_bytes) requests.request(panel + begin, min(item_bytes, panel_bytes - begin));
}

// The pages that the CTA's chunks read, chunk by chunk.
TL_DEVICE void request_pages(Requests &requests, const StepAttention &a, const AttentionShape &shape, const CtaPlace &cta, const Keys &keys,
                             const int32_t *table) {
  const KvLayer &kv = a.attend.place.kv;
  const KeyChunks chunks = chunks_of(keys);
  requests.end = nullptr;
#pragma unroll 1
  for (int unit = cta.unit; unit < shape.n_units; unit += shape.n_strides) {
    const int kv_head = unit < shape.n_kv_heads ? unit : unit % shape.n_kv_heads;
#pragma unroll 1
    for (int chunk = chunks.first + cta.rank; chunk < chunks.end; chunk += shape.n_ranks) {
      const PagesRead read = pages_of(keys, chunk);
      const int32_t *const numbers = table + chunk * kPagesOfChunk + read.first;
      int page[kPagesOfChunk];  // all numbers are read at once
#pragma unroll
      for (int j = 0; j < kPagesOfChunk; j++) page[j] = j < read.n ? numbers[j] : 0;
#pragma unroll
      for (int j = 0; j < kPagesOfChunk; j++)
        if (j < read.n) requests.request(k_of(kv, page[j], kv_head), kv.k_nbytes + kv.v_nbytes);
    }
  }
}

#endif

}  // namespace tl
