// The operations of one code path, behind a table that is chosen once by what the processor has.
//
// A kernel works on one row, one tile or one chunk, on one thread; plan.cpp and its siblings decide who does what.
// Rows are float32 and contiguous; widths named *_pad are rounded up to 16 lanes and hold zeros there.
#pragma once

#include "tinyloop.h"

namespace tl {

constexpr int kPanelRows = 16;     // packed matrix rows that lie side by side
constexpr int kMaxBlockRows = 12;  // batch rows that one matrix kernel runs together
constexpr int kMaxQueries = 6;     // query vectors that one attention kernel runs together
constexpr int kStateHead = 16;     // floats before o in an attention state: m, l, padding

inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
inline int pad16(int n) { return round_up(n, 16); }

inline int int8_groups(int n_in) { return round_up(n_in, TL_INT8_GROUP) / TL_INT8_GROUP; }
// Bytes of one row of a product's operand that outlives its batch.
inline uint64_t operand_row_nbytes(int dtype, int n_in) {
  if (dtype == TL_INT8) return (uint64_t)int8_groups(n_in) * (TL_INT8_GROUP + sizeof(float));
  return (uint64_t)n_in * (dtype == TL_F32 ? 4 : 2);
}

// Queries that share a sequence and a KV head, against one chunk of 64 keys.
struct AttendChunk {
  int kv_dtype;
  int head_dim;
  float scale;                             // 1 / sqrt(head_dim), applied to the dot product
  const void *block[4];                    // the layer's and head's part of each page (kv_layout.h); not read where no query sees it
  int n_queries;                           // 1..kMaxQueries
  const float *q[kMaxQueries];             // (head_dim_pad,), from prepare_q
  int lo[kMaxQueries], hi[kMaxQueries];    // the query sees keys lo <= i < hi of the chunk
  float *state[kMaxQueries];               // out: m, l at [0], [1], o at [kStateHead]
  const void *next[4];                     // blocks that the thread reads next, brought near meanwhile; NULL for none
};

struct Kernels {
  int isa;
  const char *name;

  // Matrices (matmul.cpp, pack.cpp). A "block" is the operand of up to block_rows(dtype) batch rows, rounded and laid out.
  uint64_t (*matrix_nbytes)(const tl_matrix *w);
  void (*pack_rows)(const tl_matrix *w, const tl_pack_rows *rows, int begin, int end);
  void (*gather_row)(const tl_matrix *w, int row, float scale, float *out);
  int (*block_rows)(int dtype);
  uint64_t (*block_nbytes)(int dtype, int n_in, int n_rows);
  void (*write_block_row)(int dtype, int n_in, const float *x, void *block, int n_rows, int row);
  void (*store_operand)(int dtype, int n_in, const float *x, void *out);
  void (*load_operand)(int dtype, int n_in, const void *stored, float *work, void *block, int n_rows, int row);
  void (*matmul)(const tl_matrix *w, int panel, int n_panels, const void *block, int n_rows, float *out, int out_stride);

  // Rows (rows.cpp)
  void (*rms_norm)(int n, float eps, const float *x, const float *weight, float *y);
  void (*add)(int n, const float *a, const float *b, float *y);
  void (*activation)(int act, int n, const float *gate, const float *up, float *y);
  void (*activate_panels)(int act, int gated, int n_panels, const float *tile, float *y);
  void (*rope)(int head_dim, int rotary_dim, int interleaved, const float *cos, const float *sin, float *head);
  void (*scale_softcap)(int n, float scale, float cap, float *x);
  void (*noise)(int n, uint64_t seed, int position, float std, float *x);

  // Keys and values (attention.cpp, kv_codes.cpp)
  int (*store_k)(int kv_dtype, int head_dim, const float *k, void *block, int slot);  // returns how many values were clamped
  int (*store_v)(int kv_dtype, int head_dim, const float *v, void *block, int slot);
  void (*prepare_q)(int kv_dtype, int head_dim, float *q);  // rounds it to the KV type, or makes it the operand of codes
  void (*rotate)(int n, int block, float *x);
  void (*attend_chunk)(const AttendChunk *c);
  void (*merge_state)(int head_dim_pad, const float *later, float *state);  // state (earlier keys) absorbs later
  void (*finish_state)(int head_dim, const float *state, float *o);

  // Long rows, for sampling (logits.cpp)
  int (*argmax)(int n, const float *x);                                         // the lowest index of the maximum
  void (*block_maxima)(int n, const float *x, float *out);                      // of every 64 values
  int (*collect_ge)(int n, const float *x, float bound, int32_t *index);        // ascending indices with x >= bound
  void (*exp_scaled)(int n, const float *x, float top, float scale, float *y);  // y = e^((x - top) * scale)
  float (*sum)(int n, const float *x);
  void (*gumbel_row)(int n, uint64_t seed, int position, int first_token, float *out);  // first_token a multiple of 4

  uint64_t (*read)(const void *data, uint64_t nbytes);
  uint32_t (*enter_float_mode)();
  void (*leave_float_mode)(uint32_t old);
};

namespace generic {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

// The best path the processor has for TL_ISA_BEST, the named one, or NULL where the processor lacks it.
const Kernels *select_kernels(int isa);

}  // namespace tl
