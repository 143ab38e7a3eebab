// Memory that is read from end to end, in pages of 2 MiB if the system has them. The processor reads
// ahead only within a page, and has to look up each page.
#pragma once

#include <ATen/ATen.h>
#include <sys/mman.h>

#include <cstdint>

namespace promptq {

// A tensor that starts on a page of its own.
inline at::Tensor empty_in_huge_pages(at::IntArrayRef sizes, const at::TensorOptions& options) {
  constexpr size_t kPage = 2 << 20;
  const size_t bytes = c10::multiply_integers(sizes) * options.dtype().itemsize();
  const size_t mapped = bytes + kPage;
  void* place = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(place != MAP_FAILED, "no memory for ", bytes, " bytes of packed weights");
  char* first = static_cast<char*>(place) + (kPage - reinterpret_cast<uintptr_t>(place) % kPage) % kPage;
  madvise(first, bytes, MADV_HUGEPAGE);  // it may be refused: small pages work, too
  return at::from_blob(first, sizes, [=](void*) { munmap(place, mapped); }, options);
}

}  // namespace promptq
