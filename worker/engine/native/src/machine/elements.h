// Loads and stores of bf16, fp16 and fp32 as fp32, and the small row-wise operations of a decoder layer.
//
// The loops are simple, so that the compiler can vectorise them on any processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "machine/exponential.h"

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

// Returns work(numbers), with numbers of their type.
template <typename Work>
auto with_type(bool is_bf16, const void* numbers, const Work& work) {
  return is_bf16 ? work(static_cast<const Bf16*>(numbers)) : work(static_cast<const float*>(numbers));
}

// out[d] = row[d] / rms(row) * weight[d], computed in fp32.
template <typename T>
void rms_norm_row(const T* row, const T* weight, float epsilon, int64_t size, T* out) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < size; ++d) sum += load(row[d]) * load(row[d]);
  const float scale = 1.0f / std::sqrt(sum / size + epsilon);
#pragma omp simd
  for (int64_t d = 0; d < size; ++d) store(out[d], load(row[d]) * scale * load(weight[d]));
}

// row += delta
template <typename T>
void add_row(T* row, const T* delta, int64_t size) {
#pragma omp simd
  for (int64_t d = 0; d < size; ++d) store(row[d], load(row[d]) + load(delta[d]));
}

// out = silu(gate) * up
template <typename T>
void silu_and_multiply_row(const T* gate, const T* up, int64_t size, T* out) {
#pragma omp simd
  for (int64_t d = 0; d < size; ++d) {
    const float x = load(gate[d]);
    store(out[d], x / (1.0f + exponential(-x)) * load(up[d]));
  }
}

// Rotates the first `rotary` dimensions of a head in place, each of the first half with its partner
// in the second (RoFormer, as Llama lays it out). `cosine` and `sine` have `rotary` numbers.
template <typename T>
void rotate_row(T* head, const float* cosine, const float* sine, int64_t rotary) {
  const int64_t half = rotary / 2;
#pragma omp simd
  for (int64_t d = 0; d < half; ++d) {
    const float first = load(head[d]), second = load(head[d + half]);
    store(head[d], first * cosine[d] - second * sine[d]);
    store(head[d + half], second * cosine[d + half] + first * sine[d + half]);
  }
}

}  // namespace promptq
