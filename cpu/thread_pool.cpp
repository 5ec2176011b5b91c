#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include "cpu_features.h"

namespace tl {
namespace {

constexpr int kSpinsBeforeYield = 4000;    // some 50 us: longer than the work between two barriers differs
constexpr int kSpinsBeforeSleep = 20000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int n_threads) : n_threads_(n_threads), local_(n_threads), taken_(n_threads) {
  while (1 << n_rounds_ < n_threads) n_rounds_++;
  flags_ = std::vector<Flag>(n_threads * n_rounds_);
  try {
    for (int i = 1; i < n_threads; i++) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {  // the system refused a thread: end those that started
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      epoch_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread &t : workers_) t.join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread &t : workers_) t.join();
}

void ThreadPool::run(Job job, void *arg) {
  if (n_threads_ == 1) return job(arg, 0);
  job_ = job;
  arg_ = arg;
  epoch_.fetch_add(1);
  if (sleepers_.load()) {  // a worker counts itself before it looks at the epoch: one of the two sees the other
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  job(arg, 0);
  barrier(0);
}

void ThreadPool::barrier(int thread) {
  const uint32_t count = ++local_[thread].barrier;
  for (int round = 0; round < n_rounds_; round++) {
    flags_[(thread + (1 << round)) % n_threads_ * n_rounds_ + round].barrier.store(count, std::memory_order_release);
    const std::atomic<uint32_t> &mine = flags_[thread * n_rounds_ + round].barrier;
    for (int spins = 0; (int32_t)(mine.load(std::memory_order_acquire) - count) < 0; spins++) {
      if (spins < kSpinsBeforeYield)
        pause();
      else
        sched_yield();
    }
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

bool ThreadPool::wait_for_job(unsigned seen) {
  for (int spins = 0; spins < kSpinsBeforeSleep; spins++) {
    if (epoch_.load(std::memory_order_acquire) != seen) return !stop_;
    pause();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] { return epoch_.load() != seen; });
  sleepers_.fetch_sub(1);
  return !stop_;
}

void ThreadPool::work(int thread) {
  sigset_t all;  // signals are the caller's business
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  const CpuSet set = usable_cpus();
  sched_setaffinity(0, sizeof set, &set);
  unsigned seen = 0;
  while (wait_for_job(seen)) {
    seen++;
    job_(arg_, thread);
    barrier(thread);
  }
}

}  // namespace tl
