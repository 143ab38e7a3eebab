// A linear layer, cut into slices of its outputs that the threads of a team share. A slice is multiplied on
// one thread, and the result of a row does not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "linear/packed.h"
#include "linear/unpacked_linear.h"
#include "linear/vector_linear.h"
#include "machine/buffer.h"
#include "machine/team.h"

namespace promptq {

// Defined in quantized_linear.cpp, so that it compiles at the same time as the rest.
template <typename T>
std::unique_ptr<Packed<T>> pack_quantized(const Matrix& weight, WeightMemory& memory);

// Returns null without tile registers. Defined in tiles.cpp.
std::unique_ptr<Packed<Bf16>> pack_for_tiles(const Matrix& weight, WeightMemory& memory);

// Packs a weight for the fastest products that this processor has.
template <typename T>
std::unique_ptr<Packed<T>> pack(const Matrix& weight, WeightMemory& memory) {
  if (weight.scales) return pack_quantized<T>(weight, memory);
  if constexpr (std::is_same_v<T, Bf16>)
    if (auto packed = pack_for_tiles(weight, memory)) return packed;
  return std::make_unique<VectorLinear<T>>(weight, memory);
}

// Packs a weight into `memory`. If `memory` is null, which is only for fp32, the weight is read in place.
template <typename T>
std::unique_ptr<Packed<T>> pack_or_read(const Matrix& weight, WeightMemory* memory) {
  if constexpr (std::is_same_v<T, float>)
    if (!memory) return std::make_unique<UnpackedLinear>(weight);
  return pack<T>(weight, *memory);
}

struct Range {
  int64_t first, count;
};

// Returns one of `num_parts` parts of `count`, which are as equal as possible.
inline Range part_of(int64_t count, int64_t part, int64_t num_parts) {
  const int64_t first = count * part / num_parts;
  return {first, count * (part + 1) / num_parts - first};
}

// The most rows that are multiplied at once: enough to read weights rarely, few enough to stay in the cache.
constexpr int64_t kMostRows = 256;

// Slices of weights end at multiples of this number of columns, unless heads must stay whole.
constexpr int64_t kGranule = 64;

// The rows of weights that a slice of a layer's outputs needs, in the order of its results.
using WeightsOf = std::function<std::vector<Matrix>(Range outputs)>;

// Each output has one result of each weight.
inline WeightsOf side_by_side(const std::vector<Matrix>& weights) {
  return [=](Range outputs) {
    std::vector<Matrix> parts;
    for (const Matrix& weight : weights) parts.push_back(weight.some_rows(outputs.first, outputs.count));
    return parts;
  };
}

// The outputs of each weight follow those of the one before.
inline WeightsOf one_after_another(const std::vector<Matrix>& weights) {
  return [=](Range outputs) {
    std::vector<Matrix> parts;
    int64_t begin = 0;
    for (const Matrix& weight : weights) {
      const int64_t first = std::max(outputs.first, begin);
      const int64_t last = std::min(outputs.first + outputs.count, begin + weight.rows);
      if (first < last) parts.push_back(weight.some_rows(first - begin, last - first));
      begin += weight.rows;
    }
    return parts;
  };
}

// Copies the results of some rows and columns to their places in `to`, whose rows have `size` numbers.
template <typename T>
void place_results(const T* results, Range rows, Range columns, T* to, int64_t size) {
  for (int64_t i = 0; i < rows.count; ++i)
    std::copy_n(
        results + i * columns.count, columns.count, to + (rows.first + i) * size + columns.first);
}

template <typename T>
class Linear {
 public:
  // `bias` is [results of an output, outputs], or null. Slices end at multiples of `granule` outputs. Each
  // thread has at most `slices_each` slices. Weights are copied into `memory`, or read in place if `memory` is
  // null.
  Linear(
      int64_t outputs, const WeightsOf& weights_of, const T* bias, int64_t granule, int num_threads,
      WeightMemory* memory, int64_t slices_each = 1)
      : outputs_(outputs) {
    const int64_t granules = ceil_div(outputs, granule);
    slices_.resize(std::min(slices_each * num_threads, granules));
    const int64_t count = slices_.size();
    Team::run(num_threads, [&](Team& team) {
      team.share(count, [&](int64_t slice) {
        const int64_t first = std::min(outputs, granules * slice / count * granule);
        const int64_t last = std::min(outputs, granules * (slice + 1) / count * granule);
        const Range range{first, last - first};
        slices_[slice] = slice_of(weights_of(range), bias, outputs, range, memory);
      });
    });
  }

  // One phase: calls use(y, rows, outputs) with y = x w' + b [rows, results of the outputs] for rows of `x`.
  template <typename Use>
  void multiply(Team& team, const T* x, int64_t num_rows, const Use& use) const {
    share(team, num_rows, [&](int64_t slice, Range rows) { multiply_slice(slice, x, rows, use); });
  }

  // One phase: calls work(slice, rows) so that all slices are multiplied with all rows.
  template <typename Work>
  void share(Team& team, int64_t num_rows, const Work& work) const {
    const int64_t num_slices = slices_.size(), num_parts = ceil_div(num_rows, kMostRows);
    team.share(num_parts * num_slices, [&](int64_t item) {
      work(item % num_slices, part_of(num_rows, item / num_slices, num_parts));
    });
  }

  // One phase: y = x w' + b [num_rows, outputs], for a layer with one result of each output.
  void multiply_into(Team& team, const T* x, int64_t num_rows, T* y) const {
    multiply(team, x, num_rows, [&](const T* results, Range rows, Range columns) {
      place_results(results, rows, columns, y, outputs_);
    });
  }

  int64_t num_slices() const { return slices_.size(); }
  int64_t inputs() const { return slices_.front().weights.front()->inputs(); }

  // multiply() for one slice and some rows of `x`, on this thread.
  template <typename Use>
  void multiply_slice(int64_t index, const T* x, Range rows, const Use& use) const {
    const Slice& slice = slices_[index];
    T* y = results(rows.count * slice.num_results);
    const T* bias = slice.bias.empty() ? nullptr : slice.bias.data();
    int64_t column = 0;
    for (const auto& weight : slice.weights) {
      weight->multiply(
          x + rows.first * weight->inputs(), rows.count, bias ? bias + column : nullptr, y + column,
          slice.num_results);
      column += weight->outputs();
    }
    use(y, rows, slice.outputs);
  }

 private:
  struct Slice {
    std::vector<std::unique_ptr<Packed<T>>> weights;
    int64_t num_results;
    std::vector<T> bias;
    Range outputs;
  };

  // Memory of this thread for the results of an item.
  static T* results(int64_t count) {
    thread_local Buffer<T> memory;
    return memory.reserve(count);
  }

  // Packs neighbours of one format as one weight.
  static Slice slice_of(
      const std::vector<Matrix>& parts, const T* bias, int64_t num_outputs, Range outputs,
      WeightMemory* memory) {
    Slice slice{{}, 0, {}, outputs};
    const auto add = [&](std::unique_ptr<Packed<T>> weight) {
      slice.num_results += weight->outputs();
      slice.weights.push_back(std::move(weight));
    };
    if (memory)
      for (size_t i = 0, next; i < parts.size(); i = next) {
        for (next = i + 1; next < parts.size() && parts[next].is_like(parts[i]);) ++next;
        add(pack_together({parts.begin() + i, parts.begin() + next}, *memory));
      }
    else
      for (const Matrix& part : parts) add(pack_or_read<T>(part, memory));
    if (bias && outputs.count > 0)
      for (int64_t i = 0; i < slice.num_results / outputs.count; ++i) {
        const T* first = bias + i * num_outputs + outputs.first;
        slice.bias.insert(slice.bias.end(), first, first + outputs.count);
      }
    return slice;
  }

  static std::unique_ptr<Packed<T>> pack_together(const std::vector<Matrix>& parts, WeightMemory& memory) {
    if (parts.size() == 1) return pack<T>(parts[0], memory);
    std::vector<uint8_t> numbers;
    std::vector<float> scales, offsets;
    Matrix whole = parts[0];
    whole.rows = 0;
    for (const Matrix& part : parts) {
      const auto* bytes = static_cast<const uint8_t*>(part.numbers);
      numbers.insert(numbers.end(), bytes, bytes + part.rows * part.row_bytes());
      const int64_t num_scales = part.rows * part.num_groups();
      if (part.scales) scales.insert(scales.end(), part.scales, part.scales + num_scales);
      if (part.offsets) offsets.insert(offsets.end(), part.offsets, part.offsets + num_scales);
      whole.rows += part.rows;
    }
    whole.numbers = numbers.data();
    if (whole.scales) whole.scales = scales.data();
    if (whole.offsets) whole.offsets = offsets.data();
    return pack<T>(whole, memory);
  }

  const int64_t outputs_;
  std::vector<Slice> slices_;
};

}  // namespace promptq
