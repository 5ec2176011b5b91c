// q, k and v of several rows from the product's outputs to the q buffer and the KV pages; see place.cuh. A warp a head.
#include "place.cuh"

namespace tl {
namespace {

// 1 / rms over all heads of q or of k of a row (TL_QK_NORM_FULL).
TL_DEVICE float inverse_of_all(const PlaceArgs &a, int row, int first_head, int n_heads, float *partial) {
  const float *from = a.qkv + ((int64_t)row * (a.n_heads + 2 * a.n_kv_heads) + first_head) * a.kv.head_pad;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < n_heads * a.head_dim; i += kThreads) {
    const float x = from[i / a.head_dim * a.kv.head_pad + i % a.head_dim];
    sum = fmaf(x, x, sum);
  }
  return inverse_rms(block_sum(sum, partial), n_heads * a.head_dim, a.eps);
}

// A raw head from the sums of its chunks, by a warp.
TL_DEVICE void add_head(const PlaceArgs &a, int row, int head, float *v) {
  __syncwarp();
  for (int i = lane_id() * 4; i < a.kv.head_pad; i += 128) {
    float y[4];
    add_chunks<8>(y, a.sums, row, head * a.kv.head_pad + i);
    *(float4 *)(v + i) = make_float4(y[0], y[1], y[2], y[3]);
  }
  __syncwarp();
}

// Hands a finished head on as codes.
template <class Kv>
TL_DEVICE void hand_codes(const PlaceArgs &a, int row, int head, const float *v, int page, int slot) {
  const int n_qk = a.n_heads + a.n_kv_heads, head_pad = a.kv.head_pad, pad = code_pad(head_pad), dim = lane_id() * 8;
  float x[8];
  load_dims(x, v, head_pad, lane_id());
  turn_head(x, a.turn, a.turn_scale, lane_id());
  if (head < a.n_heads) {
    const QueryCodes<8> q = query_codes(x);
    uint8_t *to = (uint8_t *)a.q + ((int64_t)row * a.n_heads + head) * query_nbytes(Kv::kDtype, head_pad);
    if (dim < pad) *(uint2 *)(to + dim) = make_uint2(q.high[0], q.high[1]), *(uint2 *)(to + pad + dim) = make_uint2(q.low[0], q.low[1]);
    if (dim == 0) *(float *)(to + 2 * pad) = q.scale;
    return;
  }
  const bool is_key = head < n_qk;
  const uint4 codes = kept_codes(is_key || Kv::kValueBits == 8 ? codes_int8(x) : codes_int4(x, a.head_dim, lane_id()));
  if (page < 0 || dim >= head_pad) return;
  store_codes<Kv>(is_key ? k_of(a.kv, page, head - a.n_heads) : v_of(a.kv, page, head - n_qk), head_pad, slot, codes, !is_key);
}

template <class Kv>
__global__ void __launch_bounds__(kThreads, 2) place(const PlaceArgs a) {
  float *shared = shared_memory<float>(), *v = shared + warp_id() * kMaxHeadDim, *partial = shared + kWarps * kMaxHeadDim;
  let_next_kernel_start();
  touch_arguments(a);
  const int row = blockIdx.x, pos = a.rows.pos[row], n_heads = a.n_heads + 2 * a.n_kv_heads;
  const int page = pos < 0 ? -1 : page_of(a.rows, a.rows.seq[row], pos);
  Pairs angle;
  load_angles(angle, a, max(pos, 0));
  wait_for_previous_kernel();
  float inverse_q = 0.0f, inverse_k = 0.0f;
  if (a.qk_norm == TL_QK_NORM_FULL) {
    if (!a.first_head) inverse_q = inverse_of_all(a, row, 0, a.n_heads, partial);
    inverse_k = inverse_of_all(a, row, a.n_heads, a.n_kv_heads, partial + kWarps);
  }
  for (int head = a.first_head + blockIdx.y * kWarps + warp_id(); head < n_heads; head += gridDim.y * kWarps) {
    const float *from = a.sums.data ? v : raw_head(a, row, head);
    if (a.sums.data) add_head(a, row, head, v);
    finish_head(a, from, head, angle, head < a.n_heads ? inverse_q : inverse_k, v);
    if constexpr (Kv::kQuantised) {
      hand_codes<Kv>(a, row, head, v, page, pos % TL_PAGE_POSITIONS);
    } else {
      const int dim = lane_id() * 8;
      if (dim < a.kv.head_pad) store_eight(a, row, head, dim, v + dim, page, pos % TL_PAGE_POSITIONS);
    }
  }
}

}  // namespace

void launch_place(const Launcher &launcher, const PlaceArgs &args) {
  // A norm over all heads needs them in one CTA.
  const int n_heads = args.n_heads + 2 * args.n_kv_heads - args.first_head;
  const int n_parts = args.qk_norm == TL_QK_NORM_FULL ? 1 : (n_heads + kWarps - 1) / kWarps;
  const Shape shape{dim3(args.rows.n_rows, n_parts), kThreads, (kWarps * kMaxHeadDim + 2 * kWarps) * 4, 1};
  switch (args.kv.dtype) {
    case TL_INT8: return launcher.launch(place<Codes<8>>, shape, args);
    case TL_INT4: return launcher.launch(place<Codes<4>>, shape, args);
    default: return launcher.launch(place<F16>, shape, args);  // every float type
  }
}

}  // namespace tl
