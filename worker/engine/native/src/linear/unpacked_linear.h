// Slow products in fp32 that read a weight in place. The check at load uses them to compare the decoder's
// formula with the library's model.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear/packed.h"
#include "linear/row_groups.h"
#include "machine/buffer.h"
#include "machine/vectors.h"

namespace promptq {

class UnpackedLinear : public Packed<float> {
 public:
  // The numbers of `weight` must stay as long as this object.
  explicit UnpackedLinear(const Matrix& weight) : Packed<float>(weight.rows, weight.columns), weight_(weight) {}

  void multiply(const float* x, int64_t rows, const float* bias, float* y, int64_t stride) const override {
    const int64_t padded = round_up(inputs(), kLanes);
    thread_local Buffer<float> row_memory, weight_memory;
    float* from = row_memory.reserve(rows * padded);
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(x + row * inputs(), inputs(), from + row * padded);
      std::fill(from + row * padded + inputs(), from + (row + 1) * padded, 0.0f);
    }
    float* weights = weight_memory.reserve(padded);
    std::fill(weights + inputs(), weights + padded, 0.0f);
    for (int64_t output = 0; output < outputs(); ++output) {
      copy_row(weight_, output, weights);
      for_groups<kRows>(rows, [&](auto group, int64_t row) {
        Vector sums[group()] = {};
        for (int64_t i = 0; i < padded; i += kLanes) {
          const Vector its = load_as<Vector>(weights + i);
          each<group()>([&](auto r) __attribute__((always_inline)) {
            sums[r()] += its * load_as<Vector>(from + (row + r()) * padded + i);
          });
        }
        for (int64_t r = 0; r < group(); ++r)
          y[(row + r) * stride + output] = total(bias ? bias[output] : 0.0f, sums[r]);
      });
    }
  }

 private:
  static constexpr int64_t kRows = 8;

  // Adds the lanes in their order.
  [[gnu::noinline]] static float total(float first, const Vector& lanes) {
    for (int lane = 0; lane < kLanes; ++lane) first += lanes[lane];
    return first;
  }

  const Matrix weight_;
};

}  // namespace promptq
