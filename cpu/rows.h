#pragma once

#include "kernels.h"
#include "simd.h"

namespace tl {
namespace TL_ISA_NS {

void rms_norm(int n, float eps, const float *x, const float *weight, float *y);
void add_rows(int n, const float *a, const float *b, float *y);
void activation(int act, int n, const float *gate, const float *up, float *y);
void activate_panels(int act, int gated, int n_panels, const float *tile, float *y);
void rope(int head_dim, int rotary_dim, int interleaved, const float *cos, const float *sin, float *head);
void scale_softcap(int n, float scale, float cap, float *x);
void noise(int n, uint64_t seed, int position, float std, float *x);
uint64_t read(const void *data, uint64_t nbytes);

int store_k(int kv_dtype, int head_dim, const float *k, void *page, int slot);
int store_v(int kv_dtype, int head_dim, const float *v, void *page, int slot);
void round_q(int kv_dtype, int n, float *q);
void attend_chunk(const AttendChunk *c);
void merge_state(int head_dim_pad, const float *later, float *state);
void finish_state(int head_dim, const float *state, float *o);

int argmax(int n, const float *x);
void block_maxima(int n, const float *x, float *out);
int collect_ge(int n, const float *x, float bound, int32_t *index);
void exp_scaled(int n, const float *x, float top, float scale, float *y);
float sum(int n, const float *x);
void gumbel_row(int n, uint64_t seed, int position, int first_token, float *out);

}  // namespace TL_ISA_NS
}  // namespace tl
