// Loads and stores of bf16, fp16 and fp32 as fp32, and row operations that compilers vectorise anywhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace promptq {

using Bf16 = uint16_t;

inline float load(float value) { return value; }

inline float load(Bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void store(float& place, float value) { place = value; }

// Rounds to the nearest, ties to even. NaN stays NaN.
inline void store(Bf16& place, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  place = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : static_cast<Bf16>(rounded);
}

struct Fp16 {
  uint16_t bits;
};

inline float load(Fp16 value) {
  const uint32_t exponent = value.bits >> 10 & 31, fraction = value.bits & 1023;
  const float sign = value.bits >> 15 ? -1.0f : 1.0f;
  if (exponent == 0) return sign * 0x1p-24f * static_cast<float>(fraction);
  const uint32_t bits = (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return sign * result;
}

// Rounds to the nearest, ties to even. Too large numbers and NaN become infinite.
inline void store(Fp16& place, float value) {
  const float magnitude = std::fabs(value);
  uint32_t bits;
  std::memcpy(&bits, &magnitude, sizeof bits);
  if (magnitude < 0x1p-14f)
    bits = static_cast<uint32_t>(std::nearbyint(magnitude * 0x1p24f));
  else if (magnitude < 65520.0f)
    bits = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
  else
    bits = 31 << 10;
  place.bits = static_cast<uint16_t>(bits | (std::signbit(value) ? 1 << 15 : 0));
}

// Returns work(numbers), with `numbers` as a pointer to their type.
template <typename Work>
auto with_type(bool is_bf16, const void* numbers, const Work& work) {
  return is_bf16 ? work(static_cast<const Bf16*>(numbers)) : work(static_cast<const float*>(numbers));
}

// row *= factor
template <typename T>
void scale_row(T* row, float factor, int64_t size) {
#pragma omp simd
  for (int64_t d = 0; d < size; ++d) store(row[d], load(row[d]) * factor);
}

// row += delta
template <typename T>
void add_row(T* row, const T* delta, int64_t size) {
#pragma omp simd
  for (int64_t d = 0; d < size; ++d) store(row[d], load(row[d]) + load(delta[d]));
}

}  // namespace promptq
