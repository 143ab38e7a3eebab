// Products with bf16 weights in tile registers.
//
// The result of a row does not depend on the rows beside it. The library does not ensure that there,
// because it chooses its kernels by the number of rows.
#pragma once

#ifdef __AMX_BF16__
#include <ATen/ATen.h>
#include <ATen/ceil_div.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "machine/elements.h"
#include "machine/pages.h"
#include "machine/tiles.h"
#include "machine/vectors.h"

namespace promptq {

class TileWeight {
 public:
  // Packs `weight` [columns, in] into panels of two tiles' columns. Each is [steps, 2, pairs, columns, 2],
  // as the products read them, with zeros after the last column and the last input.
  static at::Tensor pack(const at::Tensor& weight) {
    const int64_t columns = weight.size(0), in = weight.size(1);
    const int64_t num_panels = at::ceil_div(columns, kColumns), num_steps = at::ceil_div(in, kTileInputs);
    at::Tensor padded = at::zeros({num_panels * kColumns, num_steps * kTileInputs}, weight.options());
    padded.narrow(0, 0, columns).narrow(1, 0, in).copy_(weight);
    const at::Tensor panels =
        padded.view({num_panels, 2, kTileRows, num_steps, kTileInputs / 2, 2})
            .permute({0, 3, 1, 4, 2, 5});
    return empty_in_huge_pages(panels.sizes(), panels.options()).copy_(panels);
  }

  // y = x w' + b, [rows, columns] of bf16. `x` is [rows, in], and `bias` has `columns` numbers if it is
  // given.
  static at::Tensor multiply(
      const at::Tensor& x, const at::Tensor& packed, const c10::optional<at::Tensor>& bias,
      int64_t columns) {
    const int64_t rows = x.size(0), num_panels = packed.size(0), num_steps = packed.size(1);
    const int64_t num_blocks = at::ceil_div(rows, 2 * kTileRows);
    const at::Tensor whole = in_steps(x);
    at::Tensor panels = at::empty({num_panels, rows, kColumns}, x.options());
    Bf16* to = data<Bf16>(panels);
    const Bf16 *inputs = data<Bf16>(whole), *all_weights = data<Bf16>(packed);
    const Bf16* all_biases = bias ? data<Bf16>(*bias) : nullptr;
    TileProducts products;
    for (int64_t panel = 0, configured = 0; panel < num_panels; ++panel) {
      const Bf16* weights = all_weights + panel * num_steps * kStep;
      const Bf16* next = panel + 1 < num_panels ? weights + num_steps * kStep : weights;
      alignas(64) float biases[kColumns] = {};
      for (int64_t i = panel * kColumns; bias && i < std::min(columns, (panel + 1) * kColumns); ++i)
        biases[i % kColumns] = load(all_biases[i]);
      for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t row = block * 2 * kTileRows, num_rows = std::min(2 * kTileRows, rows - row);
        if (num_rows != configured) {
          products.configure(std::min(kTileRows, num_rows), num_rows - kTileRows, kTileRows);
          configured = num_rows;
        }
        const Bf16* from = inputs + row * num_steps * kTileInputs;
        // Each block of rows reads a share of the next weights ahead. All at once would delay the products.
        const int64_t first = block * kStepLines / num_blocks, last = (block + 1) * kStepLines / num_blocks;
        const auto ahead = [&](int64_t step) {
          // One line further: a touch of a page's last line makes the processor go on to the next page.
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
    return in_rows(panels, columns);
  }

 private:
  static constexpr int64_t kColumns = 2 * kTileRows, kStep = 2 * kTileSize;
  static constexpr int64_t kStepLines = kStep / kLine, kStepsNear = 2;

  // `x`, padded to whole steps of inputs.
  static at::Tensor in_steps(const at::Tensor& x) {
    const int64_t rows = x.size(0), in = x.size(1);
    if (in % kTileInputs == 0) return x;
    at::Tensor padded = at::zeros({rows, at::round_up(in, kTileInputs)}, x.options());
    padded.narrow(1, 0, in).copy_(x);
    return padded;
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

  // The rows of all panels, [rows, columns]. They were written panel by panel, because writing to rows so
  // far apart would keep the processor from reading weights ahead.
  static at::Tensor in_rows(const at::Tensor& panels, int64_t columns) {
    const int64_t rows = panels.size(1);
    at::Tensor y = at::empty({rows, columns}, panels.options());
    const Bf16* from = data<Bf16>(panels);
    Bf16* to = data<Bf16>(y);
    for (int64_t row = 0; row < rows; ++row, to += columns)
      for (int64_t first = 0; first < columns; first += kColumns) {
        const Bf16* part = from + first * rows + row * kColumns;
        if (columns - first >= kColumns)
          std::copy_n(part, kColumns, to + first);  // of a size that the compiler knows
        else
          std::copy_n(part, columns - first, to + first);
      }
    return y;
  }
};

}  // namespace promptq
#endif
