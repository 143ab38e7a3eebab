// Finds the greatest numbers of a row, or the number at some place in descending order, without sorting. The
// maxima of a row's blocks show which few blocks have the greatest numbers. If many numbers are needed,
// histograms over the bits of the numbers find the number at the place.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "machine/elements.h"

namespace promptq {

constexpr int64_t kBlock = 128;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline int64_t num_blocks(int64_t size) { return (size + kBlock - 1) / kBlock; }

// A thread's memory. Threads keep it from step to step, because fresh pages are expensive.
struct Workspace {
  std::vector<float> scaled;           // [vocabulary]
  std::vector<float> highest;          // [blocks], the greatest of a row's numbers, or of `scaled`
  std::vector<float> best;             // [blocks]
  std::vector<double> sums;            // [blocks]
  std::vector<float> values, weights;  // of some of the tokens
  std::vector<int64_t> tokens;

  void prepare(int64_t size) {
    for (auto* numbers : {&scaled, &values, &weights}) numbers->resize(size);
    for (auto* numbers : {&highest, &best}) numbers->resize(num_blocks(size));
    sums.resize(num_blocks(size));
    tokens.resize(size);
  }
};

// Calls action(block, begin, end) for each block of a row.
template <typename Action>
inline void for_blocks(int64_t size, Action action) {
  for (int64_t block = 0, begin = 0; begin < size; ++block, begin += kBlock)
    action(block, begin, std::min(begin + kBlock, size));
}

template <typename T>
inline float block_maximum(const T* row, int64_t begin, int64_t end) {
  float highest = kNothing;
#pragma omp simd reduction(max : highest)
  for (int64_t i = begin; i < end; ++i) highest = std::max(highest, load(row[i]));
  return highest;
}

// Returns a row's greatest number, or NaN if a number is NaN. Writes each block's greatest to `highest`.
template <typename T>
float scan(const T* row, int64_t size, std::vector<float>& highest) {
  uint32_t greatest_bits = 0;
  for_blocks(size, [&](int64_t block, int64_t begin, int64_t end) {
    highest[block] = block_maximum(row, begin, end);
#pragma omp simd reduction(max : greatest_bits)
    for (int64_t i = begin; i < end; ++i)
      greatest_bits = std::max(greatest_bits, bits_of(load(row[i])) & 0x7fffffff);
  });
  if (greatest_bits > 0x7f800000) return std::numeric_limits<float>::quiet_NaN();
  return *std::max_element(highest.begin(), highest.end());
}

// Returns the first token of a row whose number is the greatest.
template <typename T>
int64_t first_of(const T* row, int64_t size, float best, const std::vector<float>& highest) {
  const int64_t block = std::find(highest.begin(), highest.end(), best) - highest.begin();
  int64_t token = block * kBlock;
  while (token + 1 < size && load(row[token]) != best) ++token;
  return token;
}

// Returns a number that at least `count` of a row's numbers reach, and usually few more.
float reached_by(int64_t count, Workspace& space) {
  if (count > static_cast<int64_t>(space.highest.size())) return kNothing;
  space.best = space.highest;
  const auto last = space.best.begin() + (count - 1);
  std::nth_element(space.best.begin(), last, space.best.end(), std::greater<float>());
  return *last;
}

// Writes a row's numbers that reach the threshold to `values`, or their tokens to `tokens`. Returns the
// count.
template <bool AsTokens, typename T>
int64_t gather(const T* row, int64_t size, float threshold, Workspace& space) {
  int64_t count = 0;
  for_blocks(size, [&](int64_t block, int64_t begin, int64_t end) {
    if (space.highest[block] < threshold) return;
    for (int64_t i = begin; i < end; ++i) {
      const float value = load(row[i]);
      if constexpr (AsTokens) space.tokens[count] = i;
      else space.values[count] = value;
      count += value >= threshold;
    }
  });
  return count;
}

// The bits of a float's magnitude that a histogram counts.
struct Digit {
  int shift;
  uint32_t num_values;
};
constexpr Digit kDigits[] = {{20, 1 << 11}, {10, 1 << 10}, {0, 1 << 10}};

// Adds up the weights of the first `count` values, which are at most 0, in descending order of the values.
// Returns the value at which the sum reaches `wanted`, or the last one. Overwrites both arrays. Magnitudes
// have the order of their bits. So a histogram over the upper bits shows the part that has the value, a
// histogram over the next bits shows the part of that part, and so on.
float value_that_reaches(double wanted, int64_t count, Workspace& space) {
  float *values = space.values.data(), *weights = space.weights.data();
  double before = 0.0;
  for (const Digit digit : kDigits) {
    const auto digit_of = [digit](float value) {
      return bits_of(value) >> digit.shift & (digit.num_values - 1);
    };
    std::array<double, kDigits[0].num_values> sums{};
    for (int64_t i = 0; i < count; ++i) sums[digit_of(values[i])] += weights[i];
    uint32_t sought = 0;
    double reached = before;
    for (uint32_t each = 0; each < digit.num_values && reached < wanted; ++each) {
      if (sums[each] == 0.0) continue;
      sought = each;
      before = reached;
      reached += sums[each];
    }
    if (reached < wanted) wanted = std::numeric_limits<double>::infinity();
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float value = values[i];
      values[left] = value;
      weights[left] = weights[i];
      left += digit_of(value) == sought;
    }
    count = left;
  }
  return count ? values[0] : kNothing;
}

}  // namespace promptq
