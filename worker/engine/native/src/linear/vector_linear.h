// Products in vector registers. Weights are read in their format, so bf16 halves the bytes. Processors that
// multiply bf16 take pairs of inputs. Others widen bf16 in registers. Each sum goes through the inputs in
// order, so the result of a row does not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "linear/packed.h"
#include "linear/row_groups.h"
#include "machine/buffer.h"
#include "machine/elements.h"
#include "machine/vectors.h"

namespace promptq {

template <typename T>
class VectorLinear : public Packed<T> {
 public:
  // Packs `weight` into tiles [steps, kColumns, kInputs], with zeros after the last output and input. A step
  // is the columns and inputs that are multiplied at a time.
  VectorLinear(const Matrix& weight, WeightMemory& memory) : Packed<T>(weight.rows, weight.columns) {
    const int64_t outputs = weight.rows, inputs = weight.columns, num_steps = ceil_div(inputs, kInputs);
    const int64_t num_tiles = ceil_div(outputs, kColumns);
    T* to = numbers_ = memory.reserve<T>(num_tiles * num_steps * kStep);
    for (int64_t tile = 0; tile < num_tiles; ++tile, to += num_steps * kStep) {
      std::fill_n(to, num_steps * kStep, T(0));
      const Matrix rows = weight.some_rows(tile * kColumns, std::min(kColumns, outputs - tile * kColumns));
      for (int64_t first = 0; first < num_steps; first += kPackedSteps)
        for (int64_t column = 0; column < rows.rows; ++column) {
          const T* row = static_cast<const T*>(rows.numbers) + column * inputs;
          T* place = to + place_of(column);
          for (int64_t step = first; step < std::min(first + kPackedSteps, inputs / kInputs); ++step)
            std::memcpy(place + step * kStep, row + step * kInputs, kInputs * sizeof(T));
          if (inputs % kInputs > 0) place[inputs / kInputs * kStep] = row[inputs - 1];
        }
    }
  }

  void multiply(const T* x, int64_t rows, const T* bias, T* y, int64_t stride) const override {
    const int64_t outputs = this->outputs(), num_steps = ceil_div(this->inputs(), kInputs);
    const int64_t num_tiles = ceil_div(outputs, kColumns);
    thread_local Buffer<Factor> memory;
    Factor* factors = memory.reserve(rows * num_steps);
    lay_out_rows(x, rows, this->inputs(), factors);
    for (int64_t tile = 0, step; tile < num_tiles; tile += step) {
      // With one or two rows, one tile alone has too few sums to keep the processor busy.
      step = rows <= kFewRows && tile + 1 < num_tiles ? 2 : 1;
      const T* weights = numbers_ + tile * num_steps * kStep;
      const int64_t first = tile * kColumns;
      const Target target{y + first, stride, outputs - first, bias ? bias + first : nullptr};
      for_groups<kRows>(rows, [&](auto group, int64_t row) {
        const Factor* from = factors + row * num_steps;
        if constexpr (group() <= kFewRows)
          if (step == 2) return multiply_tiles<group(), 2>(from, weights, num_steps, target.at(row));
        multiply_tiles<group(), 1>(from, weights, num_steps, target.at(row));
      });
    }
  }

 private:
  static constexpr bool kByPairs = kMultipliesBf16 && std::is_same_v<T, Bf16>;
  static constexpr int64_t kInputs = kByPairs ? 2 : 1, kColumns = 2 * kLanes, kStep = kColumns * kInputs;
  // Two sums for each row fit into the registers, beside the weights and a factor.
  static constexpr int64_t kRows = kRegisters / 2 - 2, kFewRows = 2;
  // The steps of each column that are packed at a time. Their places stay in the nearest cache meanwhile.
  static constexpr int64_t kPackedSteps = 64;
  // The inputs of a row in a step.
  using Factor = std::conditional_t<kByPairs, uint32_t, float>;

  // The place of a column's weights in a step, so that widen() returns the columns in order.
  static int64_t place_of(int64_t column) {
    return kByPairs ? column * kInputs : widened_from<T>(column);
  }

  // The place of some rows' results, and the number of outputs that are left.
  struct Target {
    T* y;
    int64_t stride, num_outputs;
    const T* bias;

    Target at(int64_t row) const { return {y + row * stride, stride, num_outputs, bias}; }
  };

  // The weights of a step in registers.
  struct StepWeights {
    explicit StepWeights(const T* place) {
      if constexpr (kByPairs)
        columns = {load_as<Vector>(place), load_as<Vector>(place + kStep / 2)};
      else
        columns = widen(place);
    }

    [[gnu::always_inline]] void add_to(Vector& a, Vector& b, Factor factor) const {
#ifdef __AVX512BF16__
      if constexpr (kByPairs) {
        const auto both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(factor)));
        add_products(a, both, reinterpret_cast<__m512bh>(columns.a));
        add_products(b, both, reinterpret_cast<__m512bh>(columns.b));
        return;
      }
#endif
      a += static_cast<float>(factor) * columns.a;
      b += static_cast<float>(factor) * columns.b;
    }

    Pair columns;
  };

  // The rows of each group side by side, [steps, group].
  static void lay_out_rows(const T* x, int64_t rows, int64_t inputs, Factor* factors) {
    const int64_t num_steps = ceil_div(inputs, kInputs);
    over_groups(rows, kRows, [&](int64_t row, int64_t group) {
      if (group == 1) return lay_out_row(x + row * inputs, inputs, 1, factors + row * num_steps);
      for (int64_t r = 0; r < group; ++r)
        lay_out_row(x + (row + r) * inputs, inputs, group, factors + row * num_steps + r);
    });
  }

  // to[step * group] = the inputs of a row in a step
  static void lay_out_row(const T* from, int64_t inputs, int64_t group, Factor* to) {
    for (int64_t step = 0; step < ceil_div(inputs, kInputs); ++step)
      if constexpr (!kByPairs) {
        to[step * group] = load(from[step]);
      } else {
        const uint32_t high = 2 * step + 1 < inputs ? from[2 * step + 1] : 0;
        to[step * group] = from[2 * step] | high << 16;
      }
  }

  template <int Rows, int Tiles>
  static void multiply_tiles(
      const Factor* factors, const T* weights, int64_t num_steps, const Target& target) {
    Vector a[Rows][Tiles], b[Rows][Tiles];
    each<Rows>([&](auto row) __attribute__((always_inline)) {
      each<Tiles>([&](auto tile) __attribute__((always_inline)) {
        a[row()][tile()] = b[row()][tile()] = Vector{};
      });
    });
    for (int64_t step = 0; step < num_steps; ++step, factors += Rows, weights += kStep)
      each<Tiles>([&](auto tile) __attribute__((always_inline)) {
        const StepWeights columns(weights + tile() * num_steps * kStep);
        each<Rows>([&](auto row) __attribute__((always_inline)) {
          columns.add_to(a[row()][tile()], b[row()][tile()], factors[row()]);
        });
      });
    float sums[Rows][Tiles * kColumns];
    each<Rows>([&](auto row) __attribute__((always_inline)) {
      each<Tiles>([&](auto tile) __attribute__((always_inline)) {
        store_pair(sums[row()] + tile() * kColumns, {a[row()][tile()], b[row()][tile()]});
      });
    });
    store_rows<Tiles * kColumns>(sums[0], Rows, target);
  }

  // y = sums + bias, where `sums` is [rows, Columns]. The products of all groups of rows share this code, which
  // takes long to compile and little time to run.
  template <int64_t Columns>
  [[gnu::noinline]] static void store_rows(const float* sums, int64_t rows, const Target& target) {
    float biases[Columns] = {};
    const int64_t num_outputs = std::min(Columns, target.num_outputs);
    for (int64_t i = 0; target.bias && i < num_outputs; ++i) biases[i] = load(target.bias[i]);
    for (int64_t row = 0; row < rows; ++row, sums += Columns) {
      T* y = target.y + row * target.stride;
      if (num_outputs == Columns)
        add_rounded<Columns>(sums, biases, y);
      else
        for (int64_t i = 0; i < num_outputs; ++i) store(y[i], sums[i] + biases[i]);
    }
  }

  // y = sums + biases
  template <int64_t Size>
  static void add_rounded(const float* sums, const float* biases, T* y) {
#pragma omp simd
    for (int64_t i = 0; i < Size; ++i) store(y[i], sums[i] + biases[i]);
  }

  T* numbers_;
};

}  // namespace promptq
