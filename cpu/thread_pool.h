// The threads of one context. A job runs on all of them at once; inside it they meet at barriers and share out units.
//
// A worker spins while a job may follow soon (the gap between two decode steps is a few microseconds) and sleeps after.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
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

  // Inside a job: every thread waits for all.
  void barrier();

  // Inside a job: calls body(unit) for 0 <= unit < n over all threads, then waits for all. Each thread has a range of its
  // own, in order, and helps with the others' when it is done: neighbours on the machine slow now one core, now the other.
  template <class Body>
  void share(int thread, int n, Body body) {
    for (int i = 0; i < n_threads_; i++) {
      const int owner = thread + i < n_threads_ ? thread + i : thread + i - n_threads_;
      const int first = (int)((int64_t)n * owner / n_threads_), end = (int)((int64_t)n * (owner + 1) / n_threads_);
      for (int unit = first + taken_[owner].n.fetch_add(1, std::memory_order_relaxed); unit < end;
           unit = first + taken_[owner].n.fetch_add(1, std::memory_order_relaxed))
        body(unit);
    }
    barrier();
  }

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
  alignas(64) std::atomic<int> sleepers_{0};
  struct alignas(64) Taken {
    std::atomic<int> n{0};
  };
  std::vector<Taken> taken_;  // units that have been begun of each thread's range; zeroed by the last one at a barrier
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace tl
