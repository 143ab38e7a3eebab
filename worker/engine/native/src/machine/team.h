// The threads that compute one step, and how they share its work. One parallel region holds the whole step,
// because leaving and entering a region costs more than many operations of a small model. All threads go
// through the same phases. A free thread takes the next item of the phase, so a thread that other processes
// delay holds the others up for at most one item. An exception outside of a phase would end the process. So
// memory is reserved before the region or in items.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

namespace promptq {

class Team {
 public:
  // Runs `step(team)` on each of at most `num_threads` threads. Rethrows an exception of a step.
  template <typename Step>
  static void run(int num_threads, const Step& step) {
    Team team;
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp single
      team.size_ = omp_get_num_threads();
      step(team);
    }
    if (team.error_) std::rethrow_exception(team.error_);
  }

  // Returns the number of the calling thread, below the number of threads.
  static int thread() { return omp_get_thread_num(); }

  // One phase: calls `work(item)` for each item below `num_items`, each on one thread. Returns once all items
  // are done. An error skips the rest of the step.
  template <typename Work>
  void share(int64_t num_items, const Work& work) {
    for (int64_t item; (item = next_.fetch_add(1)) < num_items;) {
      if (failed_.load(std::memory_order_relaxed)) continue;
      try {
        work(item);
      } catch (...) {
        if (!failed_.exchange(true)) error_ = std::current_exception();
      }
    }
    wait_for_all();
  }

  // One phase: calls `work(row)` for each row below `num_rows`. An item is some rows.
  template <typename Work>
  void share_rows(int64_t num_rows, const Work& work) {
    constexpr int64_t kRows = 8;  // of an item
    share((num_rows + kRows - 1) / kRows, [&](int64_t item) {
      for (int64_t row = item * kRows; row < std::min((item + 1) * kRows, num_rows); ++row) work(row);
    });
  }

 private:
  void wait_for_all() {
    const uint32_t phase = phase_.load();
    if (num_waiting_.fetch_add(1) + 1 == size_) {
      num_waiting_.store(0);
      next_.store(0);
      phase_.store(phase + 1);
      phase_.notify_all();
      return;
    }
    // Falling asleep takes longer than most waits. After a longer wait, another process may need this core.
    for (int spin = 0; spin < kSpins; ++spin) {
      if (phase_.load() != phase) return;
      relax();
    }
    phase_.wait(phase);
  }

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  static constexpr int kSpins = 2000;

  int size_ = 1;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> num_waiting_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace promptq
