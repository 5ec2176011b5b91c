// One kernel for the products and attentions of a one-row step: hundreds of tasks, each waiting for what the one before wrote.
//
// All multiprocessors hold a CTA for the whole step, in clusters for the attention. Between two tasks lies a barrier of the grid
// instead of a kernel's end and the next one's start; the warps go on reading weights of later tasks meanwhile, which no
// barrier holds up, so that memory is busy also while rows are normed, sums merged and barriers met. What a task computes, and so
// every bit, is what its kernel computes: the code is theirs (gemv_body.cuh, attend_split_body.cuh).
//
// The tasks lie in scratch memory, written when a step of their kind is first enqueued; core loops that differ by their stage
// alone are kept once, and rows that differ by where their state lies share them. Where no more kinds fit, kernels run one by one.
#include "step.cuh"

#include <string.h>

#include <algorithm>

#include "attend_split_body.cuh"
#include "host.h"
#include "step_stream.cuh"

namespace tl {
namespace {

constexpr int kStepCluster = 8, kMaxSlots = 6, kMinSlots = 2;
constexpr int kMaxTasks = 512, kMinTasks = 8;  // as many as shared memory is to hold of; as few as pay
constexpr uint64_t kCounterBytes = 256, kProgramsBytes = 1 << 20;

struct alignas(16) StepTask {
  int32_t attends, weight_dtype;
  union {
    Gemv gemv;
    AttendArgs attend;
  };
};
static_assert(sizeof(StepTask) % 16 == 0, "tasks are copied in pieces of sixteen bytes");

struct StepArgs {
  const StepTask *tasks;
  const StreamTask *streams;
  StepOrder order;
  Rows rows;        // whose step it is: not in the tasks, which rows share
  int32_t n_slots;                        // of a warp's ring
  int32_t streams_at, tasks_at, work_at;  // in shared memory, behind the ring
  unsigned long long *counter;
};

#if TL_HOPPER
TL_DEVICE void request_task(StepTask *to, const StepTask *from) {
  for (int i = threadIdx.x * 16; i < (int)sizeof(StepTask); i += kThreads * 16) copy16_async((uint8_t *)to + i, (const uint8_t *)from + i);
  commit_copies();
}

// Puts into an attention whose rows it is for, and which loop's. By one thread, between two barriers.
TL_DEVICE void address(StepTask &t, const Rows &rows, int round) {
  Rows &r = t.attend.place.rows;
  r.pos = rows.pos;
  r.seq = rows.seq;
  r.page_table = rows.page_table;
  r.stage += round;
}

template <class W, class Wait>
TL_DEVICE void run_product(const Gemv &v, uint8_t *work, StepStream &stream, const Wait &wait) {
  const int cta = blockIdx.x;
  if (cta >= v.n_ctas) return;
  const CtaShare share = share_of(cta, v.units_each, v.units_more, v.args.unit_panels);
  if (v.args.program.n_ops)
    run_gemv<W, true>(v, work, share, cta == 0, stream, wait);
  else
    run_gemv<W, false>(v, work, share, cta == 0, stream, wait);
}

#endif

template <class Kv>
__global__ void __launch_bounds__(kThreads, 1) run_step(const StepArgs a) {
#if TL_HOPPER
  uint8_t *shared = shared_memory<uint8_t>(), *work = shared + a.work_at;
  StreamTask *streams = (StreamTask *)(shared + a.streams_at);
  StepTask *held = (StepTask *)(shared + a.tasks_at);  // two: the one that runs and the next
  for (int i = threadIdx.x * 16; i < a.order.n_tasks * (int)sizeof(StreamTask); i += kThreads * 16)
    copy16_async((uint8_t *)streams + i, (const uint8_t *)a.streams + i);
  request_task(held, a.tasks);
  wait_copies<0>();
  __syncthreads();
  if (threadIdx.x == 0 && !streams[0].data) address(held[0], a.rows, 0);
  __syncthreads();
  StepStream stream(streams, a.order, a.n_slots, blockIdx.x, __shfl_sync(0xffffffffu, warp_id(), 0), shared_of(shared));
  wait_for_previous_kernel();

  // Arrivals so far: a CTA that looks here has not arrived yet, so that no round of arrivals is complete beyond what earlier steps left.
  unsigned long long target = 0;
  if (threadIdx.x == 0) target = grid_arrivals(a.counter) / gridDim.x * gridDim.x;
  int task = 0, round = 0;
#pragma unroll 1
  for (int n = 0; task < a.order.n_tasks; n++) {
    const StepTask &t = held[n % 2];
    int next = task, next_round = round;
    a.order.next(next, next_round);
    if (next < a.order.n_tasks) request_task(held + (n + 1) % 2, a.tasks + next);
    bool waited = false;
    const auto wait = [&] {
      if (threadIdx.x == 0) grid_wait(a.counter, target);
      __syncthreads();
      waited = true;
    };
    if (t.attends) {
      const int n_units = subtiles(t.attend) * t.attend.place.n_kv_heads;
#pragma unroll 1
      for (int unit = blockIdx.x / kStepCluster; unit < n_units; unit += gridDim.x / kStepCluster)
        attend_unit<Kv>(t.attend, work, unit, [&] {
          if (!waited) wait();
        });
    } else if (t.weight_dtype == TL_INT8) {
      run_product<Int8Weights>(t.gemv, work, stream, wait);
    } else if (t.weight_dtype == TL_BF16) {
      run_product<FloatWeights<Bf16>>(t.gemv, work, stream, wait);
    } else {
      run_product<FloatWeights<F16>>(t.gemv, work, stream, wait);
    }
    if (!waited) wait();
    wait_copies<0>();
    if (next < a.order.n_tasks && !streams[next].data) {
      __syncthreads();
      if (threadIdx.x == 0) address(held[(n + 1) % 2], a.rows, next_round);
    }
    __syncthreads();
    if (threadIdx.x == 0) grid_arrive(a.counter);
    target += gridDim.x;
    task = next;
    round = next_round;
  }
#endif
}

// ---- on the host

struct Program {
  std::vector<StepTask> tasks;
  std::vector<StreamTask> streams;
  StepOrder order;
};

StepTask task_of(const StepPart &part, int n_ctas) {
  StepTask t;
  memset((void *)&t, 0, sizeof t);  // compared byte by byte
  t.attends = part.attends;
  if (part.attends) {
    t.attend = part.attend;
    t.attend.rows_of_tile = 1;
    t.attend.queries_of_tile = kTileQueries;
    Rows &rows = t.attend.place.rows;  // put in where it runs: rows share tasks
    rows.pos = rows.seq = nullptr;
    rows.page_table = nullptr;
  } else {
    t.weight_dtype = part.gemv.weight.dtype;
    t.gemv = plan_gemv(part.gemv, n_ctas);
    t.gemv.args.program.token = t.gemv.args.program.pos = nullptr;  // of programs that do not run at the head of a product
  }
  return t;
}

bool same_but_stage(StepTask a, StepTask b) {
  if (a.attends) a.attend.place.rows.stage = b.attend.place.rows.stage = 0;
  return !memcmp(&a, &b, sizeof a);
}

StreamTask stream_of(const StepTask &t) {
  if (t.attends) return StreamTask{};
  const Gemv &v = t.gemv;
  const int chunk_bytes = kChunkBlocks * (t.weight_dtype == TL_INT8 ? Int8Weights::kBlockBytes : FloatWeights<Bf16>::kBlockBytes);
  return {v.args.weight.data, v.n_ctas, v.units_each, v.units_more, v.args.unit_panels, v.n_chunks, v.panel_bytes, chunk_bytes / kSlotBytes};
}

// The tasks, with the loops after the second one left out where they are the second one at other stages.
Program program_of(const std::vector<StepPart> &parts, const std::vector<int> &loops, int n_ctas) {
  Program p;
  for (const StepPart &part : parts) p.tasks.push_back(task_of(part, n_ctas));
  const int n_loops = std::max(0, (int)loops.size() - 1), n = n_loops > 1 ? loops[2] - loops[1] : 0;
  bool repeats = n > 0;
  for (int loop = 2; loop < n_loops && repeats; loop++) {
    repeats = loops[loop + 1] - loops[loop] == n;
    for (int i = 0; i < n && repeats; i++) {
      const StepTask &a = p.tasks[loops[1] + i], &b = p.tasks[loops[loop] + i];
      repeats = same_but_stage(a, b) && (!a.attends || b.attend.place.rows.stage == a.attend.place.rows.stage + loop - 1);
    }
  }
  p.order = {(int32_t)p.tasks.size(), 0, 1, 0};
  if (repeats) {
    p.order = {loops[1], n, n_loops - 1, 0};
    p.tasks.erase(p.tasks.begin() + loops[2], p.tasks.begin() + loops[n_loops]);
  }
  p.order.n_tasks = (int32_t)p.tasks.size();
  for (const StepTask &t : p.tasks) p.streams.push_back(stream_of(t));
  return p;
}

// Where in scratch memory the bytes are; written there if they are new. NULL where no more fit.
const uint8_t *placed(const tl_context &context, tl_plan &plan, const std::vector<uint8_t> &bytes) {
  uint64_t at = kCounterBytes;
  for (const std::vector<uint8_t> &kept : plan.step_programs) {
    if (kept == bytes) return plan.memory + plan.scratch.step + at;
    at += (kept.size() + 255) / 256 * 256;
  }
  if (at + bytes.size() > step_nbytes(context)) return nullptr;
  write_now(context, plan.memory + plan.scratch.step + at, bytes.data(), bytes.size());
  plan.step_programs.push_back(bytes);
  return plan.memory + plan.scratch.step + at;
}

template <class Kv>
int attend_nbytes(const AttendArgs &a) {
  Split s;
  return lay_out<Kv>(s, nullptr, a.place.kv, tile_queries(a), kStepCluster, 0);
}

// What differs by the type of keys and values.
struct StepKernel {
  void (*kernel)(StepArgs);
  int (*attend_nbytes)(const AttendArgs &);
};
template <class Kv>
StepKernel step_kernel() {
  return {run_step<Kv>, attend_nbytes<Kv>};
}
StepKernel kernel_of(int kv_dtype) {
  switch (kv_dtype) {
    case TL_BF16: return step_kernel<Bf16>();
    case TL_F16: return step_kernel<F16>();
    case TL_INT8: return step_kernel<Codes<8>>();
    default: return step_kernel<Codes<4>>();
  }
}

// How many clusters run at once with so much shared memory.
int clusters_of(const tl_context &context, int shared_nbytes) {
#if defined(TL_EMULATOR)
  (void)context, (void)shared_nbytes;
  return 2;
#else
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = kStepCluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(context.n_multiprocessors / kStepCluster * kStepCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_nbytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int n = 0;
  require(cudaFuncSetAttribute(run_step<Bf16>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_nbytes), "sizing shared memory");
  require(cudaOccupancyMaxActiveClusters(&n, run_step<Bf16>, &config), "asking how many clusters run at once");
  return n;
#endif
}

}  // namespace

uint64_t step_nbytes(const tl_context &context) { return context.steps ? kCounterBytes + kProgramsBytes : 0; }

bool launch_step(const Launcher &launcher, tl_plan &plan, const std::vector<StepPart> &parts, const std::vector<int> &loops) {
  tl_context &context = launcher.context;
  if (!context.steps || (int)parts.size() < kMinTasks || plan.desc.kv_dtype == TL_F32) return false;
  if (!context.n_step_clusters) context.n_step_clusters = clusters_of(context, context.max_shared_nbytes);
  const int n_ctas = context.n_step_clusters * kStepCluster;
  if (!n_ctas) return false;
  const StepKernel step = kernel_of(plan.desc.kv_dtype);
  const Program program = program_of(parts, loops, n_ctas);
  int work = 0;
  for (const StepTask &t : program.tasks) work = std::max(work, t.attends ? step.attend_nbytes(t.attend) : t.gemv.nbytes);
  if (program.order.n_tasks > kMaxTasks) return false;
  const int streams_nbytes = program.order.n_tasks * (int)sizeof(StreamTask), tasks_nbytes = 2 * (int)sizeof(StepTask);
  const int n_slots =
      std::min(kMaxSlots, (context.max_shared_nbytes - round_up(streams_nbytes, 128) - tasks_nbytes - work - 256) / (kWarps * (kSlotBytes + 8)));
  if (n_slots < kMinSlots) return false;

  std::vector<uint8_t> bytes(program.tasks.size() * sizeof(StepTask) + streams_nbytes);
  memcpy(bytes.data(), program.tasks.data(), program.tasks.size() * sizeof(StepTask));
  memcpy(bytes.data() + program.tasks.size() * sizeof(StepTask), program.streams.data(), streams_nbytes);
  const uint8_t *at = placed(context, plan, bytes);
  if (!at) return false;

  StepArgs a = {};
  a.tasks = (const StepTask *)at;
  a.streams = (const StreamTask *)(at + program.tasks.size() * sizeof(StepTask));
  a.order = program.order;
  for (const StepPart &part : parts)
    if (part.attends) a.rows = part.attend.place.rows;
  a.n_slots = n_slots;
  a.streams_at = round_up(kWarps * n_slots * (kSlotBytes + 8), 128);
  a.tasks_at = round_up(a.streams_at + streams_nbytes, 16);
  a.work_at = round_up(a.tasks_at + tasks_nbytes, 128);
  a.counter = (unsigned long long *)(plan.memory + plan.scratch.step);
  const Shape shape{dim3(n_ctas), kThreads, a.work_at + work, kStepCluster, true};
  launcher.launch(step.kernel, shape, a);
  return true;
}

}  // namespace tl
