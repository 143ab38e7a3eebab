// A weight as products read it.
#pragma once

#include <cstdint>

#include "machine/buffer.h"

namespace promptq {

// Rows of numbers, one after the other.
template <typename T>
struct Matrix {
  const T* numbers;
  int64_t rows, columns;
};

// A weight [outputs, inputs] in the order of the products that packed it.
template <typename T>
struct Packed {
  Buffer<T> numbers;
  int64_t outputs, inputs;
};

}  // namespace promptq
