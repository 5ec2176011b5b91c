// A device as the host sees it, and launching kernels on it.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "device.cuh"
#include "tinyloop.h"

namespace tl {
enum Code { kCodeSm80 = 1, kCodeSm90 = 2, kCodeSm90a = 3 };  // which of the build's targets was loaded
}

struct tl_context {
  int device;
  int n_multiprocessors;
  int max_shared_nbytes;  // that one CTA may take
  int code;               // tl::Code; it may be sm_80's on a newer device
  bool overlaps;          // kernels may start before the one before them has ended
  bool steps;             // the kernels of a one-row step run as one (step.cu)
  int major, minor;
  char name[64];
  std::unordered_set<const void *> prepared;            // kernels that may have all shared memory
  std::unordered_map<const void *, int> at_once;        // of kernels that were asked for: clusters that run at once
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
  bool together = false;  // all CTAs run at once
};

// Launches the kernels of one batch: the first waits for everything before it, the others start early and wait inside.
struct Launcher {
  tl_context &context;
  cudaStream_t stream;
  mutable bool dependent = false;

  template <class Args>
  void launch(void (*kernel)(Args), const Shape &shape, const Args &args) const {
#if defined(TL_EMULATOR)
    emulator::launch(shape.grid, shape.n_threads, shape.shared_nbytes, shape.cluster, shape.together, [=] { kernel(args); });
#else
    prepare((const void *)kernel, shape.shared_nbytes);
    cudaLaunchAttribute attributes[3];
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
    if (dependent && context.overlaps && !shape.together) {
      cudaLaunchAttribute &a = attributes[config.numAttrs++];
      a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      a.val.programmaticStreamSerializationAllowed = 1;
    }
    if (shape.together) {
      cudaLaunchAttribute &a = attributes[config.numAttrs++];
      a.id = cudaLaunchAttributeCooperative;
      a.val.cooperative = 1;
    }
    require(cudaLaunchKernelEx(&config, kernel, args), "launching a kernel");
#endif
    dependent = true;
  }

  // How many clusters of a kernel run at once.
  template <class Args>
  int clusters_at_once(void (*kernel)(Args), const Shape &shape) const {
    int &n = context.at_once[(const void *)kernel];
    if (n) return n;
#if defined(TL_EMULATOR)
    n = std::max(1, 6 / shape.cluster);  // so that tests see both wide and narrow clusters
#else
    prepare((const void *)kernel, shape.shared_nbytes);
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = shape.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = shape.grid;
    config.blockDim = dim3(shape.n_threads);
    config.dynamicSmemBytes = shape.shared_nbytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    require(cudaOccupancyMaxActiveClusters(&n, kernel, &config), "asking how many clusters run at once");
    if (n <= 0) throw std::length_error("a kernel's clusters do not fit this device");
#endif
    return n;
  }

 private:
#if !defined(TL_EMULATOR)
  // Lets a kernel have as much shared memory as there is: the limit is the process's, and another model that needs less must not lower it.
  // All kernels ask for the same split between that and L1: an SM changes it only when it is empty, so that kernels which differ could not
  // overlap.
  void prepare(const void *kernel, int shared_nbytes) const {
    if (shared_nbytes > context.max_shared_nbytes) throw std::length_error("a kernel needs more shared memory than this device has");
    if (context.prepared.count(kernel)) return;
    require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, context.max_shared_nbytes), "sizing shared memory");
    require(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared), "sizing shared memory");
    context.prepared.insert(kernel);
  }
#endif
};

}  // namespace tl
