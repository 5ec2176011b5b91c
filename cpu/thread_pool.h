// The threads of one context. A job runs on all of them at once; inside it they meet at barriers and share out units.
//
// A worker spins while a job may follow soon (the gap between two decode steps is a few microseconds) and sleeps after.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace tl {

class ThreadPool {
 public:
  using Job = void (*)(void *arg, int thread);

  explicit ThreadPool(int n_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool &) = delete;
  ThreadPool &operator=(const ThreadPool &) = delete;

  int size() const { return n_threads_; }

  // Runs job(arg, 0) here and job(arg, i) on worker i; returns when all have.
  void run(Job job, void *arg);

  // Inside a job: every thread waits for all. Units are handed out from 0 again afterwards.
  void barrier();
  int next_unit() { return next_unit_.fetch_add(1, std::memory_order_relaxed); }

 private:
  void work(int thread);
  bool wait_for_job(unsigned seen);

  const int n_threads_;
  Job job_ = nullptr;
  void *arg_ = nullptr;
  bool stop_ = false;
  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<unsigned> round_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> next_unit_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace tl
