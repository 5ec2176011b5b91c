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

int store_k(int kv_dtype, int head_dim, const float *k, void *block, int slot);
int store_v(int kv_dtype, int head_dim, const float *v, void *block, int slot);
void prepare_q(int kv_dtype, int head_dim, float *q);
void attend_chunk(const AttendChunk *c);
// The same of quantised types.
void store_k_codes(int kv_dtype, int head_dim, const float *k, uint8_t *block, int slot);
void store_v_codes(int kv_dtype, int head_dim, const float *v, uint8_t *block, int slot);
void operand_q(int head_dim, float *q);
void attend_codes(const AttendChunk *c);
void rotate(int n, int block, float *x);
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
