// Attention for few rows: a cluster of CTAs shares out the key chunks of up to 16 queries that read the same keys (heads of
// one KV head, and rows of one sequence), in rounds of two chunks a CTA, and merges them in order through distributed
// shared memory, each CTA a slice of the output. Fused for one row: q, k and v are normed, turned, rounded or quantised, and stored here.
// Accumulation and merging in float32, by the functions of attend.cuh.
#include "attend_split_body.cuh"

#include <algorithm>

namespace tl {
namespace {

template <class Kv>
__global__ void __launch_bounds__(kThreads, 2) attend_split(const AttendArgs a) {
  let_next_kernel_start();
  attend_unit<Kv>(a, shared_memory<uint8_t>(), blockIdx.x / cluster_size(), [] { wait_for_previous_kernel(); });
}

// Launches with as many queries a tile as the device's shared memory holds.
template <class Kv>
void launch_with(const Launcher &launcher, AttendArgs args) {
  const int group = args.place.n_heads / args.place.n_kv_heads;
  const bool many = args.rows_of_tile > 1;
  Split s;
  for (args.queries_of_tile = kTileQueries;; args.queries_of_tile /= 2) {
    if (args.queries_of_tile == 0) throw std::length_error("attention over heads of this size needs more shared memory than this device has");
    args.rows_of_tile = many ? std::max(1, args.queries_of_tile / group) : 1;
    const int n_units = (many ? (args.place.rows.n_rows + args.rows_of_tile - 1) / args.rows_of_tile : args.place.rows.n_rows) * subtiles(args) *
                        args.place.n_kv_heads;
    int cluster = launcher.context.code >= kCodeSm90 ? 8 : 1;
    while (cluster > 1 && n_units * cluster > 2 * launcher.context.n_multiprocessors) cluster /= 2;
    const int nbytes = lay_out<Kv>(s, nullptr, args.place.kv, tile_queries(args), cluster, 0);
    if (nbytes <= launcher.context.max_shared_nbytes)
      return launcher.launch(attend_split<Kv>, Shape{dim3(n_units * cluster), kThreads, nbytes, cluster}, args);
  }
}

}  // namespace

void launch_attend_split(const Launcher &launcher, const AttendArgs &args) {
  switch (args.place.kv.dtype) {
    case TL_BF16: return launch_with<Bf16>(launcher, args);
    case TL_F16: return launch_with<F16>(launcher, args);
    case TL_INT8: return launch_with<Codes<8>>(launcher, args);
    default: return launch_with<Codes<4>>(launcher, args);
  }
}

}  // namespace tl
