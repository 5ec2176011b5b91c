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

ThreadPool::ThreadPool(int n_threads) : n_threads_(n_threads), taken_(n_threads) {
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
  barrier();
}

void ThreadPool::barrier() {
  if (n_threads_ == 1) return taken_[0].n.store(0, std::memory_order_relaxed);
  const unsigned round = round_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    for (Taken &taken : taken_) taken.n.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
    if (spins < kSpinsBeforeYield)
      pause();
    else
      sched_yield();
  }
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
    barrier();
  }
}

}  // namespace tl
