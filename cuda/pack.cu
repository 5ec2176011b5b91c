// Row-major weights to the packed layout (layout.cuh), value by value; and two small kernels: an activation over a vector,
// and a plain read of memory that shows how fast it goes.
#include "pack.cuh"

#include <algorithm>

#include "math.cuh"

namespace tl {
namespace {

// One CTA a source row.
__global__ void __launch_bounds__(kThreads) pack(const PackArgs a) {
  const tl_pack_rows &from = a.rows;
  const int r = blockIdx.x, n_in = a.to.n_in, dtype = a.to.dtype;
  const int packed = r / from.block * from.stride + from.offset + r % from.block;
  const int64_t first = (int64_t)r * n_in;
  uint8_t *data = const_cast<uint8_t *>(a.to.data);
  for (int k = threadIdx.x; k < n_in; k += kThreads) {
    uint8_t *to = data + element_offset(dtype, n_in, packed, k);
    if (dtype == TL_F32)
      *(uint32_t *)to = ((const uint32_t *)from.src)[first + k];
    else if (dtype == TL_INT8)
      *to = (uint8_t)(((const int8_t *)from.src)[first + k] + kInt8Offset);
    else
      *(uint16_t *)to = ((const uint16_t *)from.src)[first + k];
  }
  if (dtype == TL_INT8 && (int)threadIdx.x < pad16(n_in) - n_in) data[element_offset(dtype, n_in, packed, n_in + threadIdx.x)] = kInt8Offset;
  const int n_groups = dtype == TL_INT8 ? n_scale_groups(n_in, a.to.group_size) : 0;
  for (int g = threadIdx.x; g < n_groups; g += kThreads)
    const_cast<float *>(a.to.scales)[scale_offset(a.to, packed, g)] = from.scales[(int64_t)r * n_groups + g] * kInt8Parts;
}

__global__ void __launch_bounds__(kThreads) activation(const ActivationArgs a) {
  for (int64_t i = blockIdx.x * (int64_t)kThreads + threadIdx.x; i < a.n; i += (int64_t)gridDim.x * kThreads)
    a.y[i] = a.gate ? activate(a.act, a.gate[i]) * a.up[i] : activate(a.act, a.up[i]);
}

__global__ void __launch_bounds__(kThreads) read(const ReadArgs a) {
  uint32_t seen = 0;
  const int64_t step = (int64_t)gridDim.x * kThreads;
  for (int r = 0; r < a.n_repeats; r++)
    for (int64_t i = blockIdx.x * (int64_t)kThreads + threadIdx.x; i < a.n; i += 4 * step)
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (i + j * step < a.n) {
          const uint4 v = a.data[i + j * step];
          seen ^= v.x ^ v.y ^ v.z ^ v.w;
        }
  if (seen == 0x12345678u && a.sink) *a.sink = seen;
}

}  // namespace

void launch_pack(const Launcher &launcher, const PackArgs &args) { launcher.launch(pack, Shape{dim3(args.rows.n_rows), kThreads, 0, 1}, args); }

void launch_activation(const Launcher &launcher, const ActivationArgs &args) {
  const int64_t n = std::min<int64_t>((args.n + kThreads - 1) / kThreads, 4096);
  launcher.launch(activation, Shape{dim3((unsigned)n), kThreads, 0, 1}, args);
}

void launch_read(const Launcher &launcher, const ReadArgs &args) {
  launcher.launch(read, Shape{dim3(launcher.context.n_multiprocessors * 4), kThreads, 0, 1}, args);
}

}  // namespace tl
