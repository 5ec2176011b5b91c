"""Declarations of include/tinyloop.h; the C compiler takes the layouts from the header."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from "tinyloop.h" nogil:
    ctypedef int32_t tl_status

    enum:
        TL_ABI_VERSION
        TL_PAGE_POSITIONS
        TL_INT8_GROUP, TL_KV_GROUP
        TL_STAGE_PRELUDE, TL_STAGE_CODA, TL_STAGE_CORE
        TL_OK, TL_ERR_INVALID, TL_ERR_OUT_OF_MEMORY, TL_ERR_UNSUPPORTED, TL_ERR_DEVICE, TL_ERR_INTERNAL
        TL_F32, TL_BF16, TL_F16, TL_INT8, TL_INT4
        TL_NORM_PRE, TL_NORM_SANDWICH, TL_NORM_SUM_SANDWICH, TL_NORM_POST
        TL_ACT_SILU, TL_ACT_GELU, TL_ACT_RELU2
        TL_ISA_BEST, TL_ISA_GENERIC, TL_ISA_AVX2, TL_ISA_AVX512
        TL_PHASE_EMBED, TL_PHASE_STATE_INIT, TL_PHASE_INJECT, TL_PHASE_QKV, TL_PHASE_ATTEND, TL_PHASE_OUT
        TL_PHASE_GATE_UP, TL_PHASE_DOWN, TL_PHASE_NORM, TL_PHASE_HEAD
        TL_INIT_INPUT, TL_INIT_ZERO, TL_INIT_NORMAL
        TL_PHASE_GATED, TL_PHASE_ROPE, TL_PHASE_SAVE_INPUT
        TL_QK_NORM_NONE, TL_QK_NORM_HEAD, TL_QK_NORM_FULL
        TL_RUN_PRELUDE, TL_RUN_CORE, TL_RUN_CODA, TL_RUN_HEAD, TL_RUN_ALL, TL_RUN_REBUILD

    struct tl_context:
        pass
    struct tl_plan:
        pass

    struct tl_context_desc:
        uint32_t size
        int32_t n_threads, isa, device

    struct tl_context_info:
        uint32_t size
        int32_t n_threads, isa, n_multiprocessors
        char name[64]
        char numerics_id[64]

    struct tl_matrix:
        uint32_t size
        int32_t dtype, n_out, n_in, group_size
        void *data

    struct tl_pack_rows:
        uint32_t size
        int32_t n_rows, block, stride, offset
        const void *src
        const float *scales

    struct tl_phase:
        uint32_t size
        int32_t kind, part, layer, flags, window, block_norm, option
        float scale, softcap
        uint64_t seed
        tl_matrix weight
        const float *bias
        const float *norm
        const float *post_norm
        const float *q_norm
        const float *k_norm

    struct tl_plan_desc:
        uint32_t size
        int32_t vocab_size, dim, ffn_dim, n_heads, n_kv_heads, head_dim
        int32_t n_layers[3]
        float norm_eps
        int32_t qk_norm, rope_interleaved, rotary_dim, kv_dtype
        int32_t max_rows, max_out, max_pos, table_stride
        const float *rope_cos
        const float *rope_sin
        int32_t n_phases
        int32_t section[5]
        const tl_phase *phases
        void *kv_base[3]
        void *operand_base[3]

    struct tl_sampling:
        uint32_t size
        int32_t top_k
        float temperature, top_p, min_p, repetition_penalty
        uint64_t seed
        int32_t position, n_bias
        const int32_t *bias_ids
        const float *bias_values
        int32_t n_history
        const int32_t *history

    struct tl_decode:
        uint32_t size
        int32_t n_drawn, n_left, n_stop
        const int32_t *stop
        int32_t *history
        uint64_t *out
        int32_t out_size, reserved

    struct tl_batch:
        uint32_t size
        int32_t n_rows, sections, loop_begin, loop_end, window
        const int32_t *token
        const int32_t *pos
        const int32_t *seq
        const int32_t *const *page_table
        const float *x_in
        int32_t n_out
        const int32_t *out_row
        float *boundary_x
        float *final_x
        float *logits
        const tl_sampling *sampling
        int32_t *sampled
        const int32_t *const *operand_table
        const float *e_in
        float *x_out
        float *e_out
        tl_decode *decode

    struct tl_matmul_args:
        uint32_t size
        int32_t n_rows
        tl_matrix weight
        const float *bias
        const float *a
        float *y

# The exports, as a table of pointers that one loaded library fills.
cdef struct tl_functions:
    uint32_t (*abi_version)() noexcept nogil
    const char *(*last_error)() noexcept nogil
    int32_t (*usable_cpus)() noexcept nogil
    tl_status (*context_create)(const tl_context_desc *, tl_context **) noexcept nogil
    tl_status (*context_get_info)(const tl_context *, tl_context_info *) noexcept nogil
    tl_status (*context_destroy)(tl_context *) noexcept nogil
    tl_status (*matrix_nbytes)(const tl_context *, const tl_matrix *, uint64_t *) noexcept nogil
    tl_status (*matrix_pack)(tl_context *, const tl_matrix *, const tl_pack_rows *, void *) noexcept nogil
    tl_status (*plan_create)(tl_context *, const tl_plan_desc *, tl_plan **) noexcept nogil
    tl_status (*plan_destroy)(tl_plan *) noexcept nogil
    tl_status (*plan_page_nbytes)(const tl_plan_desc *, int32_t, uint64_t *) noexcept nogil
    tl_status (*plan_row_nbytes)(const tl_plan_desc *, uint64_t *, uint64_t *) noexcept nogil
    tl_status (*plan_operand_page_nbytes)(const tl_plan_desc *, int32_t, uint64_t *) noexcept nogil
    tl_status (*plan_scratch_nbytes)(const tl_plan *, uint64_t *) noexcept nogil
    tl_status (*plan_bind)(tl_plan *, void *) noexcept nogil
    tl_status (*plan_enqueue)(tl_plan *, const tl_batch *, void *) noexcept nogil
    tl_status (*plan_n_clamped)(const tl_plan *, uint64_t *) noexcept nogil
    tl_status (*plan_export_page)(tl_plan *, int32_t, int32_t, void *, void *, void *) noexcept nogil
    tl_status (*plan_import_page)(tl_plan *, int32_t, int32_t, const void *, const void *, void *) noexcept nogil
    tl_status (*plan_export_operands)(tl_plan *, int32_t, int32_t, void *, void *) noexcept nogil
    tl_status (*plan_import_operands)(tl_plan *, int32_t, int32_t, const void *, void *) noexcept nogil
    tl_status (*op_matmul)(tl_context *, const tl_matmul_args *, void *) noexcept nogil
    tl_status (*op_rms_norm)(tl_context *, int32_t, int32_t, float, const float *, const float *, float *, void *) noexcept nogil
    tl_status (*op_activation)(tl_context *, int32_t, int64_t, const float *, const float *, float *, void *) noexcept nogil
    uint64_t (*op_sample_work_floats)(int32_t) noexcept nogil
    tl_status (*op_sample)(tl_context *, int32_t, const tl_sampling *, const float *, float *, int32_t *, void *) noexcept nogil
    tl_status (*probe_read)(tl_context *, const void *, uint64_t, int32_t, double *, void *) noexcept nogil
