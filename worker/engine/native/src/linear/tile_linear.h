// Products with bf16 weights in tile registers. Each sum goes through the inputs in order, so the result of a
// row does not depend on the rows beside it.
#pragma once

#ifdef __AMX_BF16__
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear/packed.h"
#include "machine/buffer.h"
#include "machine/elements.h"
#include "machine/tiles.h"
#include "machine/vectors.h"

namespace promptq {

class TileLinear : public Packed<Bf16> {
 public:
  // Packs `weight` into panels of two tiles' columns [steps, 2, pairs, columns, 2], as the products read
  // them, with zeros after the last output and the last input.
  TileLinear(const Matrix& weight, WeightMemory& memory) : Packed(weight.rows, weight.columns) {
    const int64_t outputs = weight.rows, inputs = weight.columns;
    const int64_t num_panels = ceil_div(outputs, kColumns), num_steps = ceil_div(inputs, kTileInputs);
    const int64_t size = num_panels * num_steps * kStep;
    Bf16* to = std::fill_n(numbers_ = memory.reserve<Bf16>(size), size, Bf16(0)) - size;
    for (int64_t output = 0; output < outputs; ++output) {
      const Bf16* row = static_cast<const Bf16*>(weight.numbers) + output * inputs;
      const int64_t column = output % kColumns;
      Bf16* panel = to + output / kColumns * num_steps * kStep;
      Bf16* tile = panel + column / kTileRows * kTileSize + column % kTileRows * 2;
      for (int64_t i = 0; i < inputs; ++i)
        tile[i / kTileInputs * kStep + i % kTileInputs / 2 * 2 * kTileRows + i % 2] = row[i];
    }
  }

  void multiply(const Bf16* x, int64_t rows, const Bf16* bias, Bf16* y, int64_t stride) const override {
    const int64_t outputs = this->outputs();
    const int64_t num_panels = ceil_div(outputs, kColumns), num_steps = ceil_div(inputs(), kTileInputs);
    const int64_t num_blocks = ceil_div(rows, 2 * kTileRows);
    const Bf16 *padded = in_steps(x, rows, inputs()), *all_weights = numbers_;
    thread_local Buffer<Bf16> memory;
    Bf16 *panels = memory.reserve(num_panels * rows * kColumns), *to = panels;
    TileProducts products;
    for (int64_t panel = 0, configured = 0; panel < num_panels; ++panel) {
      const Bf16* weights = all_weights + panel * num_steps * kStep;
      const Bf16* next = panel + 1 < num_panels ? weights + num_steps * kStep : weights;
      alignas(64) float biases[kColumns] = {};
      for (int64_t i = panel * kColumns; bias && i < std::min(outputs, (panel + 1) * kColumns); ++i)
        biases[i % kColumns] = load(bias[i]);
      for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t row = block * 2 * kTileRows, num_rows = std::min(2 * kTileRows, rows - row);
        if (num_rows != configured) {
          products.configure(std::min(kTileRows, num_rows), num_rows - kTileRows, kTileRows);
          configured = num_rows;
        }
        const Bf16* from = padded + row * num_steps * kTileInputs;
        // Each block of rows reads a share of the next weights ahead. All at once would delay the products.
        const int64_t first = block * kStepLines / num_blocks, last = (block + 1) * kStepLines / num_blocks;
        const auto ahead = [&](int64_t step) {
          // One line further, because reading a page's last line makes the processor prefetch the next page.
          for (int64_t i = first; i < last; ++i)
            read_ahead(
                weights + (step + kStepsNear) * kStep + i * kLine, next + step * kStep + (i + 1) * kLine);
        };
        alignas(64) float sums[2 * kTileRows][kColumns];
        if (num_rows > kTileRows)
          multiply_panel<2>(from, weights, num_steps, ahead, sums);
        else
          multiply_panel<1>(from, weights, num_steps, ahead, sums);
        for (int64_t i = 0; i < num_rows; ++i, to += kColumns) round_row(sums[i], biases, to);
      }
    }
    place_rows(panels, rows, outputs, y, stride);
  }

 private:
  static constexpr int64_t kColumns = 2 * kTileRows, kStep = 2 * kTileSize;
  static constexpr int64_t kStepLines = kStep / kLine, kStepsNear = 2;

  // `x`, padded to whole steps of inputs.
  static const Bf16* in_steps(const Bf16* x, int64_t rows, int64_t inputs) {
    if (inputs % kTileInputs == 0) return x;
    const int64_t padded = round_up(inputs, kTileInputs);
    thread_local Buffer<Bf16> memory;
    Bf16* to = memory.reserve(rows * padded);
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(x + row * inputs, inputs, to + row * padded);
      std::fill_n(to + row * padded + inputs, padded - inputs, Bf16(0));
    }
    return to;
  }

  // sums = x times a panel, for one tile or two of rows; ahead(step) is called in each step.
  template <int RowTiles, typename Ahead>
  static void multiply_panel(
      const Bf16* x, const Bf16* weights, int64_t num_steps, const Ahead& ahead,
      float (*sums)[kColumns]) {
    const int64_t inputs = num_steps * kTileInputs;  // of a row of x
    const int64_t stride = inputs * sizeof(Bf16);
    TileProducts::add<RowTiles, 2, true>(
        num_steps,
        [&](int64_t step, int64_t i) {
          return TilePlace{x + i * kTileRows * inputs + step * kTileInputs, stride};
        },
        [&](int64_t step, int64_t j) {
          if (j == 0) ahead(step);
          return TilePlace{weights + step * kStep + j * kTileSize};
        },
        [&](int64_t i, int64_t j) { return sums[i * kTileRows] + j * kTileRows; },
        kColumns * sizeof(float));
  }

  // to = sums + biases
  static void round_row(const float* sums, const float* biases, Bf16* to) {
    const auto half = [&](int64_t first) {
      return reinterpret_cast<__m512>(load_as<Vector>(sums + first) + load_as<Vector>(biases + first));
    };
    const __m512bh rounded = _mm512_cvtne2ps_pbh(half(kTileRows), half(0));
    std::memcpy(to, &rounded, sizeof rounded);
  }

  // Copies the rows of all panels to `y`. They were written panel by panel, because writes so far apart would
  // keep the processor from reading weights ahead.
  static void place_rows(const Bf16* panels, int64_t rows, int64_t outputs, Bf16* y, int64_t stride) {
    for (int64_t row = 0; row < rows; ++row, y += stride)
      for (int64_t first = 0; first < outputs; first += kColumns) {
        const Bf16* part = panels + first * rows + row * kColumns;
        if (outputs - first >= kColumns)
          std::copy_n(part, kColumns, y + first);  // of a size that the compiler knows
        else
          std::copy_n(part, outputs - first, y + first);
      }
  }

  Bf16* numbers_;
};

}  // namespace promptq
#endif
