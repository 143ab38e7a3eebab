// Weights as they are given, and as products read them.
#pragma once

#include <cstdint>
#include <cstring>

#include "machine/elements.h"

namespace promptq {

// A weight [rows, columns], one row after the other. With 16 or 32 bits, it has the model's own numbers. With
// 8 or 4, a number is `scales[row, column / group] * n + offsets[row, column / group]`, where n is without a
// sign; of 4 bits, two share a byte, the lower half first. Without offsets, these are -2^(bits - 1) scales.
struct Matrix {
  const void* numbers;
  const float *scales, *offsets;  // [rows, ceil(columns / group)], or null
  int64_t bits, group, rows, columns;

  int64_t row_bytes() const { return (columns * bits + 7) / 8; }
  int64_t num_groups() const { return scales ? (columns + group - 1) / group : 0; }

  Matrix some_rows(int64_t first, int64_t count) const {
    const auto from = [&](const float* each) { return each ? each + first * num_groups() : nullptr; };
    return {static_cast<const uint8_t*>(numbers) + first * row_bytes(), from(scales), from(offsets), bits,
            group, count, columns};
  }

  // Whether a number of either stands for the same, so that the rows of both are one matrix.
  bool is_like(const Matrix& other) const {
    return bits == other.bits && group == other.group && !offsets == !other.offsets;
  }
};

// Copies a row of a matrix.
template <typename T>
void copy_row(const Matrix& matrix, int64_t row, T* to) {
  const auto* from = static_cast<const uint8_t*>(matrix.numbers) + row * matrix.row_bytes();
  if (!matrix.scales) {
    std::memcpy(to, from, matrix.row_bytes());
    return;
  }
  const Matrix its = matrix.some_rows(row, 1);
  for (int64_t i = 0; i < its.columns; ++i) {
    const int32_t n = its.bits == 8 ? from[i] : from[i / 2] >> i % 2 * 4 & 15;
    const float scale = its.scales[i / its.group];
    store(to[i], its.offsets ? scale * n + its.offsets[i / its.group] : scale * (n - (1 << (its.bits - 1))));
  }
}

// A weight [outputs, inputs] in the order of its products.
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
