// Rows of K and V in the cache: the model's own numbers, or integers of 8 bits and then their scale in bf16.
#pragma once

#include <cstdint>
#include <cstring>

#include "machine/elements.h"
#include "machine/rounding.h"

namespace promptq {

// Rounds a row of `size` numbers. One that is not finite makes the scale infinite or NaN.
template <typename T>
void store_int8_row(const T* row, int64_t size, uint8_t* to) {
  Bf16 scale;
  store(scale, largest_magnitude(row, size) / 127.0f);
  const float factor = load(scale) > 0.0f ? 1.0f / load(scale) : 0.0f;
  round_to_int8(row, size, factor, reinterpret_cast<int8_t*>(to));
  std::memcpy(to + size, &scale, sizeof scale);
}

template <typename T>
void load_int8_row(const uint8_t* row, int64_t size, T* to) {
  Bf16 half;
  std::memcpy(&half, row + size, sizeof half);
  const float scale = load(half);
  const auto* integers = reinterpret_cast<const int8_t*>(row);
#pragma omp simd
  for (int64_t d = 0; d < size; ++d) store(to[d], scale * integers[d]);
}

}  // namespace promptq
