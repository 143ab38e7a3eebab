// A linear layer, cut into slices of its outputs so that the threads of a team can share it.
//
// A slice is multiplied on one thread, and the result of a row does not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "linear/packed.h"
#include "linear/tile_linear.h"
#include "linear/vector_linear.h"
#include "machine/buffer.h"
#include "machine/team.h"

namespace promptq {

// In quantized_linear.cpp, which is compiled beside the rest.
template <typename T>
std::unique_ptr<Packed<T>> pack_quantized(const Matrix& weight, WeightMemory& memory);

// Packs a weight for the fastest products that this processor has.
template <typename T>
std::unique_ptr<Packed<T>> pack(const Matrix& weight, WeightMemory& memory) {
  if (weight.scales) return pack_quantized<T>(weight, memory);
#ifdef __AMX_BF16__
  if constexpr (std::is_same_v<T, Bf16>)
    if (has_tiles()) return std::make_unique<TileLinear>(weight, memory);
#endif
  return std::make_unique<VectorLinear<T>>(weight, memory);
}

struct Range {
  int64_t first, count;
};

template <typename T>
class Linear {
 public:
  // `stacked` are weights [outputs, inputs] of one size and kind. A slice has the same outputs of each, in
  // order.
  // `bias` is for a single weight only and may be null. Slices end at multiples of `granule` outputs. There
  // are at most `slices_each` for each thread. What is given is copied into `memory`.
  Linear(
      const std::vector<Matrix>& stacked, const T* bias, int64_t granule, int num_threads,
      WeightMemory& memory, int64_t slices_each = 1) {
    const int64_t outputs = stacked[0].rows, granules = ceil_div(outputs, granule);
    slices_.resize(std::min(slices_each * num_threads, granules));
    const int64_t count = slices_.size();
    Team::run(num_threads, [&](Team& team) {
      team.share(count, [&](int64_t slice) {
        const int64_t first = std::min(outputs, granules * slice / count * granule);
        const int64_t last = std::min(outputs, granules * (slice + 1) / count * granule);
        slices_[slice] = slice_of(stacked, bias, Range{first, last - first}, memory);
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
      T* y = results(rows.count * slice.weight->outputs());
      const T* bias = slice.bias.empty() ? nullptr : slice.bias.data();
      slice.weight->multiply(x + first * slice.weight->inputs(), rows.count, bias, y);
      use(y, rows, slice.outputs);
    });
  }

 private:
  struct Slice {
    std::unique_ptr<Packed<T>> weight;
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

  static Slice slice_of(
      const std::vector<Matrix>& stacked, const T* bias, Range outputs, WeightMemory& memory) {
    const Matrix& one = stacked[0];
    const int64_t size = outputs.count * one.row_bytes(), num_scales = outputs.count * one.num_groups();
    std::vector<uint8_t> numbers(stacked.size() * size);
    std::vector<float> scales(stacked.size() * num_scales);
    for (size_t i = 0; i < stacked.size(); ++i) {
      const auto* bytes = static_cast<const uint8_t*>(stacked[i].numbers);
      std::copy_n(bytes + outputs.first * one.row_bytes(), size, numbers.data() + i * size);
      if (num_scales)
        std::copy_n(
            stacked[i].scales + outputs.first * one.num_groups(), num_scales,
            scales.data() + i * num_scales);
    }
    const int64_t width = stacked.size() * outputs.count;
    return Slice{
        pack<T>({numbers.data(), scales.data(), one.bits, one.group, width, one.columns}, memory),
        bias ? std::vector<T>(bias + outputs.first, bias + outputs.first + outputs.count)
             : std::vector<T>(),
        outputs};
  }

  std::vector<Slice> slices_;
};

}  // namespace promptq
