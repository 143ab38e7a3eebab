// Memory for numbers. Much of it is in pages of 2 MiB if the system has such pages: a processor reads ahead
// only within a page, and has to look up each page.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace promptq {

inline int64_t ceil_div(int64_t number, int64_t divisor) { return (number + divisor - 1) / divisor; }
inline int64_t round_up(int64_t number, int64_t unit) { return ceil_div(number, unit) * unit; }

constexpr int64_t kCacheLine = 64;

template <typename T>
class Buffer {
 public:
  // Returns room for `count` numbers, which are not set. Earlier numbers are lost if it grows.
  T* reserve(int64_t count) {
    if (count <= capacity_) return numbers_.get();
    constexpr size_t kPage = 2 << 20;
    const size_t bytes = count * sizeof(T);
    numbers_.reset();
    capacity_ = 0;
    void* place = nullptr;
    if (posix_memalign(&place, bytes < kPage ? kCacheLine : kPage, bytes) != 0) throw std::bad_alloc();
    numbers_.reset(static_cast<T*>(place));
    // The system may refuse large pages. Small ones work, too, and serve the rest after whole pages.
    if (bytes >= kPage) madvise(place, bytes / kPage * kPage, MADV_HUGEPAGE);
    capacity_ = count;
    return numbers_.get();
  }

  T* data() const { return numbers_.get(); }

 private:
  struct Free {
    void operator()(T* numbers) const { std::free(numbers); }
  };

  std::unique_ptr<T[], Free> numbers_;
  int64_t capacity_ = 0;
};

// Memory for the weights of a model, one after the other, so that small weights share large pages.
class WeightMemory {
 public:
  // Returns room for `count` numbers, which are not set, as long as this object lives.
  template <typename T>
  T* reserve(int64_t count) {
    const int64_t bytes = round_up(count * sizeof(T), kCacheLine);
    const std::lock_guard lock(mutex_);
    if (bytes > left_) {
      const int64_t size = std::max(bytes, kBlock);
      next_ = blocks_.emplace_back().reserve(size);
      left_ = size;
    }
    T* place = reinterpret_cast<T*>(next_);
    next_ += bytes;
    left_ -= bytes;
    return place;
  }

 private:
  static constexpr int64_t kBlock = 64 << 20;  // unused parts are never touched

  std::mutex mutex_;
  std::vector<Buffer<uint8_t>> blocks_;
  uint8_t* next_ = nullptr;
  int64_t left_ = 0;
};

}  // namespace promptq
