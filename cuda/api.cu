// The exports of tinyloop.h on CUDA: every body catches what is thrown and returns a status.
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <new>

#include "gemm.cuh"
#include "gemv.cuh"
#include "host.h"
#include "operands.cuh"
#include "pack.cuh"
#include "page.cuh"
#include "plan.h"
#include "rows.cuh"
#include "sample.cuh"
#include "tinyloop_check.h"

namespace {

constexpr int kNumericsVersion = 1;  // raise with any change that may change a bit of a result

thread_local char last_error[512] = "";

tl_status fail(tl_status status, const char *text) {
  snprintf(last_error, sizeof last_error, "%s", text);
  return status;
}

template <class Body>
tl_status guarded(Body body) {
  try {
    return body();
  } catch (const std::bad_alloc &) {
    return fail(TL_ERR_OUT_OF_MEMORY, "out of memory for the library's own state");
  } catch (const tl::DeviceError &e) {
    return fail(e.error == cudaErrorMemoryAllocation ? TL_ERR_OUT_OF_MEMORY : TL_ERR_DEVICE, e.what());
  } catch (const std::length_error &e) {
    return fail(TL_ERR_UNSUPPORTED, e.what());
  } catch (const std::exception &e) {
    return fail(TL_ERR_INTERNAL, e.what());
  }
}

// The products of the tests, along the same paths as a plan's.
void matmul(tl_context &c, const tl_matmul_args &a, cudaStream_t stream) {
  using namespace tl;
  const Launcher launcher{c, stream};
  const Matrix weight = matrix_of(a.weight);
  Epilogue to_y = {};
  to_y.kind = kToRows;
  to_y.out = a.y;
  to_y.stride = weight.n_out;
  RowsArgs rows = {};
  rows.program.dim = weight.n_in;
  rows.program.n_ops = 1;
  rows.program.op[0] = RowOp{kRowLoad, weight.n_in, a.a, 0.0f, 0};
  const bool is_f32 = weight.dtype == TL_F32;
  GemvArgs g = {weight, a.bias, a.n_rows, 1, {}, {}, to_y};
  const bool few = !is_f32 && a.n_rows <= kGemvRows && gemv_shared_nbytes(c, g) <= c.max_shared_nbytes;
  if (few && a.n_rows == 1 && fits_gemv(rows.program)) {
    g.program = rows.program;
    return launch_gemv(launcher, g);
  }
  const int n_rows = round_up(a.n_rows, kRowTile);
  TemporaryMemory memory((uint64_t)n_rows * round_up(weight.n_in, 64) * 4, stream);
  rows.operand = Operand{memory.data, operand_dtype(weight.dtype), few || is_f32 ? kOperandRows : kOperandTiles, pad16(weight.n_in), n_rows / 8};
  launch_rows(launcher, a.n_rows, rows);
  if (few) {
    g.source = rows.operand;
    return launch_gemv(launcher, g);
  }
  const GemmArgs many{weight, a.bias, a.n_rows, rows.operand, to_y, {}};
  return is_f32 ? launch_gemm_f32(launcher, many) : launch_gemm(launcher, many);
}

}  // namespace

#define TL_REQUIRE(condition, text) \
  if (!(condition)) return fail(TL_ERR_INVALID, text)
#define TL_CHECK(call) \
  if (const char *tl_what = (call)) return fail(TL_ERR_INVALID, tl_what)

namespace {

tl_status convert_page(tl_plan *plan, int32_t part, int32_t page, void *keys, void *values, bool imports, void *stream) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(plan && keys && values && part >= 0 && part < 3 && page >= 0, "a pointer is NULL, or the part or page is unknown");
    const tl_plan_desc &d = plan->desc;
    TL_REQUIRE(d.n_layers[part], "the part has no layers");
    tl::PageArgs a = {};
    a.kv = tl::kv_layer(d, part, 0);
    a.layer_nbytes = a.kv.page_nbytes / d.n_layers[part];
    a.page = page;
    a.n_layers = d.n_layers[part];
    a.n_kv_heads = d.n_kv_heads;
    a.head_dim = d.head_dim;
    a.keys = keys;
    a.values = values;
    a.imports = imports;
    tl::use_device(plan->context);
    tl::launch_convert_page({plan->context, (cudaStream_t)stream}, a);
    return TL_OK;
  });
}

tl_status convert_operands(tl_plan *plan, int32_t part, int32_t page, void *operands, bool imports, void *stream) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(plan && operands && part >= 0 && part < 3 && page >= 0, "a pointer is NULL, or the part or page is unknown");
    TL_REQUIRE(plan->desc.operand_base[part], "the plan keeps no operands of the part");
    const tl_phase *phases = plan->phases.data();
    const int n = (int)plan->phases.size();
    const uint64_t nbytes = tl::operand_page_nbytes(phases, n, part);
    uint8_t *in_page = (uint8_t *)plan->desc.operand_base[part] + page * nbytes, *outside = (uint8_t *)operands;
    tl::use_device(plan->context);
    tl::launch_operand_page({plan->context, (cudaStream_t)stream},
                            {imports ? outside : in_page, imports ? in_page : outside, tl::operand_nbytes(phases, n, part), nbytes});
    return TL_OK;
  });
}

}  // namespace

extern "C" {

uint32_t tl_abi_version(void) { return TL_ABI_VERSION; }
const char *tl_last_error(void) { return last_error; }
int32_t tl_usable_cpus(void) { return tl::usable_cpus(); }

tl_status tl_context_create(const tl_context_desc *desc, tl_context **out) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(desc && out && desc->size == sizeof(tl_context_desc), "tl_context_desc.size does not match this library");
    return tl::open_device(desc->device, out, [](const char *text) { return fail(TL_ERR_UNSUPPORTED, text); });
  });
}

tl_status tl_context_get_info(const tl_context *context, tl_context_info *info) {
  TL_REQUIRE(context && info && info->size == sizeof(tl_context_info), "tl_context_info.size does not match this library");
  info->n_threads = 0;
  info->isa = TL_ISA_BEST;
  info->n_multiprocessors = context->n_multiprocessors;
  snprintf(info->name, sizeof info->name, "%s", context->name);
  snprintf(info->numerics_id, sizeof info->numerics_id, "cuda-sm%d%d-%s-v%d-k%d-c%dx%d", context->major, context->minor,
           context->code == tl::kCodeSm80 ? "sm80" : "sm90", kNumericsVersion, TL_K_CHUNK, TL_KEY_CHUNK, TL_CHUNK_GROUP);
  return TL_OK;
}

tl_status tl_context_destroy(tl_context *context) {
  delete context;
  return TL_OK;
}

tl_status tl_matrix_nbytes(const tl_context *context, const tl_matrix *matrix, uint64_t *nbytes) {
  TL_REQUIRE(context && matrix && nbytes, "a pointer is NULL");
  TL_CHECK(tl::check_matrix(*matrix, false));
  *nbytes = tl::matrix_nbytes(*matrix);
  return TL_OK;
}

tl_status tl_matrix_pack(tl_context *context, const tl_matrix *matrix, const tl_pack_rows *rows, void *stream) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(context && matrix && rows, "a pointer is NULL");
    TL_CHECK(tl::check_pack(*matrix, *rows));
    tl::use_device(*context);
    tl::launch_pack({*context, (cudaStream_t)stream}, {tl::matrix_of(*matrix), *rows});
    return TL_OK;
  });
}

tl_status tl_plan_create(tl_context *context, const tl_plan_desc *desc, tl_plan **out) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(context && desc && out, "a pointer is NULL");
    TL_CHECK(tl::check_plan(*desc));
    *out = new tl_plan(*context, *desc);
    return TL_OK;
  });
}

tl_status tl_plan_destroy(tl_plan *plan) {
  delete plan;
  return TL_OK;
}

tl_status tl_plan_page_nbytes(const tl_plan_desc *desc, int32_t part, uint64_t *nbytes) {
  TL_REQUIRE(desc && nbytes && part >= 0 && part < 3, "a pointer is NULL or the part is unknown");
  TL_CHECK(tl::check_sizes(*desc));
  *nbytes = tl::page_nbytes(*desc, part);
  return TL_OK;
}

tl_status tl_plan_row_nbytes(const tl_plan_desc *desc, uint64_t *key_nbytes, uint64_t *value_nbytes) {
  TL_REQUIRE(desc && key_nbytes && value_nbytes, "a pointer is NULL");
  TL_CHECK(tl::check_sizes(*desc));
  *key_nbytes = key_row_nbytes(desc->kv_dtype, desc->head_dim);
  *value_nbytes = value_row_nbytes(desc->kv_dtype, desc->head_dim);
  return TL_OK;
}

tl_status tl_plan_operand_page_nbytes(const tl_plan_desc *desc, int32_t part, uint64_t *nbytes) {
  TL_REQUIRE(desc && nbytes && part >= 0 && part < 3, "a pointer is NULL or the part is unknown");
  TL_CHECK(tl::check_sizes(*desc));
  TL_REQUIRE(desc->phases && desc->n_phases > 0, "tl_plan_desc has no phases");
  *nbytes = tl::operand_page_nbytes(desc->phases, desc->n_phases, part);
  return TL_OK;
}

tl_status tl_plan_scratch_nbytes(const tl_plan *plan, uint64_t *nbytes) {
  TL_REQUIRE(plan && nbytes, "a pointer is NULL");
  *nbytes = plan->scratch.nbytes;
  return TL_OK;
}

tl_status tl_plan_bind(tl_plan *plan, void *scratch) {
  TL_REQUIRE(plan && scratch && (uint64_t)scratch % 64 == 0, "the scratch memory is NULL or not 64-byte aligned");
  plan->memory = (uint8_t *)scratch;
  plan->step_programs.clear();
  return TL_OK;
}

tl_status tl_plan_enqueue(tl_plan *plan, const tl_batch *batch, void *stream) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(plan && batch && plan->memory, "a pointer is NULL, or the plan has no scratch memory yet");
    TL_CHECK(tl::check_batch(plan->desc, *batch));
    TL_CHECK(tl::check_injected(plan->phases.data(), (int)plan->phases.size(), *batch));
    tl::use_device(plan->context);
    tl::enqueue_batch(*plan, *batch, (cudaStream_t)stream);
    return TL_OK;
  });
}

tl_status tl_plan_n_clamped(const tl_plan *plan, uint64_t *n_clamped) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(plan && n_clamped, "a pointer is NULL");
    *n_clamped = 0;
    if (plan->memory) tl::read_back(plan->context, n_clamped, plan->memory + plan->scratch.n_clamped, sizeof *n_clamped);
    return TL_OK;
  });
}

tl_status tl_plan_export_page(tl_plan *plan, int32_t part, int32_t page, void *keys, void *values, void *stream) {
  return convert_page(plan, part, page, keys, values, false, stream);
}

tl_status tl_plan_import_page(tl_plan *plan, int32_t part, int32_t page, const void *keys, const void *values, void *stream) {
  return convert_page(plan, part, page, (void *)keys, (void *)values, true, stream);
}

tl_status tl_plan_export_operands(tl_plan *plan, int32_t part, int32_t page, void *operands, void *stream) {
  return convert_operands(plan, part, page, operands, false, stream);
}

tl_status tl_plan_import_operands(tl_plan *plan, int32_t part, int32_t page, const void *operands, void *stream) {
  return convert_operands(plan, part, page, (void *)operands, true, stream);
}

tl_status tl_op_matmul(tl_context *context, const tl_matmul_args *args, void *stream) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(context && args && args->size == sizeof(tl_matmul_args), "tl_matmul_args.size does not match this library");
    TL_REQUIRE(args->n_rows > 0 && args->a && args->y, "tl_matmul_args has no rows or a NULL pointer");
    TL_CHECK(tl::check_matrix(args->weight, true));
    tl::use_device(*context);
    matmul(*context, *args, (cudaStream_t)stream);
    return TL_OK;
  });
}

tl_status tl_op_rms_norm(tl_context *context, int32_t n_rows, int32_t dim, float eps, const float *x, const float *weight, float *y, void *stream) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(context && x && weight && y && n_rows > 0 && dim > 0, "a pointer is NULL or a size is not positive");
    tl::use_device(*context);
    tl::RowsArgs a = {};
    a.program.dim = dim;
    a.program.eps = eps;
    a.program.n_ops = 3;
    a.program.op[0] = {tl::kRowLoad, dim, x, 0.0f, 0};
    a.program.op[1] = {tl::kRowNorm, 0, weight, 0.0f, 0};
    a.program.op[2] = {tl::kRowStore, dim, y, 0.0f, 0};
    tl::launch_rows({*context, (cudaStream_t)stream}, n_rows, a);
    return TL_OK;
  });
}

tl_status tl_op_activation(tl_context *context, int32_t act, int64_t n, const float *gate, const float *up, float *y, void *stream) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(context && up && y && n > 0 && act >= TL_ACT_SILU && act <= TL_ACT_RELU2, "an argument is out of range");
    tl::use_device(*context);
    tl::launch_activation({*context, (cudaStream_t)stream}, {act, n, gate, up, y});
    return TL_OK;
  });
}

uint64_t tl_op_sample_work_floats(int32_t vocab_size) { return tl::sample_work_floats(vocab_size); }

tl_status tl_op_sample(tl_context *context, int32_t vocab_size, const tl_sampling *sampling, const float *logits, float *work, int32_t *token,
                       void *stream) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(context && sampling && logits && work && token && vocab_size > 0, "a pointer is NULL or vocab_size is not positive");
    TL_REQUIRE(sampling->size == sizeof(tl_sampling), "tl_sampling.size does not match this library");
    tl::use_device(*context);
    tl::launch_sample({*context, (cudaStream_t)stream}, 1, {vocab_size, nullptr, logits, work, token, nullptr, nullptr, nullptr, *sampling, 0});
    return TL_OK;
  });
}

tl_status tl_probe_read(tl_context *context, const void *data, uint64_t nbytes, int32_t n_repeats, double *bytes_per_second, void *stream) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(context && data && bytes_per_second && nbytes >= 4096 && n_repeats > 0, "a pointer is NULL or a size is too small");
    tl::use_device(*context);
    const tl::ReadArgs args{(const uint4 *)data, (int64_t)(nbytes / 16), n_repeats, nullptr};
    const double seconds = tl::time_on_device((cudaStream_t)stream, [&] { tl::launch_read({*context, (cudaStream_t)stream}, args); });
    *bytes_per_second = (double)(nbytes / 16 * 16) * n_repeats / seconds;
    return TL_OK;
  });
}

}  // extern "C"
