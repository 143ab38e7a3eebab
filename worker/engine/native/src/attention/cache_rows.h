// Rows of K and V in the cache: the model's own numbers, or integers of 8 bits and then their scale in bf16. If the
// first numbers of K are V, they and the others have a scale each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention/work_pieces.h"
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

// Stores a row of K or V.
template <typename T>
void store_row(const T* row, const LayerCache& cache, uint8_t* to) {
  const int64_t first = cache.value_size, rest = cache.head_size - first;
  if (!cache.is_int8) {
    std::copy_n(row, cache.head_size, reinterpret_cast<T*>(to));
    return;
  }
  store_int8_row(row, first, to);
  if (rest > 0) store_int8_row(row + first, rest, to + first + sizeof(Bf16));
}

// Widens a row of K or V that a piece reads.
template <typename T, typename R>
void load_int8_row_of(const Piece<T>& piece, const uint8_t* row, R* to) {
  const int64_t first = piece.value_size, rest = piece.size - first;
  load_int8_row(row, first, to);
  if (rest > 0) load_int8_row(row + first + sizeof(Bf16), rest, to + first);
}

}  // namespace promptq
