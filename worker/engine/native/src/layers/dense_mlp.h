// An MLP that computes all its weights for each row: down(activation(scale * gate) * up), or without a gate
// down(activation(scale * up)).
#pragma once

#include <algorithm>
#include <iterator>

#include "interface.h"
#include "layers/activation.h"
#include "linear/linear.h"

namespace promptq {

template <typename T>
class DenseMlp {
 public:
  DenseMlp(
      const MlpWeights& weights, int64_t size, int num_threads, WeightMemory* memory,
      int64_t granule = kGranule)
      : inner_size_(weights.inner_size), is_gated_(weights.is_gated != 0),
        activation_(static_cast<Activation>(weights.activation)),
        gate_scale_(static_cast<float>(weights.gate_scale)),
        inputs_(
            inner_size_, side_by_side(inputs_of(weights, size)), static_cast<const T*>(weights.input_bias),
            granule, num_threads, memory),
        down_(
            size, side_by_side({matrix(weights.down, size, inner_size_)}),
            static_cast<const T*>(weights.down_bias), granule, num_threads, memory) {
    std::copy(std::begin(weights.numbers), std::end(weights.numbers), numbers_);
  }

  int64_t inner_size() const { return inner_size_; }
  const Linear<T>& inputs() const { return inputs_; }
  const Linear<T>& down() const { return down_; }

  // One phase: computes the inputs of down() [num_rows, inner_size] of `x` [num_rows, size].
  void activate(Team& team, const T* x, int64_t num_rows, T* inner) const {
    inputs_.multiply(team, x, num_rows, [&](const T* y, Range rows, Range columns) {
      place(y, rows, columns, inner);
    });
  }

  // activate() for one slice of inputs(), on this thread.
  void activate_slice(int64_t slice, const T* x, int64_t num_rows, T* inner) const {
    inputs_.multiply_slice(slice, x, {0, num_rows}, [&](const T* y, Range rows, Range columns) {
      place(y, rows, columns, inner);
    });
  }

 private:
  void place(const T* y, Range rows, Range columns, T* inner) const {
    for (int64_t i = 0; i < rows.count; ++i) {
      const T* gate = y + i * (is_gated_ ? 2 : 1) * columns.count;
      const T* up = is_gated_ ? gate + columns.count : nullptr;
      T* to = inner + (rows.first + i) * inner_size_ + columns.first;
      activate_row(activation_, numbers_, gate, gate_scale_, up, columns.count, to);
    }
  }

  static std::vector<Matrix> inputs_of(const MlpWeights& weights, int64_t size) {
    const int64_t inner_size = weights.inner_size;
    if (!weights.is_gated) return {matrix(weights.up, inner_size, size)};
    if (!weights.up.numbers) {
      const Matrix both = matrix(weights.gate, 2 * inner_size, size);
      return {both.some_rows(0, inner_size), both.some_rows(inner_size, inner_size)};
    }
    return {matrix(weights.gate, inner_size, size), matrix(weights.up, inner_size, size)};
  }

  const int64_t inner_size_;
  const bool is_gated_;
  const Activation activation_;
  const float gate_scale_;
  float numbers_[4];
  Linear<T> inputs_, down_;
};

}  // namespace promptq
