// One kernel for the products and attentions of a one-row step: hundreds of tasks, each of which needs what the one before wrote.
//
// All multiprocessors hold a CTA for the whole step. A task's results go to the other CTAs as flagged words (device.cuh): whoever needs
// one reads it until its flag is right, so that there is no barrier, no fence and no second read. A warp of each CTA streams weights,
// keys and values of this and later tasks meanwhile (step_stream.cuh), which nothing holds up. What a task computes, and so every bit, is
// what its kernel computes (gemv.cu, attend_split.cu).
//
// A word may be written again once all who read it are done. They are: a CTA writes in task n only after it has read all of what task
// n - 1 left, which every CTA with a part in that wrote after it had read what task n - 2 left, and so on. So whoever waits for words leaves
// some that another CTA waits for: a CTA with nothing to do in an attention waits for none, and a row that does nothing, whose k and v no
// one would read, has no step. Results also go to memory, for kernels that follow.
//
// The tasks lie in scratch memory, written when a step of their kind is first enqueued; core loops that differ by their stage alone are
// kept once, and rows that differ by where their state lies share them. Where no more kinds fit, kernels run one by one.
#include "step.cuh"

#include <string.h>

#include <algorithm>
#include <utility>

#include "host.h"
#include "step_attend_codes.cuh"
#include "step_program.h"

namespace tl {
namespace {

constexpr int kStepThreads = kThreads + 128;  // and four warps, of which one streams; they give their registers to the others
constexpr int kMinSlots = kTeamsOfCta * kPagesOfChunk, kMaxTasks = 1024;
constexpr int kMinTasks = 8;  // fewer do not pay
// With fewer slots no warp looks for weights right behind an attention, which it may have left before the others. The farthest ahead is the first
// warp of the last team: its item, the seventh of the product, lies behind all chunks of the teams, of which it has waited for the second page of
// the first one. As many slots before that page all are free, so that the item's slot is not two uses behind (see Ring).
constexpr int kHoldSlots = kTeamsOfCta * kPagesOfChunk + (kWarps - kWarpsOfTeam) - (kPagesOfWarp - 1);
// Slots that a CTA asks for before they are there. More would not make memory faster, but the words that CTAs wait for would queue behind them.
constexpr int kInFlight = 5, kInFlightInt8 = 4;
constexpr int kMergersOf = 3;  // of so many CTAs at most one merges in an attention, where the others are to be free for the next product
constexpr uint64_t kCounterBytes = 256, kProgramsBytes = 1 << 20;
static_assert(kMinSlots >= kWarps && kMinSlots > kInFlight, "see Ring");

struct StepArgs {
  const StepTask *tasks;
  StepOrder order;
  Rows rows;  // whose step it is: not in the tasks, which rows share
  int32_t n_slots, in_flight;
  uint32_t slots_inverse;
  AttentionShape shape;
  int32_t n_angles;  // cosines and sines of the row's position, where attention has them in shared memory
  const float *cos, *sin;
  int32_t tasks_at, operand_at, partial_at, attention_at;  // in shared memory, behind the ring
  uint8_t *states;
  unsigned long long *counter;  // of CTAs that have begun a step
};

#if TL_HOPPER

// The page table of an attention: each stage has one.
TL_DEVICE const int32_t *table_of(const StepArgs &a, const int32_t *tables, const StepAttention &t, int round) {
  return tables + (int64_t)(t.attend.place.rows.stage + round * a.order.n_stages) * a.rows.table_stride;
}

// By one thread: all that the CTA reads of memory that no task of the step writes.
TL_DEVICE void stream_step(const StepArgs &a, Requests requests, const TaskRing &held, const CtaPlace &cta, int pos, const int32_t *tables) {
  int task = 0, round = 0, asked = 0, asked_round = 0;
  for (uint32_t n = 0; n < kTasksAhead && asked < a.order.n_tasks; n++) {
    held.request(n, a.tasks + asked);
    a.order.next(asked, asked_round);
  }
#pragma unroll 1
  for (uint32_t n = 0; task < a.order.n_tasks; n++) {
    const StepTask &t = held.wait(n);
    if (!t.attends)
      request_weights(requests, t.product);
    else
      request_pages(requests, t.attention, a.shape, cta, keys_of(pos, t.attention.head.window), table_of(a, tables, t.attention, round));
    a.order.next(task, round);
    if (asked >= a.order.n_tasks) continue;
    held.request(n + kTasksAhead, a.tasks + asked);
    a.order.next(asked, asked_round);
  }
}

template <class Kv>
__global__ void __launch_bounds__(kStepThreads, 1) run_step(const StepArgs a) {
  uint8_t *shared = shared_memory<uint8_t>();
  const TaskRing held(shared + a.tasks_at);
  const Ring ring(shared_of(shared), a.n_slots, a.slots_inverse);
  unsigned long long *step = (unsigned long long *)(shared + a.tasks_at + kTaskRingBytes);
  wait_for_previous_kernel();
  const bool attends = a.rows.pos;
  const int pos = attends ? a.rows.pos[0] : 0;
  if (pos < 0) return;  // the row does nothing; no one would wait for its k and v either
  const CtaPlace cta = place_of(a.shape, blockIdx.x);
  const AttentionMemory attention{shared + a.attention_at, nullptr, nullptr, 0};
  if (threadIdx.x == 0) {
    ring.init();
    held.init();
    barrier_init_done();
    *step = atomicAdd(a.counter, 1ull) / gridDim.x + 1;  // the same for all CTAs: no step begins before the one before has ended
    *(AttentionPlan *)attention.plan() = plan_attention<Kv>(a.shape, cta.unit, cta.rank, a.states);
  }
  const int32_t *tables = attends ? a.rows.page_table[a.rows.seq[0]] : nullptr;
  for (int i = threadIdx.x * 16; i < AttentionMemory::kAngle; i += kStepThreads * 16) *(uint4 *)(attention.base + i) = make_uint4(0, 0, 0, 0);
  if (attends && (int)threadIdx.x < a.n_angles) {
    const int64_t at = (int64_t)pos * a.n_angles + threadIdx.x;
    attention.angle()[threadIdx.x] = make_float2(a.cos[at], a.sin[at]);
  }
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    give_registers<40>();
    if (threadIdx.x == kThreads) stream_step(a, {ring, a.in_flight, pass_policy()}, held, cta, pos, tables);
    return;
  }

  take_registers<232>();  // what is spilled goes to L2, behind all that is streamed
  const StepMemory memory{shared + a.operand_at, (float *)(shared + a.partial_at), (float *)(step + 2), shared + a.attention_at};
  Handover hand{0, (uint64_t)*step << kTaskBits};
  RingPlace place;
  int task = 0, round = 0;
  bool may_hold = true;
#pragma unroll 1
  for (uint32_t n = 0; task < a.order.n_tasks; n++) {
    const StepTask &t = held.wait(n);
    // All threads are in this task, none reads the one before any more.
    const auto settle = [&] {
      if (hand.thread == 0 && n) held.free(n - 1);
    };
    hand.flag++;
    hand.thread = thread_now();
    if (t.attends)
      run_attention<Kv>(t.attention, a.shape, cta, memory, a.states, hand, ring, place, pos, table_of(a, tables, t.attention, round), settle);
    else
      run_product(t.product, memory, hand, ring, place, may_hold, settle);
    may_hold = !t.attends || ring.n_slots >= kHoldSlots;
    a.order.next(task, round);
  }
}
#else
template <class Kv>
__global__ void run_step(const StepArgs) {}
#endif

// ---- on the host

AttentionShape shape_of(const tl_plan &plan, int n_ctas) {
  AttentionShape s;
  s.n_kv_heads = plan.desc.n_kv_heads;
  s.group = plan.desc.n_heads / plan.desc.n_kv_heads;
  s.head_dim = plan.desc.head_dim;
  s.head_pad = plan.head_pad;
  s.k_nbytes = k_page_nbytes(plan.desc.kv_dtype, plan.head_pad);
  s.turn = rotation_block(plan.desc.kv_dtype, s.head_dim);
  s.turn_scale = 1.0f / __builtin_sqrtf((float)s.turn);
  const int most = is_quantised(plan.desc.kv_dtype) ? unit_queries<Codes<8>>() : unit_queries<F16>();
  s.n_units = s.n_kv_heads * ((s.group + most - 1) / most);
  s.n_ranks = std::min(kMaxRanks, std::max(1, n_ctas / s.n_units));
  s.n_strides = std::min(s.n_units, n_ctas / s.n_ranks);
  const int n_queries = std::min(s.group, most), n_quads = n_queries * s.head_dim / 4;
  if (is_quantised(plan.desc.kv_dtype)) {
    s.n_mergers = std::min(s.n_ranks, n_queries);
    s.n_quads = merged_head_quads(n_queries, s.head_pad, s.n_ranks);
  } else {
    const int few = (n_quads + kWarps - 1) / kWarps;  // a quad a warp
    s.n_mergers = few * s.n_units * kMergersOf <= n_ctas ? few : s.n_ranks;
    s.n_quads = (n_quads + s.n_mergers - 1) / s.n_mergers;
  }
  s.ranks_inverse = inverse_of(s.n_ranks);
  s.dims_inverse = inverse_of(s.head_dim / 4);
  return s;
}

// Whether a plan's steps, and a step's parts, are what this kernel does.
bool suits(const tl_plan &plan) {
  const tl_plan_desc &d = plan.desc;
  return plan.context.steps && d.kv_dtype != TL_F32 && d.head_dim % 4 == 0 && plan.head_pad <= kStepHeadPad && d.dim <= 4 * kThreads * kStepQuads;
}
bool suits(const RowProgram &program) {
  if (!program.n_ops) return true;
  if (program.op[0].kind != kRowLoad || program.n_ops > kMaxStepOps) return false;
  return std::all_of(program.op + 1, program.op + program.n_ops, [](const RowOp &op) { return op.kind != kRowLoad; });
}
bool suits(const std::vector<StepPart> &parts) {
  return (int)parts.size() >= kMinTasks &&
         std::all_of(parts.begin(), parts.end(), [](const StepPart &part) { return part.attends || suits(part.gemv.program); });
}

// Where in scratch memory the tasks are; written there if they are new. NULL where no more fit.
const StepTask *placed(const tl_context &context, tl_plan &plan, const std::vector<StepTask> &tasks) {
  const uint64_t n = tasks.size() * sizeof(StepTask);
  uint64_t at = kCounterBytes;
  for (const std::vector<uint8_t> &kept : plan.step_programs) {
    if (kept.size() == n && !memcmp(kept.data(), tasks.data(), n)) return (const StepTask *)(plan.memory + plan.scratch.step + at);
    at += (kept.size() + 255) / 256 * 256;
  }
  if (at + n > kCounterBytes + kProgramsBytes) return nullptr;
  write_now(context, plan.memory + plan.scratch.step + at, tasks.data(), n);
  plan.step_programs.emplace_back((const uint8_t *)tasks.data(), (const uint8_t *)tasks.data() + n);
  return (const StepTask *)(plan.memory + plan.scratch.step + at);
}

// Bytes of a channel: a row of the widest product, two floats a word.
uint64_t channel_nbytes(const tl_plan &plan) {
  int widest = plan.dim_pad;
  for (const tl_phase &f : plan.phases)
    if (f.weight.data && f.kind != TL_PHASE_EMBED && f.kind != TL_PHASE_HEAD) widest = std::max({widest, f.weight.n_out, pad16(f.weight.n_in)});
  return (uint64_t)round_up((widest + 1) / 2, 64) * kWordStride;  // see row_word_at
}

}  // namespace

uint64_t step_nbytes(const tl_plan &plan) {
  if (!suits(plan)) return 0;
  return kCounterBytes + kProgramsBytes + kMaxChannels * channel_nbytes(plan) + states_nbytes(plan.desc.n_heads, plan.head_pad);
}

bool launch_step(const Launcher &launcher, tl_plan &plan, const std::vector<StepPart> &parts, const std::vector<int> &loops) {
  const tl_context &context = launcher.context;
  if (!suits(plan) || !suits(parts)) return false;
  const int n_ctas = context.n_multiprocessors;
  uint8_t *words = plan.memory + plan.scratch.step + kCounterBytes + kProgramsBytes;
  const AttentionShape shape = shape_of(plan, n_ctas);
  const Program program = program_of(parts, loops, n_ctas, shape.n_mergers * shape.n_strides, Channels(parts, words, channel_nbytes(plan)));
  if (program.tasks.empty() || program.order.n_tasks > kMaxTasks) return false;
  int operand = AttentionMemory::kBeforeBytes, partial = AttentionMemory::kBehindBytes;
  StepArgs a = {};
  a.in_flight = kInFlight;
  a.shape = shape;
  for (const StepTask &t : program.tasks)
    if (!t.attends) {
      if (t.product.head.dtype == TL_INT8) a.in_flight = kInFlightInt8;
      operand = std::max(operand, t.product.head.n_blocks * 32);
      partial = std::max(partial, t.product.head.round_panels * sums_stride(t.product.head.n_chunks) * kPanelRows * 4);
    }
  int at = 0;
  const auto take = [&at](int nbytes) { return std::exchange(at, at + round_up(nbytes, 128)); };
  a.tasks_at = take(kTaskRingBytes + 16 + kNormPartials * kWarps * 4);
  a.operand_at = take(operand);
  a.partial_at = take(partial);
  a.attention_at = take(attention_nbytes(a.shape));
  a.n_slots = (context.max_shared_nbytes - at - 128) / (kSlotBytes + 16);
  if (a.n_slots < kMinSlots) return false;
  const int ring = round_up(a.n_slots * (kSlotBytes + 16), 128);
  a.n_angles = plan.desc.rope_cos ? plan.desc.rotary_dim / 2 : 0;
  a.cos = plan.desc.rope_cos;
  a.sin = plan.desc.rope_sin;
  for (int32_t *offset : {&a.tasks_at, &a.operand_at, &a.partial_at, &a.attention_at}) *offset += ring;
  a.tasks = placed(context, plan, program.tasks);
  if (!a.tasks) return false;
  a.slots_inverse = inverse_of(a.n_slots);
  a.order = program.order;
  for (const StepPart &part : parts)
    if (part.attends) a.rows = part.attend.place.rows;
  a.counter = (unsigned long long *)(plan.memory + plan.scratch.step);
  a.states = words + kMaxChannels * channel_nbytes(plan);
  const Shape launched{dim3(n_ctas), kStepThreads, ring + at, 1, true};
  switch (plan.desc.kv_dtype) {
    case TL_BF16: launcher.launch(run_step<Bf16>, launched, a); break;
    case TL_F16: launcher.launch(run_step<F16>, launched, a); break;
    case TL_INT8: launcher.launch(run_step<Codes<8>>, launched, a); break;
    default: launcher.launch(run_step<Codes<4>>, launched, a);
  }
  return true;
}

}  // namespace tl
