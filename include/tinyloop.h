/* tinyloop.h: the C contract that libtinyloop_cpu.so (host) and libtinyloop.so (CUDA) both export.
 *
 * Every function returns a tl_status; results come through out-pointers. Nothing is thrown, printed or hidden: the
 * stream is the last argument (NULL on the CPU, where a call returns when its work is done). The library allocates no
 * memory but its handles: weights, KV pages and scratch belong to the caller. "Memory" below means memory the backend
 * computes on: host memory on the CPU, device memory on CUDA. Structs start with their size and only ever grow at the end.
 */
#ifndef TINYLOOP_H
#define TINYLOOP_H

#include <stdint.h>

#if defined(_WIN32)
#define TL_API
#else
#define TL_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define TL_ABI_VERSION 1u

#define TL_PAGE_POSITIONS 16   /* positions held by one KV page */
#define TL_KEY_CHUNK 64        /* keys in one attention chunk, at absolute positions */
#define TL_CHUNK_GROUP 16      /* attention chunks merged before groups merge */
#define TL_K_CHUNK 256         /* inner-dimension chunk of a matrix product, each summed from zero */
#define TL_KV_GROUP 32         /* dimensions of a head that share a scale and a zero of int4 values */
#define TL_INT8_GROUP 32       /* inner-dimension group that shares one scale of the quantised activations */
#define TL_STAGE_PRELUDE 0     /* rows of a page table: prelude, coda, then one per core loop */
#define TL_STAGE_CODA 1
#define TL_STAGE_CORE 2

typedef int32_t tl_status;
enum {
  TL_OK = 0,
  TL_ERR_INVALID = 1,       /* an argument breaks this contract */
  TL_ERR_OUT_OF_MEMORY = 2,
  TL_ERR_UNSUPPORTED = 3,   /* valid, but this build or device has no code for it */
  TL_ERR_DEVICE = 4,        /* the driver or a launch failed */
  TL_ERR_INTERNAL = 5
};

enum { TL_F32 = 0, TL_BF16 = 1, TL_F16 = 2, TL_INT8 = 3, TL_INT4 = 4 };           /* tl_dtype; TL_INT4 of keys and values only */
enum { TL_NORM_PRE = 0, TL_NORM_SANDWICH = 1, TL_NORM_SUM_SANDWICH = 2, TL_NORM_POST = 3 };
enum { TL_ACT_SILU = 0, TL_ACT_GELU = 1, TL_ACT_RELU2 = 2 };
enum { TL_ISA_BEST = 0, TL_ISA_GENERIC = 1, TL_ISA_AVX2 = 2, TL_ISA_AVX512 = 3 }; /* CPU code paths */

typedef struct tl_context tl_context; /* CPU: thread pool and code path; CUDA: one device */
typedef struct tl_plan tl_plan;

/* ---- library ------------------------------------------------------------------------------------------------- */

TL_API uint32_t tl_abi_version(void);
TL_API const char *tl_last_error(void); /* text of this thread's last failing call, valid until its next call */

typedef struct tl_context_desc {
  uint32_t size;
  int32_t n_threads; /* CPU: threads that compute, the caller's included (>= 1) */
  int32_t isa;       /* CPU: TL_ISA_*; one the machine lacks is TL_ERR_UNSUPPORTED */
  int32_t device;    /* CUDA: ordinal */
} tl_context_desc;

typedef struct tl_context_info {
  uint32_t size;
  int32_t n_threads;
  int32_t isa;
  int32_t n_multiprocessors;  /* CUDA */
  char name[64];              /* "cpu avx512", "NVIDIA H200" */
  char numerics_id[64];       /* whatever may change a bit of a result: code path, numerics version, chunk sizes */
} tl_context_info;

TL_API tl_status tl_context_create(const tl_context_desc *desc, tl_context **out);
TL_API tl_status tl_context_get_info(const tl_context *context, tl_context_info *info);
TL_API tl_status tl_context_destroy(tl_context *context);
TL_API int32_t tl_usable_cpus(void); /* cores this process may run on (CUDA: host cores too) */

/* ---- matrices ------------------------------------------------------------------------------------------------ */

/* A weight matrix W (n_out, n_in) in the backend's packed layout; y = W a. Several source matrices may share one. */
typedef struct tl_matrix {
  uint32_t size;
  int32_t dtype;      /* TL_F32, TL_BF16, TL_F16, TL_INT8 */
  int32_t n_out;      /* packed rows, a multiple of 16 (padding rows are zero) */
  int32_t n_in;
  int32_t group_size; /* TL_INT8: columns that share a scale (a multiple of TL_INT8_GROUP), 0 = the whole row */
  void *data;         /* packed bytes, 64-byte aligned, tl_matrix_nbytes() of them */
} tl_matrix;

/* Source rows of a pack: row r goes to packed row (r / block) * stride + offset + r % block. */
typedef struct tl_pack_rows {
  uint32_t size;
  int32_t n_rows;
  int32_t block;
  int32_t stride;
  int32_t offset;
  const void *src;     /* memory, (n_rows, n_in) row-major, of the matrix's dtype */
  const float *scales; /* memory, TL_INT8: (n_rows,) or (n_rows, n_groups); else NULL */
} tl_pack_rows;

TL_API tl_status tl_matrix_nbytes(const tl_context *context, const tl_matrix *matrix, uint64_t *nbytes);
/* The packed bytes must be zero before the first pack. */
TL_API tl_status tl_matrix_pack(tl_context *context, const tl_matrix *matrix, const tl_pack_rows *rows, void *stream);

/* ---- plan: the forward pass of one model ----------------------------------------------------------------------- */

enum {
  TL_PHASE_EMBED = 0,      /* x = E[token] * scale */
  TL_PHASE_STATE_INIT = 1, /* e = x; x = x | 0 | noise(position) */
  TL_PHASE_INJECT = 2,     /* x = x + e | W [x; e] */
  TL_PHASE_QKV = 3,        /* a = norm(x); q, k, v = W a + bias; qk norm; rope; write k, v */
  TL_PHASE_ATTEND = 4,
  TL_PHASE_OUT = 5,        /* x = residual(x, W o + bias) */
  TL_PHASE_GATE_UP = 6,    /* a = norm(x); h = act(gate a) * (up a) | act(up a) */
  TL_PHASE_DOWN = 7,       /* x = residual(x, W h) */
  TL_PHASE_NORM = 8,       /* x = norm(x): the loop norm */
  TL_PHASE_HEAD = 9        /* logits = softcap(W norm(x) * scale), then sampling where asked */
};

enum { TL_INIT_INPUT = 0, TL_INIT_ZERO = 1, TL_INIT_NORMAL = 2 };
enum { TL_PHASE_GATED = 1, TL_PHASE_ROPE = 2, TL_PHASE_SAVE_INPUT = 4 }; /* tl_phase.flags */

typedef struct tl_phase {
  uint32_t size;
  int32_t kind;
  int32_t part;         /* TL_STAGE_PRELUDE, TL_STAGE_CODA or TL_STAGE_CORE */
  int32_t layer;        /* index inside the part: selects the K and V of a page */
  int32_t flags;
  int32_t window;       /* ATTEND: the layer's own window, 0 = full */
  int32_t block_norm;   /* OUT, DOWN: TL_NORM_*; where x + f(..) meets its norm */
  int32_t option;       /* STATE_INIT: TL_INIT_*; GATE_UP: TL_ACT_* */
  float scale;          /* EMBED, HEAD: factor; STATE_INIT: std */
  float softcap;        /* HEAD: 0 = none */
  uint64_t seed;        /* STATE_INIT: noise */
  tl_matrix weight;     /* data == NULL where the phase has none */
  const float *bias;    /* (n_out,) packed row order, or NULL */
  const float *norm;      /* (dim,) norm of the phase's input, or NULL */
  const float *post_norm; /* (dim,) norm of its output or of the sum, or NULL */
  const float *q_norm;    /* (head_dim,) or (n_heads * head_dim,), or NULL */
  const float *k_norm;
} tl_phase;

enum { TL_QK_NORM_NONE = 0, TL_QK_NORM_HEAD = 1, TL_QK_NORM_FULL = 2 };

typedef struct tl_plan_desc {
  uint32_t size;
  int32_t vocab_size, dim, ffn_dim, n_heads, n_kv_heads, head_dim;
  int32_t n_layers[3];         /* layers of prelude, coda, core */
  float norm_eps;
  int32_t qk_norm;             /* TL_QK_NORM_* */
  int32_t rope_interleaved;    /* 0: halves turn, 1: neighbours turn */
  int32_t rotary_dim;
  int32_t kv_dtype;            /* any tl_dtype */
  int32_t max_rows;            /* rows of one batch */
  int32_t max_out;             /* rows of one batch that reach the head */
  int32_t max_pos;             /* positions in the rope tables */
  int32_t table_stride;        /* pages in one row of a page table */
  const float *rope_cos;       /* memory, (max_pos, rotary_dim / 2) */
  const float *rope_sin;
  int32_t n_phases;
  int32_t section[5];          /* first phase of prelude, core, coda, head, and n_phases */
  const tl_phase *phases;      /* host; copied */
  void *kv_base[3];            /* memory; page i of a part lies at kv_base[part] + i * page_nbytes[part] */
  void *operand_base[3];       /* the same of operand pages, or NULL: none are kept */
} tl_plan_desc;

TL_API tl_status tl_plan_create(tl_context *context, const tl_plan_desc *desc, tl_plan **out);
TL_API tl_status tl_plan_destroy(tl_plan *plan);
/* Bytes of one KV page of a part: 16 positions of all its layers. Needs the sizes of desc only. */
TL_API tl_status tl_plan_page_nbytes(const tl_plan_desc *desc, int32_t part, uint64_t *nbytes);
/* Bytes of one operand page of a part: per layer, 16 rows of the QKV product's operand. Needs the phases of desc too. */
TL_API tl_status tl_plan_operand_page_nbytes(const tl_plan_desc *desc, int32_t part, uint64_t *nbytes);
TL_API tl_status tl_plan_scratch_nbytes(const tl_plan *plan, uint64_t *nbytes);
/* scratch: zeroed, 64-byte aligned memory, at least tl_plan_scratch_nbytes(); it must outlive the plan. */
TL_API tl_status tl_plan_bind(tl_plan *plan, void *scratch);

/* How one token is drawn from logits. Order: bias, repetition penalty, temperature, top_k, top_p, min_p. */
typedef struct tl_sampling {
  uint32_t size;
  int32_t top_k;              /* 0 = off */
  float temperature;          /* 0 = greedy */
  float top_p;                /* 1 = off */
  float min_p;                /* 0 = off */
  float repetition_penalty;   /* 1 = off */
  uint64_t seed;
  int32_t position;           /* of the token drawn: keys the noise */
  int32_t n_bias;
  const int32_t *bias_ids;    /* memory, (n_bias,) ascending */
  const float *bias_values;
  int32_t n_history;
  const int32_t *history;     /* memory, (n_history,) tokens that the penalty counts; repeats allowed */
} tl_sampling;

/* CUDA: a row that steps by itself, what the draw at the end of a step changes, so that the next step can be enqueued unchanged. */
typedef struct tl_decode {
  uint32_t size;
  int32_t n_drawn;            /* in/out: draws so far */
  int32_t n_left;             /* in/out: draws that may follow; the last one, or a stop token, sets the row's pos to -1 */
  int32_t n_stop;
  const int32_t *stop;        /* memory, (n_stop,) */
  int32_t *history;           /* memory, NULL or the sequence's tokens by position: drawn ones are added, the penalty counts all */
  uint64_t *out;              /* NULL, or a ring that the host may read meanwhile: draw i (0-based) is at out[i % out_size] */
  int32_t out_size;           /*   as (i + 1) << 32 | token */
  int32_t reserved;
} tl_decode;

enum { TL_RUN_PRELUDE = 1, TL_RUN_CORE = 2, TL_RUN_CODA = 4, TL_RUN_HEAD = 8, TL_RUN_ALL = 15, TL_RUN_REBUILD = 16 };

/* Rows to run. A row is one token of one sequence; rows of a sequence are in ascending position order. Arrays are memory.
 * On CUDA nothing in them is read before the batch runs, so that a captured batch may be replayed with other rows: the
 * numbers here are then upper bounds, and rows without work have pos < 0. */
typedef struct tl_batch {
  uint32_t size;
  int32_t n_rows;
  int32_t sections;             /* TL_RUN_* */
  int32_t loop_begin, loop_end; /* core loops to run */
  int32_t window;               /* cache_window, 0 = full */
  const int32_t *token;         /* (n_rows,) */
  const int32_t *pos;           /* (n_rows,) */
  const int32_t *seq;           /* (n_rows,) index into page_table */
  const int32_t *const *page_table; /* per sequence, (n_stages, table_stride): page index, -1 where freed or absent */
  const float *x_in;            /* (n_rows, dim) state to go on from instead of state_init; needed without the prelude, or NULL */
  int32_t n_out;
  const int32_t *out_row;       /* (n_out,) rows that reach the head, ascending */
  float *boundary_x;            /* (loop_end - loop_begin, n_out, dim): x of the out rows after each loop, or NULL */
  float *final_x;               /* (n_out, dim): x of the out rows before the final norm, or NULL */
  float *logits;                /* (n_out, vocab_size), or NULL */
  const tl_sampling *sampling;  /* (n_out,), or NULL */
  int32_t *sampled;             /* (n_out,) drawn tokens; needs sampling, and may be NULL with decode */
  const int32_t *const *operand_table; /* as page_table, of operand pages: where the operands of the QKV products are kept, or NULL */
  const float *e_in;  /* (n_rows, dim) what the prelude gave; needed where loops inject it and the prelude is left out, or NULL */
  float *x_out;       /* (n_rows, dim): x of every row after the last loop, before a loop norm "last"; needs the core, or NULL */
  float *e_out;       /* (n_rows, dim): what the prelude gives every row, from STATE_INIT; needs the prelude, or NULL */
  tl_decode *decode;            /* (n_out,), or NULL; CUDA alone has it; needs sampling and n_out == n_rows, out_row[i] == i. Row i's token and pos
                                 * are written: a draw's position is pos + 1, and its history tl_decode.history where given */
} tl_batch;

/* With TL_RUN_REBUILD, the other sections (not the head) do nothing but write the K and V of the rows from the operands that
 * operand_table has of them, with the bits of the run that kept them; tokens are not read.
 * With sections == TL_RUN_HEAD, x_in holds the n_out final states and no row runs (n_rows == 0).
 * Without the prelude, rows start from x_in at loop_begin: a prompt goes on at a further depth from the x_out of a batch that
 * ended there. */
TL_API tl_status tl_plan_enqueue(tl_plan *plan, const tl_batch *batch, void *stream);
/* K and V values clamped to float16's range since the plan was made. */
TL_API tl_status tl_plan_n_clamped(const tl_plan *plan, uint64_t *n_clamped);

/* One page between the backend's layout and the canonical one: keys and values, (n_layers of the part, n_kv_heads, 16) rows
 * each, in memory. A row is head_dim values of a float type. Of TL_INT8, and keys of TL_INT4: head_dim signed codes and a
 * bfloat16 scale. Values of TL_INT4: head_dim codes two to a byte, the even dimension in the low half, then
 * ceil(head_dim / TL_KV_GROUP) bfloat16 scales and as many zeros. Codes are of the rotated head (docs/kv-modes.md). */
TL_API tl_status tl_plan_row_nbytes(const tl_plan_desc *desc, uint64_t *key_nbytes, uint64_t *value_nbytes);
TL_API tl_status tl_plan_export_page(tl_plan *plan, int32_t part, int32_t page, void *keys, void *values, void *stream);
TL_API tl_status tl_plan_import_page(tl_plan *plan, int32_t part, int32_t page, const void *keys, const void *values, void *stream);

/* One operand page: per layer 16 rows of the operand's type (of TL_INT8 weights bfloat16 on CUDA, on the CPU codes in whole
 * groups, then their float scales), zeros up to tl_plan_operand_page_nbytes(). */
TL_API tl_status tl_plan_export_operands(tl_plan *plan, int32_t part, int32_t page, void *operands, void *stream);
TL_API tl_status tl_plan_import_operands(tl_plan *plan, int32_t part, int32_t page, const void *operands, void *stream);

/* ---- single operations, for tests ------------------------------------------------------------------------------- */

typedef struct tl_matmul_args {
  uint32_t size;
  int32_t n_rows;
  tl_matrix weight;
  const float *bias;  /* (n_out,) or NULL */
  const float *a;     /* (n_rows, n_in) */
  float *y;           /* (n_rows, n_out) */
} tl_matmul_args;
TL_API tl_status tl_op_matmul(tl_context *context, const tl_matmul_args *args, void *stream);

/* y = weight * x / sqrt(mean(x^2) + eps), row by row. */
TL_API tl_status tl_op_rms_norm(tl_context *context, int32_t n_rows, int32_t dim, float eps, const float *x, const float *weight, float *y,
                                void *stream);

/* y = act(gate) * up, or act(up) where gate is NULL. */
TL_API tl_status tl_op_activation(tl_context *context, int32_t act, int64_t n, const float *gate, const float *up, float *y, void *stream);

/* work: memory, tl_op_sample_work_floats(vocab_size) floats. */
TL_API uint64_t tl_op_sample_work_floats(int32_t vocab_size);
TL_API tl_status tl_op_sample(tl_context *context, int32_t vocab_size, const tl_sampling *sampling, const float *logits, float *work, int32_t *token,
                              void *stream);

/* Reads nbytes n_repeats times with every thread and reports the rate: what the memory under a set of this size allows. */
TL_API tl_status tl_probe_read(tl_context *context, const void *data, uint64_t nbytes, int32_t n_repeats, double *bytes_per_second, void *stream);

#ifdef __cplusplus
}
#endif
#endif /* TINYLOOP_H */
