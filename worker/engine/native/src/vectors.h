// Sixteen fp32 numbers as one value; the compiler makes registers of them on any processor.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "elements.h"

namespace promptq {

constexpr int kLanes = 16;
typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef int32_t Indices __attribute__((vector_size(4 * kLanes)));

constexpr int kTileVectors = 4;  // of a head's output that are summed at a time

inline Vector widen(const float* place) {
  Vector vector;
  std::memcpy(&vector, place, sizeof vector);
  return vector;
}

inline Vector widen(const Bf16* place) {
#ifdef __AVX512F__  // what the compiler makes of the lines below takes three times as many steps
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(place));
  return reinterpret_cast<Vector>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#else
  Halves halves;
  std::memcpy(&halves, place, sizeof halves);
  const Bits bits = __builtin_convertvector(halves, Bits) << 16;
  return reinterpret_cast<Vector>(bits);
#endif
}

// Numbers 16 * index and on of a row of `size`; zeros behind its end.
template <typename T>
Vector load_vector(const T* row, int64_t index, int64_t size) {
  const int64_t left = size - index * kLanes;
  if (left >= kLanes) return widen(row + index * kLanes);
  T padded[kLanes] = {};
  std::memcpy(padded, row + index * kLanes, left * sizeof(T));
  return widen(padded);
}

// Sums of neighbours: those of `a`, then those of `b`.
inline Vector add_neighbours(Vector a, Vector b) {
  constexpr Indices even{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

// Lane i of the result is the sum of all lanes of vectors[i].
inline Vector sum_each(Vector* vectors) {
  for (int width = kLanes; width > 1; width /= 2)
    for (int i = 0; i < width / 2; ++i)
      vectors[i] = add_neighbours(vectors[2 * i], vectors[2 * i + 1]);
  return vectors[0];
}

// Turn `count` scores into weights that sum to 1, with zeros behind them up to `padded`.
inline void softmax(float* scores, int64_t count, int64_t padded) {
  float highest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : highest)
  for (int64_t i = 0; i < count; ++i) highest = std::max(highest, scores[i]);
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = exponential(scores[i] - highest);
    total += scores[i];
  }
  std::fill(scores + count, scores + padded, 0.0f);
  for (int64_t i = 0; i < count; ++i) scores[i] /= total;
}

}  // namespace promptq
