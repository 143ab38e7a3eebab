// Memory for numbers. It starts on a cache line, or in pages of 2 MiB if it is large and the system has
// them: the processor reads ahead only within a page, and has to look up each page.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace promptq {

inline int64_t ceil_div(int64_t number, int64_t divisor) { return (number + divisor - 1) / divisor; }
inline int64_t round_up(int64_t number, int64_t unit) { return ceil_div(number, unit) * unit; }

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) { reserve(count); }

  // Makes room for `count` numbers, which are not set. Those in it are lost if it has to grow.
  T* reserve(int64_t count) {
    if (count <= capacity_) return numbers_.get();
    constexpr int64_t kLine = 64, kPage = 2 << 20;
    int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    const int64_t unit = bytes < kPage ? kLine : kPage;
    bytes = round_up(bytes, unit);
    numbers_.reset();
    capacity_ = 0;
    numbers_.reset(static_cast<T*>(std::aligned_alloc(unit, bytes)));
    if (!numbers_) throw std::bad_alloc();
    if (unit == kPage) madvise(numbers_.get(), bytes, MADV_HUGEPAGE);  // small pages work, too
    capacity_ = bytes / static_cast<int64_t>(sizeof(T));
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

}  // namespace promptq
