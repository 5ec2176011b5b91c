// Drawing a token: bias, repetition penalty, temperature, top_k, top_p, min_p, then the Gumbel-max draw; one CTA a row.
//
// A key orders values as the filters do, by falling logit and then rising id, so what a filter keeps is all keys from some
// bound on. Bounds come from a sorted list of the row's best keys where they fit, else from bisection over the whole row;
// probabilities are summed as integers (units of 2^-40). So nothing depends on the order in which threads arrive.
#include <float.h>

#include "math.cuh"
#include "philox.h"
#include "sample.cuh"

namespace tl {
namespace {

constexpr int kSampleThreads = 1024;
constexpr int kListSize = 2048;   // best keys that are looked at alone, instead of the whole row
constexpr int kListWanted = 512;  // most that a list is made for
constexpr int kTopPWanted = 256;  // how many are first tried where only top_p filters
constexpr float kUnit = 1099511627776.0f;  // 2^40

struct alignas(16) Shared {
  uint64_t list[kListSize];  // falling
  unsigned long long reduced[kSampleThreads / 32];
  int32_t n_list;
  // then, where it fits, the row and its bitmap
};

// Rises with the value, then falls with the id; NaN comes last.
TL_DEVICE uint64_t key_of(float z, int id) {
  const uint32_t u = float_bits(z + 0.0f);
  const uint32_t order = z != z ? 0 : u & 0x80000000u ? ~u : u | 0x80000000u;
  return (uint64_t)order << 32 | (0xffffffffu - (uint32_t)id);
}
TL_DEVICE int id_of(uint64_t key) { return (int)(0xffffffffu - (uint32_t)key); }
TL_DEVICE float value_of(uint64_t key) {
  const uint32_t order = (uint32_t)(key >> 32);
  return bits_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

TL_DEVICE uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

// Maximum, or sum, over the CTA, the same for every thread.
template <class Combine>
TL_DEVICE uint64_t combine_all(uint64_t x, Shared &s, Combine combine) {
  for (int w = 16; w; w /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, (unsigned long long)x, w));
  __syncthreads();
  if (lane_id() == 0) s.reduced[warp_id()] = x;
  __syncthreads();
  x = s.reduced[lane_id()];
  for (int w = 16; w; w /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, (unsigned long long)x, w));
  return x;
}
TL_DEVICE uint64_t maximum_of_all(uint64_t x, Shared &s) {
  return combine_all(x, s, [](uint64_t a, uint64_t b) { return larger(a, b); });
}
TL_DEVICE uint64_t sum_of_all(uint64_t x, Shared &s) {
  return combine_all(x, s, [](uint64_t a, uint64_t b) { return a + b; });
}

// What is looked at: a list in shared memory, or the whole row.
struct Source {
  const float *z;
  int n;
  const uint64_t *list;  // NULL: the row
  TL_DEVICE_MEMBER uint64_t key(int i) const { return list ? list[i] : key_of(z[i], i); }
};

// The largest bound such that the weights of the keys from it on reach `target` (above 0); 0 where all fall short.
template <class Weight>
TL_DEVICE uint64_t bisect(const Source &source, uint64_t target, Shared &s, Weight weight) {
  uint64_t bound = 0;
  for (int bit = 63; bit >= 0; bit--) {
    const uint64_t tried = bound | (uint64_t)1 << bit;
    uint64_t sum = 0;
    for (int i = threadIdx.x; i < source.n; i += kSampleThreads) {
      const uint64_t key = source.key(i);
      if (key >= tried) sum += weight(key);
    }
    if (sum_of_all(sum, s) >= target) bound = tried;
  }
  return bound;
}

// The same from the sorted list: warp 0 sums 32 keys at a time.
template <class Weight>
TL_DEVICE uint64_t find_in_list(uint64_t target, Shared &s, Weight weight) {
  __syncthreads();
  if (warp_id() == 0) {
    uint64_t before = 0, bound = 0;
    for (int first = 0; first < s.n_list && !bound; first += 32) {
      const uint64_t key = first + lane_id() < s.n_list ? s.list[first + lane_id()] : 0;
      uint64_t sum = key ? weight(key) : 0;
      for (int d = 1; d < 32; d *= 2) {
        const uint64_t left = __shfl_up_sync(0xffffffffu, (unsigned long long)sum, d);
        if (lane_id() >= d) sum += left;
      }
      const uint32_t reached = __ballot_sync(0xffffffffu, key && before + sum >= target);
      if (reached) bound = __shfl_sync(0xffffffffu, (unsigned long long)key, __ffs(reached) - 1);
      before += __shfl_sync(0xffffffffu, (unsigned long long)sum, 31);
    }
    if (lane_id() == 0) s.reduced[0] = bound;
  }
  __syncthreads();
  return s.reduced[0];
}

// Sorts the warp's 32 keys, the largest in lane 0.
TL_DEVICE uint64_t sort_warp(uint64_t key) {
  for (int size = 2; size <= 32; size *= 2)
    for (int d = size / 2; d; d /= 2) {
      const uint64_t other = __shfl_xor_sync(0xffffffffu, (unsigned long long)key, d);
      const bool falling = !(lane_id() & size), first = !(lane_id() & d);
      key = (falling == first) == (key > other) ? key : other;
    }
  return key;
}

// Sorts the list, falling; a bitonic network over the next power of two.
TL_DEVICE void sort_list(Shared &s) {
  int width = 64;
  while (width < s.n_list) width *= 2;
  for (int i = s.n_list + threadIdx.x; i < width; i += kSampleThreads) s.list[i] = 0;
  for (int size = 2; size <= width; size *= 2)
    for (int d = size / 2; d; d /= 2) {
      __syncthreads();
      const int i = threadIdx.x / d * 2 * d + threadIdx.x % d;
      if (i + d >= width) continue;
      const uint64_t a = s.list[i], b = s.list[i + d];
      if ((a < b) == !(i & size)) s.list[i] = b, s.list[i + d] = a;
    }
  __syncthreads();
}

// What overflows downwards stays above a banned id's -infinity.
TL_DEVICE float penalised(float z, float penalty) {
  const float x = z > 0.0f ? z / penalty : z * penalty;
  return x == -INFINITY && z > -INFINITY ? -FLT_MAX : x;
}

// How many values of a row come in whole quads, which are read at once: all but the last few, or none where the row does not begin at one.
TL_DEVICE int in_quads(const float *z, int n) { return (uint64_t)z % 16 ? 0 : n / 4 * 4; }

TL_DEVICE void copy_row(float *copy, const float *logits, int n) {
  const int n_quads = min(in_quads(logits, n), in_quads(copy, n));
#pragma unroll 8
  for (int i = threadIdx.x * 4; i < n_quads; i += kSampleThreads * 4) *(float4 *)(copy + i) = *(const float4 *)(logits + i);
  for (int i = n_quads + threadIdx.x; i < n; i += kSampleThreads) copy[i] = logits[i];
}

// The row with bias and penalty, in `copy`, with a bitmap behind it; where it needs neither as it is, in `copy` if it is there already.
TL_DEVICE const float *prepared_row(const tl_sampling &s, const float *logits, int n, float *copy, bool is_there) {
  const bool as_it_is = !s.n_bias && s.repetition_penalty == 1.0f;
  if (as_it_is && !is_there) return logits;
  if (!is_there) copy_row(copy, logits, n);
  __syncthreads();
  if (as_it_is) return copy;
  uint32_t *seen = (uint32_t *)(copy + n);
  for (int i = threadIdx.x; i < (n + 31) / 32; i += kSampleThreads) seen[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < s.n_bias; i += kSampleThreads) copy[s.bias_ids[i]] = copy[s.bias_ids[i]] + s.bias_values[i];
  __syncthreads();
  for (int i = threadIdx.x; i < s.n_history && s.repetition_penalty != 1.0f; i += kSampleThreads) {
    const int id = s.history[i];
    if (atomicOr(seen + id / 32, 1u << id % 32) >> id % 32 & 1) continue;
    copy[id] = penalised(copy[id], s.repetition_penalty);
  }
  __syncthreads();
  return copy;
}

// The key of this thread's best value; 0 where it has none.
TL_DEVICE uint64_t own_best_key(const float *z, int n) {
  float best = -INFINITY;
  int at = -1;
  const auto look = [&](float x, int i) {
    if (x > best || at < 0 || (best != best && x == x)) best = x, at = i;
  };
  const int n_quads = in_quads(z, n);
#pragma unroll 4
  for (int i = threadIdx.x * 4; i < n_quads; i += kSampleThreads * 4) {
    const float4 x = *(const float4 *)(z + i);
    look(x.x, i);
    look(x.y, i + 1);
    look(x.z, i + 2);
    look(x.w, i + 3);
  }
  for (int i = n_quads + threadIdx.x; i < n; i += kSampleThreads) look(z[i], i);
  return at < 0 ? 0 : key_of(best, at);
}

// The keys of at least the `wanted` best of the row, sorted; false where they don't fit.
TL_DEVICE bool list_best(Source &source, int wanted, uint64_t own_best, Shared &s) {
  // In every warp as many threads' maxima reach the bound as it takes for `wanted` values in all.
  const int in_warp = (wanted + kSampleThreads / 32 - 1) / (kSampleThreads / 32);
  const uint64_t of_warp = __shfl_sync(0xffffffffu, (unsigned long long)sort_warp(own_best), in_warp - 1);
  const uint64_t bound = ~maximum_of_all(~of_warp, s);
  if (threadIdx.x == 0) s.n_list = 0;
  __syncthreads();
  const float least = bound ? value_of(bound) : -INFINITY;
#pragma unroll 4
  for (int i = threadIdx.x; i < source.n; i += kSampleThreads) {
    if (source.z[i] < least) continue;
    const uint64_t key = source.key(i);
    if (key < bound) continue;
    const int at = atomicAdd(&s.n_list, 1);
    if (at < kListSize) s.list[at] = key;
  }
  __syncthreads();
  if (s.n_list > kListSize) return false;
  sort_list(s);
  source.n = s.n_list;
  source.list = s.list;
  return true;
}

// The draw with every id in play: four of them share a block of the generator.
TL_DEVICE int draw_from_all(uint64_t seed, int position, const float *z, int n, float top, float temperature, Shared &s) {
  uint64_t drawn = 0;
  for (int first = threadIdx.x * 4; first < n; first += kSampleThreads * 4) {
    uint32_t word[4];
    philox4x32((uint32_t)first / 4u, (uint32_t)position, kPhiloxGumbel, 0, seed, word);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (first + i < n) drawn = larger(drawn, key_of(-tl_log(-tl_log(unit_interval(word[i]))) + (z[first + i] - top) / temperature, first + i));
  }
  return id_of(maximum_of_all(drawn, s));
}

TL_DEVICE int draw(const tl_sampling &asked, int position, const float *z, int n, Shared &s) {
  Source row{z, n, nullptr};
  const uint64_t own_best = own_best_key(z, n), best = maximum_of_all(own_best, s);
  const float top = value_of(best), temperature = fmaxf(asked.temperature, 1e-20f), inverse = 1.0f / temperature;
  if (asked.temperature == 0.0f || !(top > -INFINITY) || top == INFINITY) return id_of(best);
  const bool by_k = asked.top_k > 0 && asked.top_k < n, by_p = asked.top_p < 1.0f;
  const auto probability = [&](uint64_t key) { return exp_fast((value_of(key) - top) * inverse); };
  const auto units = [&](uint64_t key) { return (uint64_t)(probability(key) * kUnit); };

  if (!by_k && !by_p && !(asked.min_p > 0.0f)) return draw_from_all(asked.seed, position, z, n, top, temperature, s);
  Source source = row;
  uint64_t bound = 0;
  const int wanted = by_k ? asked.top_k : by_p ? min(kTopPWanted, n) : n;
  if ((by_k || by_p) && wanted <= kListWanted) list_best(source, wanted, own_best, s);
  if (by_k) bound = source.list ? s.list[asked.top_k - 1] : bisect(source, asked.top_k, s, [](uint64_t) { return 1; });
  if (by_p) {
    const auto kept_units = [&](uint64_t key) { return key < bound ? 0 : units(key); };
    const auto sum_units = [&](const Source &from) {
      uint64_t sum = 0;
      for (int i = threadIdx.x; i < from.n; i += kSampleThreads) sum += kept_units(from.key(i));
      return sum_of_all(sum, s);
    };
    const uint64_t total = sum_units(by_k ? source : row);
    const double reach = (double)asked.top_p * (double)total;
    const uint64_t whole = (uint64_t)reach, target = (double)whole < reach ? whole + 1 : whole;
    if (!by_k && source.list && sum_units(source) < target) source = row;
    bound = larger(bound, source.list ? find_in_list(target, s, kept_units) : bisect(source, target, s, kept_units));
  }
  uint64_t drawn = 0;
  for (int i = threadIdx.x; i < source.n; i += kSampleThreads) {
    const uint64_t key = source.key(i);
    if (key < bound || (asked.min_p > 0.0f && key != best && !(probability(key) >= asked.min_p))) continue;
    const int id = id_of(key);
    drawn = larger(drawn, key_of(gumbel_noise(asked.seed, position, id) + (value_of(key) - top) / temperature, id));
  }
  return id_of(maximum_of_all(drawn, s));
}

// Hands the drawn token on: to the host, and to the row's next step. `d`: the row's, read before.
TL_DEVICE void advance(const SampleArgs &a, const tl_decode &d, int row, int position, int token) {
  const int n_left = d.n_left - 1, serial = d.n_drawn + 1;
  bool stops = n_left <= 0;
  for (int i = 0; i < d.n_stop; i++) stops = stops || d.stop[i] == token;
  if (d.history) d.history[position] = token;
  a.token[row] = token;
  a.pos[row] = stops ? -1 : position;
  a.decode[row].n_left = n_left;
  a.decode[row].n_drawn = serial;
  if (d.out) ((volatile uint64_t *)d.out)[(serial - 1) % d.out_size] = (uint64_t)(uint32_t)serial << 32 | (uint32_t)token;
}

__global__ void __launch_bounds__(kSampleThreads) sample(const SampleArgs a) {
  Shared &s = *shared_memory<Shared>();
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = blockIdx.x, pos = a.decode ? a.pos[row] : 0;
  const float *logits = a.logits + (int64_t)row * a.vocab_size;
  float *copy = a.row_in_shared ? (float *)(&s + 1) : a.work + row * sample_work_floats(a.vocab_size);
  tl_sampling asked = a.sampling ? a.sampling[row] : a.single;
  tl_decode decode = {};
  if (a.decode) decode = a.decode[row];
  if (a.row_in_shared) copy_row(copy, logits, a.vocab_size);  // while what is above is on its way
  if (pos < 0) return;
  const int position = a.decode ? pos + 1 : asked.position;
  if (decode.history) asked.history = decode.history, asked.n_history = position;
  const int token = draw(asked, position, prepared_row(asked, logits, a.vocab_size, copy, a.row_in_shared), a.vocab_size, s);
  if (threadIdx.x != 0) return;
  if (a.sampled) a.sampled[row] = token;
  if (a.decode) advance(a, decode, row, position, token);
}

}  // namespace

void launch_sample(const Launcher &launcher, int n, const SampleArgs &asked) {
  SampleArgs args = asked;
  const uint64_t with_row = sizeof(Shared) + sample_work_floats(args.vocab_size) * 4;
  args.row_in_shared = with_row <= (uint64_t)launcher.context.max_shared_nbytes;
  launcher.launch(sample, Shape{dim3(n), kSampleThreads, args.row_in_shared ? (int)with_row : (int)sizeof(Shared), 1}, args);
}

}  // namespace tl
