// Weights as they are given, and as products read them.
#pragma once

#include <cstdint>
#include <cstring>

#include "machine/elements.h"

namespace promptq {

// A weight [rows, columns], one row after the other. With 16 or 32 bits, it has the model's own numbers. With
// 8 or 4, a number is `scales[row, column / group] * (n - 2^(bits - 1))`, where n is without a sign; of 4
// bits, two share a byte, the lower half first.
struct Matrix {
  const void* numbers;
  const float* scales;  // [rows, ceil(columns / group)], or null
  int64_t bits, group, rows, columns;

  int64_t row_bytes() const { return (columns * bits + 7) / 8; }
  int64_t num_groups() const { return scales ? (columns + group - 1) / group : 0; }
};

// Copies a row of a matrix of 8, 16 or 32 bits.
template <typename T>
void copy_row(const Matrix& matrix, int64_t row, T* to) {
  const auto* from = static_cast<const uint8_t*>(matrix.numbers) + row * matrix.row_bytes();
  if (!matrix.scales) {
    std::memcpy(to, from, matrix.row_bytes());
    return;
  }
  const float* scales = matrix.scales + row * matrix.num_groups();
  for (int64_t i = 0; i < matrix.columns; ++i) store(to[i], scales[i / matrix.group] * (from[i] - 128));
}

// A weight [outputs, inputs] in the order of its products.
template <typename T>
class Packed {
 public:
  Packed(int64_t outputs, int64_t inputs) : outputs_(outputs), inputs_(inputs) {}
  virtual ~Packed() = default;

  // y = x w' + b: `x` is [rows, inputs], `y` is [rows, outputs], and `bias` may be null. The result of a
  // row does not depend on the rows beside it.
  virtual void multiply(const T* x, int64_t rows, const T* bias, T* y) const = 0;

  int64_t outputs() const { return outputs_; }
  int64_t inputs() const { return inputs_; }

 private:
  int64_t outputs_, inputs_;
};

}  // namespace promptq
