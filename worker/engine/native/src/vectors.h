// Sixteen fp32 numbers as one value; the compiler makes registers of them on any processor.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "elements.h"

namespace promptq {

constexpr int kLanes = 16;
typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef int32_t Indices __attribute__((vector_size(4 * kLanes)));

constexpr int64_t kSpan = 2 * kLanes;  // numbers of a head that are read at a time

inline int64_t spans_of(int64_t size) { return (size + kSpan - 1) / kSpan; }

template <typename V, typename T>
V load_as(const T* place) {
  V vector;
  std::memcpy(&vector, place, sizeof vector);
  return vector;
}

inline void store_vector(float* place, const Vector& vector) {
  std::memcpy(place, &vector, sizeof vector);
}

// A span of numbers in fp32. Which of them lies where is what widening is cheapest at, see
// dimension_of.
struct Pair {
  Vector a, b;
};

inline Pair load_pair(const float* place) {
  return {load_as<Vector>(place), load_as<Vector>(place + kLanes)};
}

inline void store_pair(float* place, const Pair& pair) {
  store_vector(place, pair.a);
  store_vector(place + kLanes, pair.b);
}

inline Pair widen(const float* place) { return load_pair(place); }

// Each 32 bits hold a number of even and one of odd index; a bf16 is the upper half of its fp32.
inline Pair widen(const Bf16* place) {
  const Bits both = load_as<Bits>(place);
  return {reinterpret_cast<Vector>(both << 16), reinterpret_cast<Vector>(both & 0xffff0000u)};
}

// The index within a head of what lies at `place` of a row of pairs.
template <typename T>
int64_t dimension_of(int64_t place) {
  if (sizeof(T) == sizeof(float)) return place;
  const int64_t lane = place % kLanes, is_odd = place / kLanes % 2;
  return place / kSpan * kSpan + 2 * lane + is_odd;
}

// Where span `index` of a row of `size` numbers lies; a part of one is copied to `padded`, with
// zeros behind it.
template <typename T>
const T* whole_span(const T* row, int64_t index, int64_t size, T* padded) {
  const int64_t left = size - index * kSpan;
  if (left >= kSpan) return row + index * kSpan;
  std::fill(padded, padded + kSpan, T(0));
  std::memcpy(padded, row + index * kSpan, left * sizeof(T));
  return padded;
}

// sum += a . b over a span, spread over the lanes.
template <typename T>
void add_products(Vector& sum, const T* a, const T* b) {
#ifdef __AVX512BF16__
  if constexpr (sizeof(T) == sizeof(Bf16)) {
    const __m512i left = load_as<__m512i>(a), right = load_as<__m512i>(b);
    sum = reinterpret_cast<Vector>(_mm512_dpbf16_ps(
        reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(left),
        reinterpret_cast<__m512bh>(right)));
    return;
  }
#endif
  const Pair left = widen(a), right = widen(b);
  sum += left.a * right.a;
  sum += left.b * right.b;
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

// Turn scores into weights that sum to 1, those outside of [first, last) into zeros. `length` is a
// multiple of kLanes.
//
// Lanes stand for fixed places, so that the result does not depend on what lies outside.
inline void softmax(float* scores, int64_t length, int64_t first, int64_t last, float scale) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  std::fill(scores, scores + first, kNever);
  std::fill(scores + last, scores + length, kNever);
  Vector highest = load_as<Vector>(scores);
  for (int64_t i = kLanes; i < length; i += kLanes) {
    const Vector these = load_as<Vector>(scores + i);
    highest = these > highest ? these : highest;
  }
  float most = kNever;
  for (int lane = 0; lane < kLanes; ++lane) most = std::max(most, highest[lane]);
#pragma omp simd
  for (int64_t i = 0; i < length; ++i) scores[i] = exponential(scale * (scores[i] - most));
  std::fill(scores, scores + first, 0.0f);
  std::fill(scores + last, scores + length, 0.0f);
  Vector sums = {};
  for (int64_t i = 0; i < length; i += kLanes) sums += load_as<Vector>(scores + i);
  float total = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
  const float share = 1.0f / total;
#pragma omp simd
  for (int64_t i = 0; i < length; ++i) scores[i] *= share;
}

}  // namespace promptq
