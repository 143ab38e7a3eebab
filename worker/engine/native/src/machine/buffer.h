// Memory for numbers. It starts on a cache line, or in pages of 2 MiB if it is large and the system has
// them: the processor reads ahead only within a page, and has to look up each page.
#pragma once

#include <sys/mman.h>

#include <cstddef>
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
    constexpr size_t kLine = 64, kPage = 2 << 20;
    const size_t bytes = count * sizeof(T);
    numbers_.reset();
    capacity_ = 0;
    void* place = nullptr;
    if (posix_memalign(&place, bytes < kPage ? kLine : kPage, bytes) != 0) throw std::bad_alloc();
    numbers_.reset(static_cast<T*>(place));
    // It may be refused: small pages work, too. The rest after whole pages is not worth one.
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

}  // namespace promptq
