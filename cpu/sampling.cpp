// Drawing a token: bias, repetition penalty, temperature, top_k, top_p, min_p, then the Gumbel-max draw.
//
// A draw depends on the logits, the seed, the position and the ids alone: noise is looked up by id, never consumed.
#include "sampling.h"

#include <float.h>
#include <math.h>

#include <algorithm>

#include "philox.h"

namespace tl {
namespace {

struct Candidates {
  int32_t *id;  // best first, lower id first among equals
  float *p;     // e^((z - max z) / temperature)
  int n;
};

// Sorts ids by falling z, then rising id, and keeps the first `limit`.
void keep_best(const float *z, int limit, Candidates &c) {
  const auto better = [z](int32_t a, int32_t b) { return z[a] != z[b] ? z[a] > z[b] : a < b; };
  if (c.n > limit) {
    std::nth_element(c.id, c.id + limit, c.id + c.n, better);
    c.n = limit;
  }
  std::sort(c.id, c.id + c.n, better);
}

// The n best of a row. At least n blocks have a maximum as large as the n-th largest block maximum, so at least n values
// reach it: what does not is out.
void take_best(const Kernels &k, int vocab_size, const float *z, int n, float *work, Candidates &c) {
  const int n_blocks = (vocab_size + 63) / 64;
  float bound = -INFINITY;
  if (n < n_blocks) {
    k.block_maxima(vocab_size, z, work);
    std::nth_element(work, work + n - 1, work + n_blocks, [](float a, float b) { return a > b; });
    bound = work[n - 1];
  }
  c.n = k.collect_ge(vocab_size, z, bound, c.id);
  keep_best(z, n, c);
}

void set_probabilities(const Kernels &k, const float *z, float top, float inverse_temperature, float *work, Candidates &c) {
  for (int i = 0; i < c.n; i++) work[i] = z[c.id[i]];
  k.exp_scaled(c.n, work, top, inverse_temperature, c.p);
}

// Keeps the smallest number of best candidates whose probability, out of `total`, reaches top_p; false if all fall short.
bool cut_top_p(float top_p, float total, Candidates &c) {
  double sum = 0.0;
  for (int i = 0; i < c.n; i++) {
    sum += c.p[i];
    if (sum >= (double)top_p * total) {
      c.n = i + 1;
      return true;
    }
  }
  return false;
}

// What overflows downwards stays above a banned id's -infinity.
float penalised(float z, float penalty) {
  const float x = z > 0.0f ? z / penalty : z * penalty;
  return x == -INFINITY && z > -INFINITY ? -FLT_MAX : x;
}

void apply_bias_and_penalty(int vocab_size, const tl_sampling &s, float *z, uint8_t *seen) {
  for (int i = 0; i < s.n_bias; i++) z[s.bias_ids[i]] += s.bias_values[i];
  if (s.repetition_penalty == 1.0f) return;
  std::fill_n(seen, vocab_size, 0);
  for (int i = 0; i < s.n_history; i++) {
    const int id = s.history[i];
    if (seen[id]) continue;
    seen[id] = 1;
    z[id] = penalised(z[id], s.repetition_penalty);
  }
}

// Everything in play: argmax of z / temperature + noise over the whole row.
int draw_unfiltered(const Kernels &k, int vocab_size, const tl_sampling &s, const float *z, float top, float *noise) {
  k.gumbel_row(vocab_size, s.seed, s.position, 0, noise);
  for (int i = 0; i < vocab_size; i++) noise[i] += (z[i] - top) / s.temperature;
  return k.argmax(vocab_size, noise);
}

int draw_from(const tl_sampling &s, const float *z, float top, const Candidates &c) {
  int best = c.id[0];
  float best_score = -INFINITY;
  for (int i = 0; i < c.n; i++) {
    const int id = c.id[i];
    const float score = gumbel_noise(s.seed, s.position, id) + (z[id] - top) / s.temperature;
    if (score > best_score || (score == best_score && id < best)) {
      best = id;
      best_score = score;
    }
  }
  return best;
}

// The candidates that top_k, top_p and min_p leave.
void filter(const Kernels &k, int vocab_size, const tl_sampling &s, const float *z, float top, float *work, Candidates &c) {
  const float inverse = 1.0f / s.temperature;
  if (s.top_k > 0 && s.top_k < vocab_size) {
    take_best(k, vocab_size, z, s.top_k, work, c);
    set_probabilities(k, z, top, inverse, work, c);
    if (s.top_p < 1.0f) cut_top_p(s.top_p, k.sum(c.n, c.p), c);
  } else if (s.top_p < 1.0f) {
    k.exp_scaled(vocab_size, z, top, inverse, work);
    const float total = k.sum(vocab_size, work);
    for (int n = std::min(256, vocab_size);; n = std::min(4 * n, vocab_size)) {
      take_best(k, vocab_size, z, n, work, c);
      set_probabilities(k, z, top, inverse, work, c);
      if (cut_top_p(s.top_p, total, c) || n == vocab_size) break;
    }
  } else {
    const float bound = top + s.temperature * (logf(s.min_p) - 1e-3f);
    c.n = k.collect_ge(vocab_size, z, bound, c.id);
    keep_best(z, vocab_size, c);
    set_probabilities(k, z, top, inverse, work, c);
  }
  if (s.min_p > 0.0f)
    while (c.n > 1 && c.p[c.n - 1] < s.min_p) c.n--;
}

}  // namespace

uint64_t sampling_work_floats(int vocab_size) { return 4 * (uint64_t)round_up(vocab_size, 64) + 64; }

int draw_token(const Kernels &k, int vocab_size, const tl_sampling &asked, const float *logits, float *work) {
  tl_sampling s = asked;
  if (s.temperature != 0.0f) s.temperature = std::max(s.temperature, 1e-20f);  // 1 / temperature stays finite
  const int width = round_up(vocab_size, 64);
  const float *z = logits;
  if (s.n_bias || s.repetition_penalty != 1.0f) {
    std::copy_n(logits, vocab_size, work);
    apply_bias_and_penalty(vocab_size, s, work, (uint8_t *)(work + width));
    z = work;
  }
  const int best = k.argmax(vocab_size, z);
  const float top = z[best];
  if (s.temperature == 0.0f || !(top > -INFINITY) || top == INFINITY) return best;
  const bool filtered = (s.top_k > 0 && s.top_k < vocab_size) || s.top_p < 1.0f || s.min_p > 0.0f;
  if (!filtered) return draw_unfiltered(k, vocab_size, s, z, top, work + width);
  Candidates c = {(int32_t *)(work + 2 * width), work + 3 * width, 0};
  filter(k, vocab_size, s, z, top, work + width, c);
  return draw_from(s, z, top, c);
}

}  // namespace tl
