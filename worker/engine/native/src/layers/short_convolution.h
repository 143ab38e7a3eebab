// A gated short convolution (LFM2): output(c * convolution(b * x)), where b, c and x are projections.
#pragma once

#include <vector>

#include "interface.h"
#include "layers/convolution.h"
#include "linear/linear.h"

namespace promptq {

// Memory that the layers of a step share.
template <typename T>
struct ShortConvolutionMemory {
  Buffer<T> products;  // [T, channels()]
  Buffer<float> sums;  // [threads, channels()]
};

template <typename T>
class ShortConvolution {
 public:
  ShortConvolution(
      const ShortConvolutionWeights& weights, int64_t size, int num_threads, WeightMemory* memory)
      : convolution_(weights.convolution), num_threads_(num_threads),
        inputs_(
            channels(), side_by_side(thirds(matrix(weights.input, 3 * channels(), size))),
            static_cast<const T*>(weights.input_bias), kGranule, num_threads, memory),
        output_(
            size, side_by_side({matrix(weights.output, size, channels())}),
            static_cast<const T*>(weights.output_bias), kGranule, num_threads, memory) {}

  int64_t channels() const { return convolution_.num_channels; }
  const Linear<T>& output() const { return output_; }

  void reserve(int64_t num_rows, ShortConvolutionMemory<T>& memory) const {
    memory.products.reserve(num_rows * channels());
    memory.sums.reserve(num_threads_ * channels());
  }

  // Computes `mixed` [T, channels()], the input of output(), from `x` [T, size]. Reads and writes windows.
  void mix(
      Team& team, const T* x, int64_t num_rows, const Chunks& chunks,
      const ShortConvolutionMemory<T>& memory, T* mixed) const {
    T* products = memory.products.data();
    inputs_.multiply(team, x, num_rows, [&](const T* y, Range rows, Range columns) {
      for (int64_t i = 0; i < rows.count; ++i) {
        const T *b = y + i * 3 * columns.count, *c = b + columns.count, *of_x = c + columns.count;
        const int64_t place = (rows.first + i) * channels() + columns.first;
        std::copy_n(c, columns.count, mixed + place);
#pragma omp simd
        for (int64_t d = 0; d < columns.count; ++d)
          store(products[place + d], load(b[d]) * load(of_x[d]));
      }
    });
    const ConvolutionInputs<T> inputs(convolution_, products, channels());
    float* sums = memory.sums.data() + Team::thread() * channels();
    share_rows(team, chunks, inputs, [&](int64_t row) {
      inputs.convolve(chunks.of(row), row, sums);
      T* to = mixed + row * channels();
#pragma omp simd
      for (int64_t d = 0; d < channels(); ++d) store(to[d], load(to[d]) * sums[d]);
    });
  }

 private:
  static std::vector<Matrix> thirds(const Matrix& weight) {
    const int64_t rows = weight.rows / 3;
    return {weight.some_rows(0, rows), weight.some_rows(rows, rows), weight.some_rows(2 * rows, rows)};
  }

  const Convolution convolution_;
  const int64_t num_threads_;
  Linear<T> inputs_, output_;
};

}  // namespace promptq
