// Products with bf16 weights on processors that can multiply only fp32.
//
// Weights stay in bf16, so that little memory is read, and are widened in registers. Each sum goes
// through the inputs in order, so the result of a row does not depend on the rows beside it.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

#include "machine/elements.h"
#include "machine/vectors.h"

namespace promptq {

class WideningWeight {
 public:
  // Packs `weight` [columns, in] into tiles [in, kColumns], with zeros after the last column.
  static at::Tensor pack(const at::Tensor& weight) {
    const int64_t columns = weight.size(0), in = weight.size(1);
    const int64_t num_tiles = (columns + kColumns - 1) / kColumns;
    at::Tensor padded = at::zeros({num_tiles * kColumns, in}, weight.options());
    padded.narrow(0, 0, columns).copy_(weight);
    // In this order widen() gives the columns of the first half, then those of the second.
    return padded.view({num_tiles, 2, kLanes, in}).permute({0, 3, 2, 1}).contiguous();
  }

  // y = x w' + b, [rows, columns] of bf16. `x` is [rows, in], and `bias` has `columns` numbers if it is
  // given.
  static at::Tensor multiply(
      const at::Tensor& x, const at::Tensor& packed, const c10::optional<at::Tensor>& bias,
      int64_t columns) {
    const int64_t rows = x.size(0), in = x.size(1), num_tiles = packed.size(0);
    at::Tensor y = at::empty({rows, columns}, x.options());
    const at::Tensor wide = widen_rows(x);
    for (int64_t tile = 0, step; tile < num_tiles; tile += step) {
      // With one or two rows, one tile alone has too few sums to keep the processor busy.
      step = rows <= kFewRows && tile + 1 < num_tiles ? 2 : 1;
      const Bf16* weights = data<Bf16>(packed) + tile * in * kColumns;
      const int64_t first = tile * kColumns;
      const Target target{
          data<Bf16>(y) + first, columns, columns - first,
          bias ? data<Bf16>(*bias) + first : nullptr};
      for_groups(rows, [&](auto group, int64_t row) {
        const float* from = data<float>(wide) + row * in;
        if constexpr (group() <= kFewRows)
          if (step == 2) return multiply_tiles<group(), 2>(from, weights, in, target.at(row));
        multiply_tiles<group(), 1>(from, weights, in, target.at(row));
      });
    }
    return y;
  }

 private:
  static constexpr int64_t kColumns = 2 * kLanes;
  // Two sums for each row fit into the registers, beside the weights and a number of x.
  static constexpr int64_t kRows = kRegisters / 2 - 2, kFewRows = 2;

  // Where the results of some rows go, and how many columns are left.
  struct Target {
    Bf16* y;
    int64_t stride, num_columns;
    const Bf16* bias;

    Target at(int64_t row) const { return {y + row * stride, stride, num_columns, bias}; }
  };

  // Calls work(std::integral_constant<int, Group>, first row) so that all rows are covered, in groups
  // that are as equal as can be: a small one takes nearly as long as a large one.
  template <typename Work>
  static void for_groups(int64_t rows, const Work& work) {
    const int64_t num_groups = (rows + kRows - 1) / kRows;
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t row = rows * group / num_groups;
      with_constant<kRows>(rows * (group + 1) / num_groups - row, [&](auto size) { work(size, row); });
    }
  }

  // work(std::integral_constant<int, value>), for a value from 1 to Most.
  template <int Most, typename Work>
  static void with_constant(int64_t value, const Work& work) {
    if constexpr (Most > 1)
      if (value < Most) return with_constant<Most - 1>(value, work);
    work(std::integral_constant<int, Most>());
  }

  // The rows of each group side by side, [in, group] in fp32.
  static at::Tensor widen_rows(const at::Tensor& x) {
    const int64_t in = x.size(1);
    at::Tensor wide = at::empty({x.size(0), in}, x.options().dtype(at::kFloat));
    for_groups(x.size(0), [&](auto group, int64_t row) {
      float* to = data<float>(wide) + row * in;
      for (int64_t r = 0; r < group(); ++r) {
        const Bf16* from = data<Bf16>(x) + (row + r) * in;
        for (int64_t i = 0; i < in; ++i) to[i * group() + r] = load(from[i]);
      }
    });
    return wide;
  }

  template <int Rows, int Tiles>
  static void multiply_tiles(
      const float* x, const Bf16* weights, int64_t in, const Target& target) {
    Vector sums[Rows][2 * Tiles] = {};
    for (int64_t i = 0; i < in; ++i, x += Rows, weights += kColumns)
#pragma GCC unroll 2
      for (int t = 0; t < Tiles; ++t) {
        const Pair columns = widen(weights + t * in * kColumns);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; ++r) {
          sums[r][2 * t] += x[r] * columns.a;
          sums[r][2 * t + 1] += x[r] * columns.b;
        }
      }
    const int64_t num_columns = std::min<int64_t>(Tiles * kColumns, target.num_columns);
    for (int r = 0; r < Rows; ++r)
      for (int64_t column = 0; column < num_columns; ++column) {
        const float sum = sums[r][column / kLanes][column % kLanes];
        const float bias = target.bias ? load(target.bias[column]) : 0.0f;
        store(target.y[r * target.stride + column], sum + bias);
      }
  }
};

}  // namespace promptq
