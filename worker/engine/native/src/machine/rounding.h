// Rounds quantized weights, their inputs, and K and V to small integers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "machine/elements.h"

namespace promptq {

// Returns the largest absolute value: NaN or infinity if a number is NaN or infinite.
template <typename T>
float largest_magnitude(const T* numbers, int64_t count) {
  int32_t most_bits = 0;  // absolute values have the order of their bits; NaN is the largest, then infinity
#pragma omp simd reduction(max : most_bits)
  for (int64_t i = 0; i < count; ++i) {
    const float number = load(numbers[i]);
    int32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    most_bits = std::max(most_bits, bits & 0x7fffffff);
  }
  float most;
  std::memcpy(&most, &most_bits, sizeof most);
  return most;
}

// Returns the integer of [lowest, highest] that is nearest to number * factor; `lowest` for NaN.
inline float rounded(float number, float factor, float lowest, float highest) {
  return std::min(std::max(lowest, std::nearbyint(number * factor)), highest);
}

// Rounds numbers * factor to integers from -127 to 127.
template <typename T>
void round_to_int8(const T* numbers, int64_t count, float factor, int8_t* integers) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i)
    integers[i] = static_cast<int32_t>(rounded(load(numbers[i]), factor, -127.0f, 127.0f));
}

}  // namespace promptq
