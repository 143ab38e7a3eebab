// Vectors of fp32 numbers in one register of the processor.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512BF16__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "machine/elements.h"
#include "machine/exponential.h"

namespace promptq {

// A wider vector than the processor's would be computed through memory, part by part.
#ifdef __AVX512F__
constexpr int kLanes = 16, kRegisters = 32;
#else
constexpr int kLanes = 8, kRegisters = 16;
#endif
typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef int32_t Indices __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

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

// A span of numbers in fp32, in the order of widen().
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

// Returns the numbers at even places, then those at odd places: one operation for each half.
inline Pair widen(const Bf16* place) {
  const Words words = load_as<Words>(place);
  return {reinterpret_cast<Vector>(words << 16), reinterpret_cast<Vector>(words & 0xffff0000u)};
}

inline Vector widen_half(const Fp16* place) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(_mm512_cvtph_ps(load_as<__m256i>(place)));
#elif defined(__F16C__)
  return reinterpret_cast<Vector>(_mm256_cvtph_ps(load_as<__m128i>(place)));
#else
  Vector vector;
  for (int i = 0; i < kLanes; ++i) vector[i] = load(place[i]);
  return vector;
#endif
}

inline Pair widen(const Fp16* place) { return {widen_half(place), widen_half(place + kLanes)}; }

// Returns the place within a span of the number that widen() puts at `index`.
template <typename T>
int64_t widened_from(int64_t index) {
  return std::is_same_v<T, Bf16> ? index % kLanes * 2 + index / kLanes : index;
}

// Returns span `index` of a row of `size` numbers. An incomplete span is copied to `padded`, before zeros.
template <typename T>
const T* whole_span(const T* row, int64_t index, int64_t size, T* padded) {
  const int64_t left = size - index * kSpan;
  if (left >= kSpan) return row + index * kSpan;
  std::fill(padded, padded + kSpan, T(0));
  std::memcpy(padded, row + index * kSpan, left * sizeof(T));
  return padded;
}

#ifdef __AVX512BF16__
constexpr bool kMultipliesBf16 = true;  // two products a lane, summed in fp32

inline void store_vector(Bf16* place, const Vector& vector) {
  const __m256bh rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(vector));
  std::memcpy(place, &rounded, sizeof rounded);
}

inline __m512bh bf16_of(const void* place) { return load_as<__m512bh>(place); }

inline void add_products(Vector& sum, __m512bh a, __m512bh b) {
  sum = reinterpret_cast<Vector>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), a, b));
}
#else
constexpr bool kMultipliesBf16 = false;
#endif

// The type of queries and of attention's weights, which are multiplied with many numbers of type T.
template <typename T>
using Factor = std::conditional_t<kMultipliesBf16, T, float>;

// Lays a row of `size` numbers out for add_dot(), with zeros to the end of the last span.
template <typename T>
void lay_out(const T* row, int64_t size, Factor<T>* to) {
  for (int64_t s = 0; s < spans_of(size); ++s) {
    T padded[kSpan];
    const T* span = whole_span(row, s, size, padded);
    if constexpr (std::is_same_v<T, Factor<T>>)
      std::memcpy(to + s * kSpan, span, kSpan * sizeof(T));
    else
      store_pair(to + s * kSpan, widen(span));
  }
}

// sum += a . b over a span, spread over the lanes.
template <typename T>
void add_dot(Vector& sum, const Factor<T>* a, const T* b) {
  if constexpr (std::is_same_v<Factor<T>, float>) {
    const Pair left = load_pair(a), right = widen(b);
    sum += left.a * right.a;
    sum += left.b * right.b;
  } else {
    add_products(sum, bf16_of(a), bf16_of(b));
  }
}

// Two values, laid out for add_to().
template <typename T>
struct TwoValues {
  TwoValues(const T* one, const T* other) : one(widen(one)), other(widen(other)) {}

  // sums += weights[0] * one + weights[1] * other
  void add_to(Pair& sums, const Factor<T>* weights) const {
    sums.a += weights[0] * one.a;
    sums.b += weights[0] * one.b;
    sums.a += weights[1] * other.a;
    sums.b += weights[1] * other.b;
  }

  // The index within a span of the number at `place` of the sums.
  static int64_t index_of(int64_t place) { return widened_from<T>(place); }

  Pair one, other;
};

#ifdef __AVX512BF16__
template <>
struct TwoValues<Bf16> {
  TwoValues(const Bf16* one, const Bf16* other)
      : low(reinterpret_cast<__m512bh>(
            _mm512_unpacklo_epi16(load_as<__m512i>(one), load_as<__m512i>(other)))),
        high(reinterpret_cast<__m512bh>(
            _mm512_unpackhi_epi16(load_as<__m512i>(one), load_as<__m512i>(other)))) {}

  void add_to(Pair& sums, const Bf16* weights) const {
    const __m512bh both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(load_as<int>(weights)));
    add_products(sums.a, both, low);
    add_products(sums.b, both, high);
  }

  // Numbers alternate by fours between the two vectors.
  static int64_t index_of(int64_t place) {
    return place % kLanes / 4 * 8 + place / kLanes * 4 + place % 4;
  }

  __m512bh low, high;
};
#endif

#ifdef __AVX512F__
// Returns sums of neighbours: those of `a`, then those of `b`.
inline Vector add_neighbours(Vector a, Vector b) {
  constexpr Indices even{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

template <int Width>
[[gnu::always_inline]] inline Vector sum_some(const Vector* vectors) {
  if constexpr (Width == 1) {
    return vectors[0];
  } else {
    return add_neighbours(sum_some<Width / 2>(vectors), sum_some<Width / 2>(vectors + Width / 2));
  }
}

// Swaps lanes and vectors, of which there are kLanes.
inline void transpose(Vector* vectors) {
  constexpr Indices low{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  for (int round = 0; round < 4; ++round) {  // a round moves one bit of a number's index
    Vector mixed[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      mixed[2 * i] = __builtin_shuffle(vectors[i], vectors[i + kLanes / 2], low);
      mixed[2 * i + 1] = __builtin_shuffle(vectors[i], vectors[i + kLanes / 2], low + 8);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) vectors[i] = mixed[i];
  }
}

// Lane i of the result is the sum of all lanes of vectors[i], of which there are kLanes.
inline Vector sum_each(const Vector* vectors) { return sum_some<kLanes>(vectors); }
#else
// Returns sums of neighbours within each half, where shuffles are cheap: those of `a`, then those of `b`.
inline Vector add_neighbours(Vector a, Vector b) {
  constexpr Indices even{0, 2, 8, 10, 4, 6, 12, 14};
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

// Returns a vector whose halves have the sums of that half of four vectors.
inline Vector sum_halves(const Vector* four) {
  return add_neighbours(add_neighbours(four[0], four[1]), add_neighbours(four[2], four[3]));
}

// Lane i of the result is the sum of all lanes of vectors[i], of which there are kLanes.
inline Vector sum_each(const Vector* vectors) {
  constexpr Indices first_halves{0, 1, 2, 3, 8, 9, 10, 11};
  const Vector a = sum_halves(vectors), b = sum_halves(vectors + 4);
  return __builtin_shuffle(a, b, first_halves) + __builtin_shuffle(a, b, first_halves + 4);
}
#endif

// Scales scores, and limits them smoothly to (-cap, cap). `length` is a multiple of kLanes.
inline void cap_scores(float* scores, int64_t length, float scale, float cap) {
#pragma omp simd
  for (int64_t i = 0; i < length; ++i) scores[i] = cap * hyperbolic_tangent(scores[i] * scale / cap);
}

// Turns scores in [first, last) into weights of type W that sum to 1 and replace the scores. Other scores
// become zeros. `length` is a multiple of kLanes. A `sink`, a further score, takes a weight that is left out.
// Each place has a fixed lane, so the result does not depend on scores outside.
template <typename W>
void softmax(
    float* scores, int64_t length, int64_t first, int64_t last, float scale, const float* sink = nullptr) {
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
  if (sink) most = std::max(most, *sink / scale);
#pragma omp simd
  for (int64_t i = 0; i < length; ++i)
    scores[i] = scores[i] == kNever ? 0.0f : exponential(scale * (scores[i] - most));
  Vector sums = {};
  for (int64_t i = 0; i < length; i += kLanes) sums += load_as<Vector>(scores + i);
  float total = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
  if (sink) total += exponential(*sink - scale * most);
  const float share = 1.0f / total;
  W* weights = reinterpret_cast<W*>(scores);
  for (int64_t i = 0; i < length; i += kLanes)
    store_vector(weights + i, load_as<Vector>(scores + i) * share);
}

}  // namespace promptq
