#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <algorithm>

#include "cpu_features.h"

namespace tl {
namespace {

constexpr int kSpinsBeforeYield = 4000;    // some 50 us: longer than the work between two barriers differs
constexpr int kSpinsBeforeSleep = 20000;
constexpr int64_t kFirstPatienceNs = 20'000'000;    // how long fewer threads run before more are tried again: doubles
constexpr int64_t kMaxPatienceNs = 5'000'000'000;  // each time, as a try may cost a time slice at every barrier
constexpr int64_t kLateNs = 2'000'000;             // waits in a job that don't matter

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1'000'000'000) + t.tv_nsec;
}

int rounds_of(int n_threads) {
  int n = 0;
  while (1 << n < n_threads) n++;
  return n;
}

// Moves the calling thread from a core to another one.
void leave(int core, const CpuSet &usable) {
  CpuSet others = usable;
  CPU_CLR(core, &others);
  if (sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof usable, &usable);
}

}  // namespace

ThreadPool::ThreadPool(int n_threads)
    : n_threads_(n_threads), n_active_(n_threads), local_(n_threads), flags_(n_threads * rounds_of(n_threads)), taken_(n_threads) {
  try {
    for (int i = 1; i < n_threads; i++) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {  // the system refused a thread: end those that started
    end_workers();
    throw;
  }
}

ThreadPool::~ThreadPool() { end_workers(); }

void ThreadPool::end_workers() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    epoch_.store(((epoch_.load() >> 16) + 1) << 16 | 0xffff);
  }
  wake_.notify_all();
  for (std::thread &t : workers_) t.join();
}

void ThreadPool::run(Job job, void *arg) {
  if (n_threads_ == 1) return job(arg, 0);
  const int64_t begin = now_ns();
  if (n_active_ < n_threads_ && begin >= retry_ns_) n_active_ = std::min(2 * n_active_, n_threads_);
  late_ns_ = 0;
  if (n_active_ > 1)
    run_active(job, arg);
  else
    job(arg, 0);
  if (late_ns_ > kLateNs || patience_ns_) adapt(now_ns(), begin);
}

void ThreadPool::run_active(Job job, void *arg) {
  job_ = job;
  arg_ = arg;
  base_barrier_ = local_[0].barrier;
  base_share_ = local_[0].share;
  caller_core_ = sched_getcpu();
  epoch_.store(((epoch_.load(std::memory_order_relaxed) >> 16) + 1) << 16 | (uint64_t)n_active_);
  if (sleepers_.load()) {  // a worker counts itself before it looks at the epoch: one of the two sees the other
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  job(arg, 0);
  barrier(0);
}

// After a job that waited for most of its time: fewer threads. After one at full size that did not: all is well.
void ThreadPool::adapt(int64_t end_ns, int64_t begin_ns) {
  if (late_ns_ > std::max(kLateNs, (end_ns - begin_ns) / 2)) {
    n_active_ = (n_active_ + 1) / 2;
    patience_ns_ = std::clamp(2 * patience_ns_, kFirstPatienceNs, kMaxPatienceNs);
    retry_ns_ = end_ns + patience_ns_;
  } else if (n_active_ == n_threads_) {
    patience_ns_ /= 2;
  }
}

void ThreadPool::barrier(int thread) {
  const uint64_t count = ++local_[thread].barrier;
  const int n = n_active_, n_rounds = rounds_of(n_threads_);
  for (int round = 0; 1 << round < n; round++) {
    // A flag has one writer for ever: with another number of threads the next job has other partners, and a thread that is
    // late in this barrier must not set back what one of them wrote there.
    flags_[thread * n_rounds + round].barrier.store(count, std::memory_order_release);
    const std::atomic<uint64_t> &theirs = flags_[(thread + n - (1 << round)) % n * n_rounds + round].barrier;
    int64_t late_from = 0;
    for (int spins = 0; theirs.load(std::memory_order_acquire) < count; spins++) {
      if (spins < kSpinsBeforeYield) {
        pause();
        continue;
      }
      if (thread == 0 && !late_from) late_from = now_ns();
      sched_yield();
    }
    if (late_from) late_ns_ += now_ns() - late_from;
  }
}

// The next unit of a thread's range in this phase; the first to come sets the count back.
int ThreadPool::take(int owner, uint32_t round) {
  std::atomic<uint64_t> &taken = taken_[owner].phase_and_units;
  uint64_t seen = taken.load(std::memory_order_relaxed);
  while (seen >> 32 != round)
    if (taken.compare_exchange_weak(seen, (uint64_t)round << 32 | 1, std::memory_order_relaxed)) return 0;
  return (int)(uint32_t)taken.fetch_add(1, std::memory_order_relaxed);
}

// Waits for a job that this worker has a part in; false at the end. One that has none stays asleep, or falls asleep.
bool ThreadPool::wait_for_job(int thread, uint64_t &seen) {
  const auto is_called = [&] {
    const uint64_t epoch = epoch_.load();  // in one order with the count of sleepers
    if (epoch == seen) return false;
    seen = epoch;
    return (int)(epoch & 0xffff) > thread;
  };
  for (int spins = 0; spins < kSpinsBeforeSleep; spins++) {
    if (is_called()) return !stop_;
    pause();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, is_called);
  sleepers_.fetch_sub(1);
  return !stop_;
}

void ThreadPool::work(int thread) {
  sigset_t all;  // signals are the caller's business
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  const CpuSet set = usable_cpus();
  sched_setaffinity(0, sizeof set, &set);
  const bool has_cores = CPU_COUNT(&set) >= n_threads_;
  uint64_t seen = 0;
  while (wait_for_job(thread, seen)) {
    const int core = sched_getcpu();
    if (core == caller_core_ && core >= 0 && has_cores) leave(core, set);
    local_[thread].barrier = base_barrier_;
    local_[thread].share = base_share_;
    job_(arg_, thread);
    barrier(thread);
  }
}

}  // namespace tl
