// Attention with float32 K and V, for tests: one CTA a query, plain fused multiply-adds, a thread a key for the scores and
// a thread a dim for P V; chunks, groups and merging as in attend.cuh.
#include "attend.cuh"

namespace tl {
namespace {

constexpr float kNone = kMasked;

struct State {
  float m, l, o;  // o: of this thread's dim
};

TL_DEVICE void absorb(State &earlier, const State &later) {
  if (later.m == kNone) return;
  const MergeFactors f = merge_factors(earlier.m, later.m);
  earlier.o = merge_value(earlier.o, later.o, f);
  earlier.l = merge_value(earlier.l, later.l, f);
  earlier.m = fmaxf(earlier.m, later.m);
}

// One chunk: `p` is TL_KEY_CHUNK shared floats.
TL_DEVICE State attend_chunk(const AttendArgs &a, const float *q, const int32_t *table, int kv_head, int chunk, Keys keys, float *p) {
  const int head_pad = a.place.kv.head_pad, key = threadIdx.x, pos = chunk * TL_KEY_CHUNK + key, d = threadIdx.x;
  __syncthreads();  // the chunk before is read
  if (key < TL_KEY_CHUNK) {
    float s = kNone;
    if (pos >= keys.first && pos < keys.end) {
      const float *k = (const float *)k_of(a.place.kv, table[pos / TL_PAGE_POSITIONS], kv_head) + pos % TL_PAGE_POSITIONS * head_pad;
      float dot = 0.0f;
      for (int i = 0; i < a.place.head_dim; i++) dot = fmaf(q[i], k[i], dot);
      s = dot * a.scale;
    }
    p[key] = s;
  }
  __syncthreads();
  float m = kNone;
  for (int i = 0; i < TL_KEY_CHUNK; i++) m = fmaxf(m, p[i]);
  __syncthreads();
  if (key < TL_KEY_CHUNK) p[key] = p[key] == kNone ? 0.0f : exp2_fast(p[key] - m);
  __syncthreads();
  State s{m, 0.0f, 0.0f};
  for (int i = 0; i < TL_KEY_CHUNK; i++) {
    const int at = chunk * TL_KEY_CHUNK + i;
    if (at < keys.first || at >= keys.end) continue;
    s.l = s.l + p[i];
    const float *v = (const float *)v_of(a.place.kv, table[at / TL_PAGE_POSITIONS], kv_head) + at % TL_PAGE_POSITIONS * head_pad;
    if (d < head_pad) s.o = fmaf(p[i], v[d], s.o);
  }
  return s;
}

__global__ void __launch_bounds__(kThreads) attend_f32(const AttendArgs a) {
  float *q = shared_memory<float>(), *p = q + kMaxHeadDim;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Rows &r = a.place.rows;
  const int row = blockIdx.x, head = blockIdx.y, head_dim = a.place.head_dim, d = threadIdx.x;
  const int kv_head = head / (a.place.n_heads / a.place.n_kv_heads), pos = r.pos[row];
  if (d < a.place.kv.head_pad) q[d] = ((const float *)a.place.q)[((int64_t)row * a.place.n_heads + head) * a.place.kv.head_pad + d];
  const Keys keys = pos < 0 ? Keys{0, 0} : keys_of(pos, a.window);
  const int32_t *table = r.page_table[r.seq[row]] + (int64_t)r.stage * r.table_stride;
  const State empty{kNone, 0.0f, 0.0f};
  State group = empty, total = empty;
  for (int chunk = keys.first / TL_KEY_CHUNK; chunk * TL_KEY_CHUNK < keys.end; chunk++) {
    if (chunk % TL_CHUNK_GROUP == 0) {
      absorb(total, group);
      group = empty;
    }
    absorb(group, attend_chunk(a, q, table, kv_head, chunk, keys, p));
  }
  absorb(total, group);
  if (d < head_dim) store_operand(a.out, row, head * head_dim + d, total.l != 0.0f ? total.o * (1.0f / total.l) : 0.0f);
  const int q_dim = a.place.n_heads * head_dim;
  if (head == a.place.n_heads - 1 && q_dim + d < a.out.n_in) store_operand(a.out, row, q_dim + d, 0.0f);
}

}  // namespace

void launch_attend_f32(const Launcher &launcher, const AttendArgs &args) {
  const Shape shape{dim3(args.place.rows.n_rows, args.place.n_heads), kThreads, (kMaxHeadDim + TL_KEY_CHUNK) * 4, 1};
  launcher.launch(attend_f32, shape, args);
}

}  // namespace tl
