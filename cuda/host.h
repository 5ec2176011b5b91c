// What the exports need of the CUDA runtime beside launches: opening a device, short-lived memory, timing.
#pragma once

#include <functional>

#include "launch.h"

namespace tl {

int usable_cpus();

// Makes a context of a device that this build has code for; otherwise returns refuse(text).
tl_status open_device(int ordinal, tl_context **out, const std::function<tl_status(const char *)> &refuse);

// Makes the context's device the calling thread's.
void use_device(const tl_context &context);

// Copies `nbytes` of device memory to the host, waiting for it.
void read_back(const tl_context &context, void *to, const void *from, uint64_t nbytes);

// Copies to device memory and waits for it, also while a stream is being captured.
void write_now(const tl_context &context, void *to, const void *from, uint64_t nbytes);

// Memory for the length of a call, given back in the stream's order.
struct TemporaryMemory {
  TemporaryMemory(uint64_t nbytes, cudaStream_t stream);
  ~TemporaryMemory();
  void *data = nullptr;

 private:
  cudaStream_t stream_;
};

// Seconds that what `enqueue` enqueues takes on the device, after one run to warm up. Waits.
double time_on_device(cudaStream_t stream, const std::function<void()> &enqueue);

}  // namespace tl
