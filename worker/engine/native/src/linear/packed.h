// Weights in the caller's format (Matrix), and in the format that products read (Packed).
#pragma once

#include <algorithm>
#include <cstdint>

#include "machine/elements.h"

namespace promptq {

// A weight [rows, columns], one row after the other. With 16 or 32 bits, it has the model's own numbers. With
// 8 or 4 bits, a number is `scales[row, column / group] * n + offsets[row, column / group]`, where n has no
// sign. Two n of 4 bits share a byte, the first in the lower half. Without offsets, these are -2^(bits - 1)
// scales. Only copy_row and some_rows support other strides, for 16 or 32 bits.
struct Matrix {
  const void* numbers;
  const float *scales, *offsets;  // [rows, ceil(columns / group)], or null
  int64_t bits, group, rows, columns;
  int64_t row_stride = 0, column_stride = 0;  // in numbers; 0: one row after the other

  int64_t row_bytes() const { return (columns * bits + 7) / 8; }
  int64_t num_groups() const { return scales ? (columns + group - 1) / group : 0; }

  Matrix some_rows(int64_t first, int64_t count) const {
    const auto from = [&](const float* each) { return each ? each + first * num_groups() : nullptr; };
    const int64_t stride = row_stride ? row_stride * bits / 8 : row_bytes();
    return {static_cast<const uint8_t*>(numbers) + first * stride, from(scales), from(offsets), bits, group,
            count, columns, row_stride, column_stride};
  }

  // Whether both matrices have the same format, so that their rows can be one matrix.
  bool is_like(const Matrix& other) const {
    return bits == other.bits && group == other.group && !offsets == !other.offsets;
  }
};

// Copies a row of a matrix, and widens it to T.
template <typename T>
void copy_row(const Matrix& matrix, int64_t row, T* to) {
  const Matrix its = matrix.some_rows(row, 1);
  const auto* from = static_cast<const uint8_t*>(its.numbers);
  if (!its.scales) {
    const int64_t stride = std::max<int64_t>(its.column_stride, 1);
    if (its.bits == 8 * sizeof(T)) {
      const auto* numbers = static_cast<const T*>(its.numbers);
      for (int64_t i = 0; i < its.columns; ++i) to[i] = numbers[i * stride];
    } else {
      const auto* numbers = static_cast<const Bf16*>(its.numbers);
      for (int64_t i = 0; i < its.columns; ++i) store(to[i], load(numbers[i * stride]));
    }
    return;
  }
  for (int64_t first = 0, group = 0; first < its.columns; first += its.group, ++group) {
    // A number is `scale * (n - middle) + offset`, where `middle` or `offset` is 0.
    const float scale = its.scales[group], middle = its.offsets ? 0 : 1 << (its.bits - 1);
    const float offset = its.offsets ? its.offsets[group] : 0.0f;
    const int64_t last = std::min(first + its.group, its.columns);
    const auto place = [&](int64_t i, int32_t n) { store(to[i], scale * (n - middle) + offset); };
    if (its.bits == 8) {
      for (int64_t i = first; i < last; ++i) place(i, from[i]);
      continue;
    }
    int64_t i = first;
    if (i % 2 == 1) place(i, from[i / 2] >> 4), ++i;
#pragma omp simd
    for (int64_t byte = i / 2; byte < last / 2; ++byte) {
      place(2 * byte, from[byte] & 15);
      place(2 * byte + 1, from[byte] >> 4);
    }
    if (last % 2 == 1) place(last - 1, from[last / 2] & 15);
  }
}

// A weight [outputs, inputs], as its products read it.
template <typename T>
class Packed {
 public:
  Packed(int64_t outputs, int64_t inputs) : outputs_(outputs), inputs_(inputs) {}
  virtual ~Packed() = default;

  // y = x w' + b: `x` is [rows, inputs], `y` is [rows, outputs], and `bias` may be null. The rows of `y` are
  // `stride` numbers apart. The result of a row does not depend on the rows beside it.
  virtual void multiply(const T* x, int64_t rows, const T* bias, T* y, int64_t stride) const = 0;

  int64_t outputs() const { return outputs_; }
  int64_t inputs() const { return inputs_; }

 private:
  int64_t outputs_, inputs_;
};

}  // namespace promptq
