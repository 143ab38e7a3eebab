// A linear layer, cut into slices of its outputs so that the threads of a team can share it.
//
// A slice is multiplied on one thread, and the result of a row does not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "linear/packed.h"
#include "linear/tile_linear.h"
#include "linear/vector_linear.h"
#include "machine/buffer.h"
#include "machine/team.h"

namespace promptq {

// How weights are packed, and how rows are multiplied with packed weights (VectorLinear says what it gives).
template <typename T>
struct Products {
  Packed<T> (*pack)(const Matrix<T>& weight);
  void (*multiply)(const T* x, int64_t rows, const Packed<T>& weight, const T* bias, T* y);
};

// The fastest products that this processor has.
template <typename T>
Products<T> products_of() {
#ifdef __AMX_BF16__
  if constexpr (std::is_same_v<T, Bf16>)
    if (has_tiles()) return {TileLinear::pack, TileLinear::multiply};
#endif
  return {VectorLinear<T>::pack, VectorLinear<T>::multiply};
}

struct Range {
  int64_t first, count;
};

template <typename T>
class Linear {
 public:
  // `stacked` are weights [outputs, inputs] of one size. A slice has the same outputs of each, in order.
  // `bias` is for a single weight only and may be null. Slices end at multiples of `granule` outputs. There
  // are at most `slices_each` for each thread. What is given is copied.
  Linear(
      const std::vector<Matrix<T>>& stacked, const T* bias, int64_t granule, int num_threads,
      int64_t slices_each = 1)
      : products_(products_of<T>()) {
    const int64_t outputs = stacked[0].rows, granules = ceil_div(outputs, granule);
    slices_.resize(std::min(slices_each * num_threads, granules));
    const int64_t count = slices_.size();
    Team::run(num_threads, [&](Team& team) {
      team.share(count, [&](int64_t slice) {
        const int64_t first = std::min(outputs, granules * slice / count * granule);
        const int64_t last = std::min(outputs, granules * (slice + 1) / count * granule);
        slices_[slice] = slice_of(stacked, bias, Range{first, last - first});
      });
    });
  }

  // One phase: use(y, rows, outputs) is called with y = x w' + b [rows, stacked * outputs] for some rows
  // of `x` [num_rows, inputs].
  template <typename Use>
  void multiply(Team& team, const T* x, int64_t num_rows, const Use& use) const {
    const int64_t num_slices = slices_.size(), num_parts = ceil_div(num_rows, kMostRows);
    team.share(num_parts * num_slices, [&](int64_t item) {
      const Slice& slice = slices_[item % num_slices];
      const int64_t part = item / num_slices, first = num_rows * part / num_parts;
      const Range rows{first, num_rows * (part + 1) / num_parts - first};
      T* y = results(rows.count * slice.weight.outputs);
      const T* bias = slice.bias.empty() ? nullptr : slice.bias.data();
      products_.multiply(x + first * slice.weight.inputs, rows.count, slice.weight, bias, y);
      use(y, rows, slice.outputs);
    });
  }

 private:
  struct Slice {
    Packed<T> weight;
    std::vector<T> bias;
    Range outputs;  // of each of the stacked
  };

  // The most rows of one item: enough to read weights rarely, few enough to stay in the cache.
  static constexpr int64_t kMostRows = 256;

  // Memory of this thread for the results of an item.
  static T* results(int64_t count) {
    thread_local Buffer<T> memory;
    return memory.reserve(count);
  }

  Slice slice_of(const std::vector<Matrix<T>>& stacked, const T* bias, Range outputs) const {
    const int64_t inputs = stacked[0].columns, size = outputs.count * inputs;
    std::vector<T> together(stacked.size() * size);
    for (size_t i = 0; i < stacked.size(); ++i)
      std::copy_n(stacked[i].numbers + outputs.first * inputs, size, together.data() + i * size);
    const int64_t width = stacked.size() * outputs.count;
    return Slice{
        products_.pack({together.data(), width, inputs}),
        bias ? std::vector<T>(bias + outputs.first, bias + outputs.first + outputs.count)
             : std::vector<T>(),
        outputs};
  }

  Products<T> products_;
  std::vector<Slice> slices_;
};

}  // namespace promptq
