// Fibers, barriers and asynchronous copies of the emulator, and what host.h asks of a CUDA runtime.
#include "emulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <random>

#include "host.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {

Thread *current = nullptr;

namespace {

constexpr size_t kStackBytes = 256 << 10;

[[noreturn]] void die(const char *what) {
  fprintf(stderr, "cuda emulator: %s\n", what);
  if (current) fprintf(stderr, "  at CTA (%u, %u), thread %u\n", current->block.x, current->block.y, current->thread.x);
  abort();
}

struct Copy {
  void *to;
  const void *from;
  int nbytes;
};

struct Meeting {  // of a number of threads; `generation` moves on when all are there
  int arrived = 0;
  uint64_t generation = 0;
};

struct Warp {
  Meeting meeting;
  int kind = 0;
  uint8_t in[32][64], out[32][64];
};

struct Barrier {
  int n_arrivals = 0, missing = 0, phase = 0;
  int64_t nbytes = 0;
  std::vector<Copy> copies;
};

struct Cta {
  std::unique_ptr<uint8_t[]> memory;
  uint8_t *shared;
  Meeting named[16];
  std::vector<Warp> warps;
  std::map<uint64_t *, Barrier> barriers;
};

struct Fiber : Thread {
  void *stack_pointer;
  const uint64_t *waits_for = nullptr;  // runs again when this has left `seen`
  uint64_t seen = 0;
  uint64_t cluster_generation = 0;  // of the meeting of its cluster, when it arrived there
  bool done = false;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open_group;
};

std::vector<Cta> ctas;
std::vector<Fiber> fibers;
std::vector<void *> stacks;
std::vector<Meeting> cluster_meetings;
const std::function<void()> *body_to_run;
void *scheduler_pointer;

Fiber &self() { return *static_cast<Fiber *>(current); }

#if defined(__x86_64__)
extern "C" void emulator_switch(void **save, void *load);
__asm__(
    ".text\n"
    ".globl emulator_switch\n"
    ".type emulator_switch, @function\n"
    "emulator_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n");
void switch_to(void **save, void *load) { emulator_switch(save, load); }
void enter();
void *first_pointer(void *stack) {
  void **top = (void **)((uint8_t *)stack + kStackBytes);
  *--top = nullptr;        // keeps the alignment that a call would leave
  *--top = (void *)enter;  // where the first switch returns to
  for (int i = 0; i < 6; i++) *--top = nullptr;
  return top;
}
#else
void enter();
std::vector<std::unique_ptr<ucontext_t>> contexts;
void switch_to(void **save, void *load) {
  if (!*save) {
    contexts.emplace_back(new ucontext_t);
    *save = contexts.back().get();
  }
  swapcontext((ucontext_t *)*save, (ucontext_t *)load);
}
void *first_pointer(void *stack) {
  contexts.emplace_back(new ucontext_t);
  ucontext_t *c = contexts.back().get();
  getcontext(c);
  c->uc_stack.ss_sp = stack;
  c->uc_stack.ss_size = kStackBytes;
  c->uc_link = nullptr;
  makecontext(c, enter, 0);
  return c;
}
#endif

void enter() {
  (*body_to_run)();
  Fiber &f = self();
  if (!f.open_group.empty()) die("a thread ends with copies that it never committed");
  for (const auto &group : f.groups)
    if (!group.empty()) die("a thread ends with copies that it never waited for");
  f.done = true;
  switch_to(&f.stack_pointer, scheduler_pointer);
}

void wait_until_changed(const uint64_t &generation) {
  Fiber &f = self();
  f.waits_for = &generation;
  f.seen = generation;
  switch_to(&f.stack_pointer, scheduler_pointer);
}

void meet(Meeting &m, int n) {
  if (++m.arrived < n) return wait_until_changed(m.generation);
  m.arrived = 0;
  m.generation++;
}

// Runs those of `order` that can; with `greedy` no further than the first warp of which any can.
bool run_some(const std::vector<Fiber *> &order, bool greedy, size_t &left) {
  bool any = false;
  const Fiber *first = nullptr;
  for (Fiber *p : order) {
    Fiber &f = *p;
    if (f.done || (f.waits_for && *f.waits_for == f.seen)) continue;
    if (greedy && first && (f.cta != first->cta || f.warp != first->warp)) break;
    any = true;
    first = &f;
    f.waits_for = nullptr;
    current = &f;
    switch_to(&scheduler_pointer, f.stack_pointer);
    left -= f.done;
  }
  return any;
}

// Threads take turns; where TINYLOOP_EMULATOR_UNFAIR is set and CTAs run together, some CTAs and warps run only when none before them can.
void run_fibers(bool together) {
  static std::minstd_rand random;
  const bool greedy = together && getenv("TINYLOOP_EMULATOR_UNFAIR");
  std::vector<Fiber *> order;
  for (Fiber &f : fibers) order.push_back(&f);
  if (greedy) {
    std::map<int, unsigned> ctas_order, warps_order;
    for (const Fiber &f : fibers)
      for (auto [m, key] : {std::make_pair(&ctas_order, f.cta), std::make_pair(&warps_order, f.cta * 32 + f.warp)})
        if (!m->count(key)) m->emplace(key, (unsigned)random());
    const auto rank = [&](const Fiber *f) { return std::make_pair(ctas_order[f->cta], warps_order[f->cta * 32 + f->warp]); };
    std::stable_sort(order.begin(), order.end(), [&](const Fiber *a, const Fiber *b) { return rank(a) < rank(b); });
  }
  size_t left = fibers.size();
  while (left)
    if (!run_some(order, greedy, left)) {
      for (Fiber &f : fibers)
        if (!f.done) {
          current = &f;
          break;
        }
      die("every thread waits for another: a barrier that not all reach");
    }
  current = nullptr;
}

void perform(std::vector<Copy> &copies) {
  for (const Copy &c : copies) memcpy(c.to, c.from, c.nbytes);
  copies.clear();
}

}  // namespace

void run(dim3 grid, int n_threads, int shared_nbytes, int cluster, bool together, const std::function<void()> &body) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  if (n_threads % 32 || grid.x % cluster) die("a launch of a broken warp or cluster");
  body_to_run = &body;
  const int n_together = together ? (int)grid.x : cluster;
  const size_t n = (size_t)n_threads * n_together;
  while (stacks.size() < n) {
    void *p = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) die("no memory for a stack");
    stacks.push_back(p);
  }
  for (unsigned y = 0; y < grid.y; y++)
    for (unsigned x = 0; x < grid.x; x += n_together) {
      ctas.clear();
      ctas.resize(n_together);
      fibers.clear();
      fibers.resize(n);
      cluster_meetings.assign(n_together / cluster, Meeting{});
      for (Cta &c : ctas) {
        c.memory.reset(new uint8_t[shared_nbytes + 1024]);
        c.shared = (uint8_t *)(((uintptr_t)c.memory.get() + 1023) / 1024 * 1024);
        memset(c.shared, 0xff, shared_nbytes);
        c.warps.resize(n_threads / 32);
      }
      for (size_t i = 0; i < n; i++) {
        Fiber &f = fibers[i];
        const int thread = (int)(i % n_threads);
        f.cta = (int)(i / n_threads);
        f.rank = f.cta % cluster;
        f.cluster_size = cluster;
        f.thread = dim3(thread, 0, 0);
        f.block = dim3(x + f.cta, y, 0);
        f.grid = grid;
        f.warp = thread / 32;
        f.lane = thread % 32;
        f.stack_pointer = first_pointer(stacks[i]);
      }
      run_fibers(together);
    }
}

namespace {
std::unique_ptr<std::vector<std::function<void()>>> recording;
uint64_t n_kernels = 0;
}  // namespace

void launch(dim3 grid, int n_threads, int shared_nbytes, int cluster, bool together, const std::function<void()> &body) {
  n_kernels++;
  if (!recording) return run(grid, n_threads, shared_nbytes, cluster, together, body);
  recording->push_back([=] { run(grid, n_threads, shared_nbytes, cluster, together, body); });
}

uint8_t *shared_memory(int cta) { return ctas[cta].shared; }

void sync_cta(int id, int n_threads) { meet(ctas[current->cta].named[id], n_threads ? n_threads : (int)(fibers.size() / ctas.size())); }
void arrive_in_cluster() {
  Meeting &m = cluster_meetings[current->cta / current->cluster_size];
  self().cluster_generation = m.generation;
  if (++m.arrived < (int)(fibers.size() / cluster_meetings.size())) return;
  m.arrived = 0;
  m.generation++;
}
void wait_in_cluster() {
  Meeting &m = cluster_meetings[current->cta / current->cluster_size];
  if (m.generation == self().cluster_generation) wait_until_changed(m.generation);
}
void wait_for(const uint64_t *word, uint64_t value) {
  while (*word != value) wait_until_changed(*word);
}

void meet_warp(int kind, const void *in, int in_nbytes, void *out, int out_nbytes, void (*combine)(const uint8_t (*)[64], uint8_t (*)[64])) {
  const int lane = current->lane;
  Warp &w = ctas[current->cta].warps[current->warp];
  if (w.meeting.arrived && w.kind != kind) die("the lanes of a warp are at different operations");
  w.kind = kind;
  memcpy(w.in[lane], in, in_nbytes);
  if (w.meeting.arrived == 31) combine(w.in, w.out);
  meet(w.meeting, 32);
  memcpy(out, w.out[lane], out_nbytes);
}

void queue_copy(void *to, const void *from, int nbytes) {
  if ((uintptr_t)to % nbytes || (uintptr_t)from % nbytes) die("a copy is not aligned");
  memset(to, 0xff, nbytes);
  self().open_group.push_back({to, from, nbytes});
}
void commit_copies() {
  Fiber &f = self();
  f.groups.push_back(std::move(f.open_group));
  f.open_group.clear();
}
void wait_copies(int pending) {
  Fiber &f = self();
  while ((int)f.groups.size() > pending) {
    perform(f.groups.front());
    f.groups.erase(f.groups.begin());
  }
}

void barrier_init(uint64_t *barrier, int n_arrivals) {
  Barrier &b = ctas[current->cta].barriers[barrier];
  b = Barrier{};
  b.n_arrivals = b.missing = n_arrivals;
  *barrier = 0;
}

namespace {
Barrier &barrier_at(uint64_t *barrier) {  // of this CTA, or another one of its cluster
  const int first = current->cta - current->rank;
  for (int cta = first; cta < first + current->cluster_size; cta++) {
    const auto found = ctas[cta].barriers.find(barrier);
    if (found != ctas[cta].barriers.end()) return found->second;
  }
  die("a barrier is used before it is made");
}
void complete(uint64_t *barrier, Barrier &b) {
  if (b.missing || b.nbytes) return;
  b.phase++;
  b.missing = b.n_arrivals;
  ++*barrier;  // what waiting fibers look at
}
}  // namespace

void barrier_arrive(uint64_t *barrier, int nbytes) {
  Barrier &b = barrier_at(barrier);
  if (!b.missing) die("a barrier is arrived at once too often");
  b.missing--;
  b.nbytes += nbytes;
  complete(barrier, b);
}
void barrier_copy(void *to, const void *from, int nbytes, uint64_t *barrier) {
  if (nbytes % 16 || (uintptr_t)to % 16 || (uintptr_t)from % 16) die("a bulk copy is not aligned");
  memset(to, 0xff, nbytes);
  barrier_at(barrier).copies.push_back({to, from, nbytes});
  ++*barrier;  // whoever waits performs it
}
void barrier_count(uint64_t *barrier, int nbytes) {
  Barrier &b = barrier_at(barrier);
  b.nbytes -= nbytes;
  ++*barrier;
  complete(barrier, b);
}
volatile uint8_t fetched = 0;

void barrier_wait(uint64_t *barrier, int parity) {
  Barrier &b = barrier_at(barrier);
  while (b.phase % 2 == parity) {
    for (const Copy &c : b.copies) b.nbytes -= c.nbytes;
    perform(b.copies);
    complete(barrier, b);
    if (b.phase % 2 == parity) wait_until_changed(*barrier);
  }
}

uint16_t bf16_of(float x) {
  const uint32_t u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
float of_bf16(uint16_t u) { return __uint_as_float((uint32_t)u << 16); }
uint16_t f16_of(float x) {
  const uint32_t u = __float_as_uint(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
  if (rest > 0x7f800000u) return 0x7fff;
  if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (rest < 0x38800000u) return (uint16_t)(sign | (__float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000u));
  return (uint16_t)(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}
float of_f16(uint16_t u) {
  const uint32_t sign = (uint32_t)(u & 0x8000u) << 16, rest = u & 0x7fffu;
  if (rest >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest < 0x400u) return __uint_as_float(sign | __float_as_uint((float)rest * 5.9604644775390625e-08f));
  return __uint_as_float(sign | ((rest << 13) + 0x38000000u));
}

}  // namespace emulator

namespace tl {

int usable_cpus() { return 1; }

tl_status open_device(int ordinal, tl_context **out, const std::function<tl_status(const char *)> &refuse) {
  if (ordinal != 0) return refuse("the emulator is one device");
  tl_context *c = new tl_context{};
  const char *multiprocessors = getenv("TINYLOOP_EMULATOR_MULTIPROCESSORS");
  c->n_multiprocessors = multiprocessors ? atoi(multiprocessors) : emulator::kMultiprocessors;
  c->max_shared_nbytes = 227 << 10;
  c->code = kCodeSm90a;
  c->overlaps = true;  // products may be two kernels; they run one after the other
  const char *steps = getenv("TINYLOOP_CUDA_STEP");
  c->steps = !(steps && !strcmp(steps, "0"));
  c->major = 9;
  snprintf(c->name, sizeof c->name, "CUDA emulator");
  *out = c;
  return TL_OK;
}
void use_device(const tl_context &) {}
void write_now(const tl_context &, void *to, const void *from, uint64_t nbytes) { memcpy(to, from, nbytes); }
void read_back(const tl_context &, void *to, const void *from, uint64_t nbytes) { memcpy(to, from, nbytes); }
TemporaryMemory::TemporaryMemory(uint64_t nbytes, cudaStream_t stream) : data(aligned_alloc(256, (nbytes + 255) / 256 * 256)), stream_(stream) {
  memset(data, 0, nbytes);
}
TemporaryMemory::~TemporaryMemory() {
  (void)stream_;
  free(data);
}
double time_on_device(cudaStream_t, const std::function<void()> &enqueue) {
  const auto begin = std::chrono::steady_clock::now();
  enqueue();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace tl

// Graphs, for the tests' stand-in of cuda.bindings: what is launched between begin and end is kept instead, and run by each launch.
extern "C" {
TL_API uint64_t emulator_n_kernels(void) { return emulator::n_kernels; }  // launched so far, those of a graph once
TL_API void emulator_begin_graph(void) { emulator::recording.reset(new std::vector<std::function<void()>>); }
TL_API void *emulator_end_graph(void) { return emulator::recording.release(); }
TL_API void emulator_launch_graph(void *graph) {
  for (const auto &kernel : *(std::vector<std::function<void()>> *)graph) kernel();
}
TL_API void emulator_drop_graph(void *graph) { delete (std::vector<std::function<void()>> *)graph; }
}
