// How gemv.cu's warps read weights: each its K-chunks of a CTA's panels, through a ring of shared memory that fills ahead, by
// bulk copies where the device has them.
#pragma once

#include "weights.cuh"

namespace tl {

constexpr int kSlotBytes = 4096;
constexpr int kHopperSlots = 3, kOlderSlots = 2;  // of a warp's ring
#if TL_HOPPER
constexpr int kSlots = kHopperSlots;
#else
constexpr int kSlots = kOlderSlots;
#endif

// A warp's chunks of a CTA's panels: every kWarps-th, panel after panel.
struct ChunkWalk {
  int chunk, at;  // its chunk, and the byte offset of that
  TL_DEVICE_MEMBER ChunkWalk(int warp, int n_chunks, int chunk_bytes, int panel_bytes) : chunk(warp), at(warp * chunk_bytes) {
    wrap(n_chunks, panel_bytes - n_chunks * chunk_bytes);
  }
  TL_DEVICE_MEMBER void next(int n_chunks, int chunk_bytes, int panel_bytes) {
    chunk += kWarps;
    at += kWarps * chunk_bytes;
    wrap(n_chunks, panel_bytes - n_chunks * chunk_bytes);
  }
  // Into the next panel, which begins `shift` bytes (0 or less) off where a whole last chunk would end.
  TL_DEVICE_MEMBER void wrap(int n_chunks, int shift) {
#pragma unroll 1
    while (chunk >= n_chunks) chunk -= n_chunks, at += shift;
  }
};

// The chunks of a warp, in order, through its ring of kSlots slots. A chunk takes kParts of them, one after another.
template <class W>
struct ChunkStream {
  static constexpr int kChunkBytes = kChunkBlocks * W::kBlockBytes, kParts = kChunkBytes / kSlotBytes;
  const uint8_t *weights;  // the CTA's first panel
  shared_t ring, full;     // of this warp
  int n_chunks, panel_bytes, end;
  ChunkWalk asked;         // what is requested next
  int part = 0, to = 0;    // its part, and the slot it goes to
  int from = 0, parity = 0;  // the slot that is read next, and its barrier's phase

  TL_DEVICE_MEMBER ChunkStream(const uint8_t *weights, int n_chunks, int panel_bytes, int n_panels, int warp, shared_t shared)
      : weights(weights),
        ring(shared + warp * kSlots * kSlotBytes),
        full(shared + kWarps * kSlots * kSlotBytes + warp * kSlots * 8),
        n_chunks(n_chunks),
        panel_bytes(panel_bytes),
        end(n_panels * panel_bytes),
        asked(warp, n_chunks, kChunkBytes, panel_bytes) {
#if TL_HOPPER
    if (lane_id() == 0)
#pragma unroll
      for (int s = 0; s < kSlots; s++) barrier_init(full + s * 8, 1);
    barrier_init_done();
    __syncwarp();
#endif
#pragma unroll 1
    for (int s = 0; s < kSlots; s++) request();
  }

  // Asks for the next part; past the end of a short last chunk it is empty.
  TL_DEVICE_MEMBER void request() {
    if (asked.at < end) {
      const int in_chunk = part * kSlotBytes, left = panel_bytes - asked.chunk * kChunkBytes - in_chunk;
      copy(weights + (uint32_t)(asked.at + in_chunk), min(max(left, 0), kSlotBytes));
    }
#if !TL_HOPPER
    commit_copies();
#endif
    to = to + 1 < kSlots ? to + 1 : 0;
    if (kParts > 1 && ++part < kParts) return;
    part = 0;
    asked.next(n_chunks, kChunkBytes, panel_bytes);
  }

#if TL_HOPPER
  TL_DEVICE_MEMBER void copy(const uint8_t *source, int nbytes) {
    if (lane_id() != 0) return;
    barrier_arrive_expecting(full + to * 8, nbytes);
    if (nbytes) copy_bulk(ring + to * kSlotBytes, source, nbytes, full + to * 8);
  }
#else
  TL_DEVICE_MEMBER void copy(const uint8_t *source, int nbytes) {
    for (int i = lane_id() * 16; i < nbytes; i += 512) copy16_async(ring + to * kSlotBytes + i, source + i);
  }
#endif

  // The part that is read next, once it is there; `done` when the warp has read it.
  TL_DEVICE_MEMBER shared_t wait() {
#if TL_HOPPER
    barrier_wait(full + from * 8, parity);
#else
    wait_copies<kSlots - 1>();
    __syncwarp();
#endif
    return ring + from * kSlotBytes;
  }
  TL_DEVICE_MEMBER void done() {
    if (asked.at < end || !TL_HOPPER) {
      __syncwarp();
      request();
    }
    if (++from < kSlots) return;
    from = 0;
    parity ^= 1;
  }
};

}  // namespace tl
