// Opening a device, short-lived memory, timing; see host.h.
#include "host.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <memory>

namespace tl {
namespace {

// Never run: its shared memory tells which target's code the driver loaded.
__global__ void probe_code() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kCode = kCodeSm90a;
#elif TL_HOPPER
  constexpr int kCode = kCodeSm90;
#else
  constexpr int kCode = kCodeSm80;
#endif
  __shared__ volatile uint8_t used[kCode * 16];
  used[threadIdx.x] = 0;
}

}  // namespace

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

tl_status open_device(int ordinal, tl_context **out, const std::function<tl_status(const char *)> &refuse) {
  char text[256];
  int n_devices = 0, driver = 0;
  const cudaError_t counted = cudaGetDeviceCount(&n_devices);
  if (counted == cudaErrorInsufficientDriver) {
    cudaDriverGetVersion(&driver);
    snprintf(text, sizeof text,
             driver ? "the NVIDIA driver is too old: it supports CUDA %d.%d, and this build needs %d.%d" : "no NVIDIA driver is installed",
             driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    return refuse(text);
  }
  if (counted == cudaErrorNoDevice) return refuse("the NVIDIA driver sees no device");
  require(counted, "asking for devices");
  if (ordinal < 0 || ordinal >= n_devices) {
    snprintf(text, sizeof text, "there is no device %d; this machine has %d", ordinal, n_devices);
    return refuse(text);
  }
  cudaDeviceProp props;
  require(cudaGetDeviceProperties(&props, ordinal), "asking the device");
  if (props.major < 8) {
    snprintf(text, sizeof text, "%.60s has compute capability %d.%d, and tinyloop needs 8.0 or more", props.name, props.major, props.minor);
    return refuse(text);
  }
  require(cudaSetDevice(ordinal), "choosing the device");
  cudaFuncAttributes code;
  const cudaError_t loaded = cudaFuncGetAttributes(&code, (const void *)probe_code);
  if (loaded == cudaErrorNoKernelImageForDevice || loaded == cudaErrorInvalidDeviceFunction || loaded == cudaErrorUnsupportedPtxVersion) {
    cudaGetLastError();
    snprintf(text, sizeof text, "this build has no code for %.60s (compute capability %d.%d); build with TINYLOOP_CUDA_ARCHS=%d%d", props.name,
             props.major, props.minor, props.major, props.minor);
    return refuse(text);
  }
  require(loaded, "loading the kernels");
  std::unique_ptr<tl_context> c(new tl_context{});
  c->device = ordinal;
  c->n_multiprocessors = props.multiProcessorCount;
  c->max_shared_nbytes = (int)props.sharedMemPerBlockOptin;
  c->code = (int)code.sharedSizeBytes / 16;
  c->overlaps = c->code >= kCodeSm90 && !getenv("TINYLOOP_CUDA_SERIAL");  // set it to time kernels one by one
  const char *steps = getenv("TINYLOOP_CUDA_STEP");
  c->steps = c->code >= kCodeSm90 && props.cooperativeLaunch && !(steps && !strcmp(steps, "0"));
  c->major = props.major;
  c->minor = props.minor;
  snprintf(c->name, sizeof c->name, "%.60s", props.name);
  *out = c.release();
  return TL_OK;
}

void use_device(const tl_context &context) {
  int current = -1;
  if (cudaGetDevice(&current) == cudaSuccess && current == context.device) return;
  require(cudaSetDevice(context.device), "choosing the device");
}

void read_back(const tl_context &context, void *to, const void *from, uint64_t nbytes) {
  use_device(context);
  require(cudaMemcpy(to, from, nbytes, cudaMemcpyDeviceToHost), "reading back");
}

void write_now(const tl_context &context, void *to, const void *from, uint64_t nbytes) {
  use_device(context);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // the caller's capture is of another stream
  require(cudaThreadExchangeStreamCaptureMode(&mode), "writing to the device");
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMemcpyAsync(to, from, nbytes, cudaMemcpyHostToDevice, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (stream) cudaStreamDestroy(stream);
  cudaThreadExchangeStreamCaptureMode(&mode);
  require(error, "writing to the device");
}

TemporaryMemory::TemporaryMemory(uint64_t nbytes, cudaStream_t stream) : stream_(stream) {
  require(cudaMallocAsync(&data, nbytes, stream), "memory for an operation");
  require(cudaMemsetAsync(data, 0, nbytes, stream), "clearing memory");
}

TemporaryMemory::~TemporaryMemory() {
  if (data) cudaFreeAsync(data, stream_);
}

double time_on_device(cudaStream_t stream, const std::function<void()> &enqueue) {
  cudaEvent_t begin, end;
  require(cudaEventCreate(&begin), "making an event");
  require(cudaEventCreate(&end), "making an event");
  enqueue();
  require(cudaEventRecord(begin, stream), "timing");
  enqueue();
  require(cudaEventRecord(end, stream), "timing");
  require(cudaEventSynchronize(end), "timing");
  float milliseconds = 0.0f;
  require(cudaEventElapsedTime(&milliseconds, begin, end), "timing");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return milliseconds * 1e-3;
}

}  // namespace tl
