// How the warps of a step read weights: as in chunk_stream.cuh, but on and on through the products of the whole step, so that
// the memory never waits for a barrier.
#pragma once

#include "chunk_stream.cuh"
#include "gemv_body.cuh"

namespace tl {

// What a product's weights are to the stream; an attention has none.
struct alignas(16) StreamTask {
  const uint8_t *data;
  int32_t n_ctas;  // that have a share
  int32_t units_each, units_more, unit_panels, n_chunks, panel_bytes;
  int32_t parts;  // slots of a chunk
};

// The order of a step's tasks: the first ones, then some that repeat, then the rest.
struct StepOrder {
  int32_t n_first, n_repeated, n_rounds, n_tasks;  // n_tasks: of all three; n_rounds: how often the second run
  TL_DEVICE_MEMBER void next(int &task, int &round) const {
    if (++task != n_first + n_repeated) return;
    round = round + 1 < n_rounds ? round + 1 : 0;
    if (round) task = n_first;
  }
};

#if TL_HOPPER
struct StepStream {
  const StreamTask *tasks;  // in shared memory
  StepOrder order;
  shared_t ring, full;      // of this warp
  int n_slots, cta;
  int task = 0, round = 0;  // where the requests are, and there:
  const uint8_t *weights;
  int n_chunks, panel_bytes, chunk_bytes, parts, end;
  ChunkWalk asked;
  int part = 0, to = 0;
  int from = 0, parity = 0;  // the slot that is read next, and its barrier's phase

  TL_DEVICE_MEMBER StepStream(const StreamTask *tasks, const StepOrder &order, int n_slots, int cta, int warp, shared_t shared)
      : tasks(tasks),
        order(order),
        ring(shared + warp * n_slots * kSlotBytes),
        full(shared + kWarps * n_slots * kSlotBytes + warp * n_slots * 8),
        n_slots(n_slots),
        cta(cta),
        asked(warp, 1 << 30, 0, 0) {
    if (lane_id() == 0)
#pragma unroll 1
      for (int s = 0; s < n_slots; s++) barrier_init(full + s * 8, 1);
    barrier_init_done();
    __syncwarp();
    open(warp);
#pragma unroll 1
    for (int s = 0; s < n_slots; s++) request(warp);
  }

  // Sets out on a task's share.
  TL_DEVICE_MEMBER void open(int warp) {
    const StreamTask &t = tasks[task];
    const CtaShare share = share_of(cta, t.units_each, t.units_more, t.unit_panels);
    weights = t.data + (int64_t)share.first_panel * t.panel_bytes;
    n_chunks = t.n_chunks;
    panel_bytes = t.panel_bytes;
    parts = t.parts;
    chunk_bytes = t.parts * kSlotBytes;
    end = cta < t.n_ctas ? share.n_panels * t.panel_bytes : 0;
    if (end) asked = ChunkWalk(warp, n_chunks, chunk_bytes, panel_bytes);
  }

  // Asks for the next part of this or a later task, if there is one.
  TL_DEVICE_MEMBER void request(int warp) {
#pragma unroll 1
    while (end == 0 || asked.at >= end) {
      if (task + 1 >= order.n_tasks) return;
      order.next(task, round);
      open(warp);
    }
    const int in_chunk = part * kSlotBytes, left = panel_bytes - asked.chunk * chunk_bytes - in_chunk, nbytes = min(max(left, 0), kSlotBytes);
    if (lane_id() == 0) {
      barrier_arrive_expecting(full + to * 8, nbytes);
      if (nbytes) copy_bulk(ring + to * kSlotBytes, weights + (uint32_t)(asked.at + in_chunk), nbytes, full + to * 8);
    }
    to = to + 1 < n_slots ? to + 1 : 0;
    if (++part < parts) return;
    part = 0;
    asked.next(n_chunks, chunk_bytes, panel_bytes);
  }

  // The part that is read next, once it is there; `done` when the warp has read it.
  TL_DEVICE_MEMBER shared_t wait() {
    barrier_wait(full + from * 8, parity);
    return ring + from * kSlotBytes;
  }
  TL_DEVICE_MEMBER void done() {
    __syncwarp();
    request(__shfl_sync(0xffffffffu, warp_id(), 0));
    if (++from < n_slots) return;
    from = 0;
    parity ^= 1;
  }
};
#endif

}  // namespace tl
