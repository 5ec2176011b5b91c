// A device as the host sees it, and launching kernels on it.
#pragma once

#include <stdexcept>
#include <string>
#include <unordered_map>

#include "device.cuh"
#include "tinyloop.h"

struct tl_context {
  int device;
  int n_multiprocessors;
  int max_shared_nbytes;  // that one CTA may take
  bool hopper;            // whether the code that was loaded is Hopper's: it may be sm_80's on a newer device
  int major, minor;
  char name[64];
  std::unordered_map<const void *, int> shared_limits;  // what kernels were allowed so far
};

namespace tl {

struct DeviceError : std::runtime_error {
  DeviceError(const std::string &what, cudaError_t error) : std::runtime_error(what + ": " + cudaGetErrorString(error)), error(error) {}
  cudaError_t error;
};

inline void require(cudaError_t error, const char *what) {
  if (error != cudaSuccess) {
    cudaGetLastError();
    throw DeviceError(what, error);
  }
}

struct Shape {
  dim3 grid;
  int n_threads;
  int shared_nbytes;
  int cluster;  // CTAs of a cluster along x; 1 for none
};

// Launches the kernels of one batch: the first waits for everything before it, the others start early and wait inside.
struct Launcher {
  tl_context &context;
  cudaStream_t stream;
  mutable bool dependent = false;

  template <class Args>
  void launch(void (*kernel)(Args), const Shape &shape, const Args &args) const {
#if defined(TL_EMULATOR)
    emulator::run(shape.grid, shape.n_threads, shape.shared_nbytes, shape.cluster, [&] { kernel(args); });
#else
    int &limit = context.shared_limits[(const void *)kernel];
    if (shape.shared_nbytes > limit) {
      if (shape.shared_nbytes > context.max_shared_nbytes) throw std::length_error("a kernel needs more shared memory than this device has");
      require(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_nbytes), "sizing shared memory");
      limit = shape.shared_nbytes;
    }
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    config.gridDim = shape.grid;
    config.blockDim = dim3(shape.n_threads);
    config.dynamicSmemBytes = shape.shared_nbytes;
    config.stream = stream;
    config.attrs = attributes;
    if (shape.cluster > 1) {
      cudaLaunchAttribute &a = attributes[config.numAttrs++];
      a.id = cudaLaunchAttributeClusterDimension;
      a.val.clusterDim.x = shape.cluster;
      a.val.clusterDim.y = a.val.clusterDim.z = 1;
    }
    if (dependent && context.hopper) {
      cudaLaunchAttribute &a = attributes[config.numAttrs++];
      a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      a.val.programmaticStreamSerializationAllowed = 1;
    }
    require(cudaLaunchKernelEx(&config, kernel, args), "launching a kernel");
#endif
    dependent = true;
  }
};

}  // namespace tl
