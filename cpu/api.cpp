// The exports of tinyloop.h: every body catches what is thrown and returns a status.
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <stdexcept>
#include <system_error>

#include "cpu_features.h"
#include "plan.h"
#include "sampling.h"
#include "tinyloop_check.h"

namespace {

constexpr int kNumericsVersion = 1;  // raise with any change that may change a bit of a result

thread_local char last_error[256] = "";

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
  } catch (const std::system_error &e) {
    return fail(TL_ERR_OUT_OF_MEMORY, e.what());
  } catch (const std::exception &e) {
    return fail(TL_ERR_INTERNAL, e.what());
  }
}

// Runs body(unit) for 0 <= unit < n on all threads of a context.
template <class Body>
void share(tl_context &c, int n, Body body) {
  struct Job {
    tl_context &c;
    int n;
    Body &body;
  } job{c, n, body};
  c.pool.run(
      [](void *arg, int thread) {
        Job &j = *(Job *)arg;
        const uint32_t mode = j.c.kernels.enter_float_mode();
        j.c.pool.share(thread, j.n, true, j.body);
        j.c.kernels.leave_float_mode(mode);
      },
      &job);
}

void matmul(tl_context &c, const tl_matmul_args &a) {
  const tl::Kernels &k = c.kernels;
  const int most = k.block_rows(a.weight.dtype), n_blocks = (a.n_rows + most - 1) / most, n_out = a.weight.n_out;
  share(c, n_blocks, [&](int b) {
    const int first = b * most, n = std::min(most, a.n_rows - first);
    std::unique_ptr<uint8_t[]> memory(new uint8_t[k.block_nbytes(a.weight.dtype, a.weight.n_in, n) + 64]);
    void *block = (void *)(((uintptr_t)memory.get() + 63) / 64 * 64);
    for (int r = 0; r < n; r++) k.write_block_row(a.weight.dtype, a.weight.n_in, a.a + (int64_t)(first + r) * a.weight.n_in, block, n, r);
    float *y = a.y + (int64_t)first * n_out;
    k.matmul(&a.weight, 0, n_out / tl::kPanelRows, block, n, y, n_out);
    for (int r = 0; a.bias && r < n; r++) k.add(n_out, y + (int64_t)r * n_out, a.bias, y + (int64_t)r * n_out);
  });
}

}  // namespace

#define TL_REQUIRE(condition, text) \
  if (!(condition)) return fail(TL_ERR_INVALID, text)
#define TL_CHECK(call) \
  if (const char *tl_what = (call)) return fail(TL_ERR_INVALID, tl_what)

extern "C" {

uint32_t tl_abi_version(void) { return TL_ABI_VERSION; }
const char *tl_last_error(void) { return last_error; }

int32_t tl_usable_cpus(void) {
  const tl::CpuSet set = tl::usable_cpus();
  return std::max(1, CPU_COUNT(&set));
}

tl_status tl_context_create(const tl_context_desc *desc, tl_context **out) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(desc && out && desc->size == sizeof(tl_context_desc), "tl_context_desc.size does not match this library");
    TL_REQUIRE(desc->n_threads >= 1 && desc->n_threads <= 1024, "tl_context_desc.n_threads is outside 1..1024");
    const tl::Kernels *kernels = tl::select_kernels(desc->isa);
    if (!kernels) return fail(TL_ERR_UNSUPPORTED, "this processor lacks the code path asked for");
    *out = new tl_context(*kernels, desc->n_threads);
    return TL_OK;
  });
}

tl_status tl_context_get_info(const tl_context *context, tl_context_info *info) {
  TL_REQUIRE(context && info && info->size == sizeof(tl_context_info), "tl_context_info.size does not match this library");
  info->n_threads = context->pool.size();
  info->isa = context->kernels.isa;
  info->n_multiprocessors = 0;
  snprintf(info->name, sizeof info->name, "cpu %s", context->kernels.name);
  snprintf(info->numerics_id, sizeof info->numerics_id, "cpu-%s-v%d-k%d-c%dx%d-q%d", context->kernels.name, kNumericsVersion, TL_K_CHUNK,
           TL_KEY_CHUNK, TL_CHUNK_GROUP, TL_INT8_GROUP);
  return TL_OK;
}

tl_status tl_context_destroy(tl_context *context) {
  delete context;
  return TL_OK;
}

tl_status tl_matrix_nbytes(const tl_context *context, const tl_matrix *matrix, uint64_t *nbytes) {
  TL_REQUIRE(context && matrix && nbytes, "a pointer is NULL");
  TL_CHECK(tl::check_matrix(*matrix, false));
  *nbytes = context->kernels.matrix_nbytes(matrix);
  return TL_OK;
}

tl_status tl_matrix_pack(tl_context *context, const tl_matrix *matrix, const tl_pack_rows *rows, void *) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(context && matrix && rows, "a pointer is NULL");
    TL_CHECK(tl::check_pack(*matrix, *rows));
    constexpr int kRowsAUnit = 64;
    share(*context, (rows->n_rows + kRowsAUnit - 1) / kRowsAUnit,
          [&](int unit) { context->kernels.pack_rows(matrix, rows, unit * kRowsAUnit, std::min((unit + 1) * kRowsAUnit, (int)rows->n_rows)); });
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
  *nbytes = tl::operand_page_nbytes(*desc, part);
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
  return TL_OK;
}

tl_status tl_plan_enqueue(tl_plan *plan, const tl_batch *batch, void *) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(plan && batch && plan->memory, "a pointer is NULL, or the plan has no scratch memory yet");
    TL_CHECK(tl::check_batch(plan->desc, *batch));
    if (batch->decode) return fail(TL_ERR_UNSUPPORTED, "tl_batch.decode is set: rows that step by themselves are CUDA's alone");
    TL_CHECK(tl::check_injected(plan->phases.data(), (int)plan->phases.size(), *batch));
    for (int i = 0; batch->sampling && i < batch->n_out; i++) TL_CHECK(tl::check_sampling(batch->sampling[i]));
    tl::run_batch(*plan, *batch);
    return TL_OK;
  });
}

tl_status tl_plan_n_clamped(const tl_plan *plan, uint64_t *n_clamped) {
  TL_REQUIRE(plan && n_clamped, "a pointer is NULL");
  *n_clamped = plan->n_clamped.load();
  return TL_OK;
}

static tl_status convert_page(tl_plan *plan, int32_t part, int32_t page, void *keys, void *values, bool to_page) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(plan && keys && values && part >= 0 && part < 3 && page >= 0, "a pointer is NULL, or the part or page is unknown");
    TL_REQUIRE(plan->desc.n_layers[part] > 0, "the part has no layers");
    tl::convert_page(*plan, part, page, keys, values, to_page);
    return TL_OK;
  });
}

tl_status tl_plan_export_page(tl_plan *plan, int32_t part, int32_t page, void *keys, void *values, void *) {
  return convert_page(plan, part, page, keys, values, false);
}

tl_status tl_plan_import_page(tl_plan *plan, int32_t part, int32_t page, const void *keys, const void *values, void *) {
  return convert_page(plan, part, page, (void *)keys, (void *)values, true);
}

static tl_status convert_operands(tl_plan *plan, int32_t part, int32_t page, void *operands, bool to_page) {
  TL_REQUIRE(plan && operands && part >= 0 && part < 3 && page >= 0, "a pointer is NULL, or the part or page is unknown");
  TL_REQUIRE(plan->desc.operand_base[part], "the plan keeps no operands of the part");
  const uint64_t nbytes = plan->operand_page_nbytes[part], used = plan->operand_nbytes[part];
  uint8_t *at = (uint8_t *)plan->desc.operand_base[part] + page * nbytes;
  memcpy(to_page ? at : operands, to_page ? operands : at, used);
  if (!to_page) memset((uint8_t *)operands + used, 0, nbytes - used);
  return TL_OK;
}

tl_status tl_plan_export_operands(tl_plan *plan, int32_t part, int32_t page, void *operands, void *) {
  return convert_operands(plan, part, page, operands, false);
}

tl_status tl_plan_import_operands(tl_plan *plan, int32_t part, int32_t page, const void *operands, void *) {
  return convert_operands(plan, part, page, (void *)operands, true);
}

tl_status tl_op_matmul(tl_context *context, const tl_matmul_args *args, void *) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(context && args && args->size == sizeof(tl_matmul_args), "tl_matmul_args.size does not match this library");
    TL_REQUIRE(args->n_rows > 0 && args->a && args->y, "tl_matmul_args has no rows or a NULL pointer");
    TL_CHECK(tl::check_matrix(args->weight, true));
    matmul(*context, *args);
    return TL_OK;
  });
}

tl_status tl_op_rms_norm(tl_context *context, int32_t n_rows, int32_t dim, float eps, const float *x, const float *weight, float *y, void *) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(context && x && weight && y && n_rows > 0 && dim > 0, "a pointer is NULL or a size is not positive");
    share(*context, n_rows, [&](int r) { context->kernels.rms_norm(dim, eps, x + (int64_t)r * dim, weight, y + (int64_t)r * dim); });
    return TL_OK;
  });
}

tl_status tl_op_activation(tl_context *context, int32_t act, int64_t n, const float *gate, const float *up, float *y, void *) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(context && up && y && n > 0 && n <= INT32_MAX && act >= TL_ACT_SILU && act <= TL_ACT_RELU2, "an argument is out of range");
    share(*context, 1, [&](int) { context->kernels.activation(act, (int)n, gate, up, y); });
    return TL_OK;
  });
}

uint64_t tl_op_sample_work_floats(int32_t vocab_size) { return tl::sampling_work_floats(vocab_size); }

tl_status tl_op_sample(tl_context *context, int32_t vocab_size, const tl_sampling *sampling, const float *logits, float *work, int32_t *token,
                       void *) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(context && sampling && logits && work && token && vocab_size > 0, "a pointer is NULL or vocab_size is not positive");
    TL_CHECK(tl::check_sampling(*sampling));
    share(*context, 1, [&](int) { *token = tl::draw_token(context->kernels, vocab_size, *sampling, logits, work); });
    return TL_OK;
  });
}

tl_status tl_probe_read(tl_context *context, const void *data, uint64_t nbytes, int32_t n_repeats, double *bytes_per_second, void *) {
  return guarded([&]() -> tl_status {
    TL_REQUIRE(context && data && bytes_per_second && nbytes >= 4096 && n_repeats > 0, "a pointer is NULL or a size is too small");
    const int n = context->pool.size();
    const uint64_t part = nbytes / n / 256 * 256;
    const auto start = std::chrono::steady_clock::now();
    std::atomic<uint64_t> sink{0};
    struct Job {
      tl_context &c;
      const uint8_t *data;
      uint64_t part;
      int n_repeats;
      std::atomic<uint64_t> &sink;
    } job{*context, (const uint8_t *)data, part, n_repeats, sink};
    context->pool.run(
        [](void *arg, int thread) {
          Job &j = *(Job *)arg;
          for (int r = 0; r < j.n_repeats; r++) j.sink += j.c.kernels.read(j.data + thread * j.part, j.part);
        },
        &job);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    *bytes_per_second = (double)part * n * n_repeats / took.count();
    return TL_OK;
  });
}

}  // extern "C"
