// The threads of one context. A job runs on all of them at once; inside it they meet at barriers and share out units.
//
// A worker spins while a job may follow soon (the gap between two decode steps is a few microseconds) and sleeps after.
// Cores may lie far apart (some 300 ns for a cache line to change hands), so that nothing shared is touched more often
// than it must be: a barrier of two threads is one store and one awaited load each.
//
// Where other processes want the cores too, a thread that the system has set aside holds up all others, at every barrier
// for as long as a time slice. A caller that has waited so for most of a job runs the next ones with half the threads, or
// alone, and tries more again after a while. How many run never changes a result.
//
// A worker that sleeps may be woken on the caller's core, where no other was idle just then: in a server the event loop's. The
// two would take turns there at every barrier, spinning 50 us each time, and the system leaves such busy neighbours together. So
// the worker moves away.
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
  int n_active() const { return n_active_; }  // inside a job: the threads that run it, 0 to n_active() - 1

  // Inside a job: the first of n things in order that belongs to a thread; those of thread i end where those of i + 1 begin.
  int first_of(int thread, int n) const { return (int)((int64_t)n * thread / n_active_); }

  // Runs job(arg, 0) here and job(arg, i) on workers i, as many as the machine has time for; returns when all have.
  void run(Job job, void *arg);

  // Inside a job: every thread waits for all (a dissemination barrier: after round k each knows of 2^(k+1) threads).
  void barrier(int thread);

  // Inside a job: calls body(unit) for 0 <= unit < n over all threads, then waits for all. Each thread has a range of its
  // own, in order; with `help`, one that is done goes on with what the others have not begun: neighbours on the machine
  // slow now one core, now the other.
  template <class Body>
  void share(int thread, int n, bool help, Body body) {
    if (help && n_active_ > 1) {
      const uint32_t round = ++local_[thread].share;
      for (int i = 0; i < n_active_; i++) {
        const int owner = (thread + i) % n_active_;
        for (int unit = first_of(owner, n) + take(owner, round); unit < first_of(owner + 1, n); unit = first_of(owner, n) + take(owner, round))
          body(unit);
      }
    } else {
      for (int unit = first_of(thread, n); unit < first_of(thread + 1, n); unit++) body(unit);
    }
    barrier(thread);
  }

 private:
  struct alignas(64) Local {  // a thread's own counts of barriers and of shared-out phases
    uint64_t barrier = 0;  // never wraps: a thread may sit out for days
    uint32_t share = 0;
  };
  void end_workers();
  void work(int thread);
  bool wait_for_job(int thread, uint64_t &seen);
  void run_active(Job job, void *arg);
  void adapt(int64_t end_ns, int64_t begin_ns);
  int take(int owner, uint32_t round);

  struct alignas(64) Flag {
    std::atomic<uint64_t> barrier{0};
  };
  struct alignas(64) Taken {  // (phase, units begun in it) of a thread's range
    std::atomic<uint64_t> phase_and_units{0};
  };

  // What a job's threads read, in one line: written between jobs.
  alignas(64) const int n_threads_;
  int n_active_;  // threads of the job
  Job job_ = nullptr;
  void *arg_ = nullptr;
  uint64_t base_barrier_ = 0;  // and base_share_: the counts that a worker begins with: it may have sat out the last jobs
  uint32_t base_share_ = 0;
  int caller_core_ = -1;  // where the job began
  bool stop_ = false;
  // The caller's own.
  alignas(64) int64_t late_ns_ = 0;  // of the job: how long the caller waited for threads that had no core
  int64_t retry_ns_ = 0;             // when more threads are tried again
  int64_t patience_ns_ = 0;          // how long fewer ran before that
  alignas(64) std::atomic<uint64_t> epoch_{0};  // (jobs so far << 16) | threads of this one
  alignas(64) std::atomic<int> sleepers_{0};
  std::vector<Local> local_;
  std::vector<Flag> flags_;  // (thread that writes, round)
  std::vector<Taken> taken_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace tl
