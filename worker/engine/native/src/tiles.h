// Products with bf16 weights in the tile registers of processors that have them (AMX).
//
// Each sum is taken through the inputs in order: what comes out for a row does not depend on the
// rows beside it, which the library's kernels, chosen by the number of rows, do not give there.
#pragma once

#ifdef __AMX_BF16__
#include <ATen/ATen.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "elements.h"

namespace promptq {

// Linux gives tile registers to processes that ask for them.
inline bool has_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // <asm/prctl.h>
  static const bool is_granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_granted;
}

class TileWeight {
 public:
  // Of `weight` [columns, in], panels of two tiles' columns, each [steps, 2, pairs, columns, 2] as the
  // products read them, zeros behind the last column and the last input.
  static at::Tensor pack(const at::Tensor& weight) {
    const int64_t columns = weight.size(0), in = weight.size(1);
    const int64_t num_panels = (columns + kColumns - 1) / kColumns, num_steps = steps_of(in);
    at::Tensor padded = at::zeros({num_panels * kColumns, num_steps * kInputs}, weight.options());
    padded.narrow(0, 0, columns).narrow(1, 0, in).copy_(weight);
    return padded.view({num_panels, 2, kRows, num_steps, kInputs / 2, 2})
        .permute({0, 3, 1, 4, 2, 5})
        .contiguous();
  }

  // y = x w' + b, [rows, columns] of bf16; `x` is [rows, in] and `bias` holds `columns` numbers or is
  // not there.
  static at::Tensor multiply(
      const at::Tensor& x, const at::Tensor& packed, const c10::optional<at::Tensor>& bias,
      int64_t columns) {
    const int64_t rows = x.size(0), num_panels = packed.size(0), num_steps = packed.size(1);
    const at::Tensor whole = in_steps(x);
    at::Tensor y = at::empty({rows, columns}, x.options());
    int64_t configured = 0;
    for (int64_t panel = 0; panel < num_panels; ++panel) {
      const Bf16* weights = data<Bf16>(packed) + panel * num_steps * kInputs * kColumns;
      const int64_t first = panel * kColumns;
      for (int64_t row = 0; row < rows; row += 2 * kRows) {
        const int64_t num_rows = std::min(2 * kRows, rows - row);
        if (num_rows != configured) configure(configured = num_rows);
        const Bf16* from = data<Bf16>(whole) + row * num_steps * kInputs;
        alignas(64) float sums[2 * kRows][kColumns];
        if (num_rows > kRows)
          multiply_panel<2>(from, weights, num_steps, sums);
        else
          multiply_panel<1>(from, weights, num_steps, sums);
        store_rows(
            sums, num_rows, std::min(kColumns, columns - first), columns,
            bias ? data<Bf16>(*bias) + first : nullptr, data<Bf16>(y) + row * columns + first);
      }
    }
    _tile_release();
    return y;
  }

 private:
  // Of a tile: rows, and inputs that are multiplied at a time. Two tiles of x by two of the weights
  // keep the processor busiest, for each is read once for two products.
  static constexpr int64_t kRows = 16, kInputs = 32, kTile = kRows * kInputs;
  static constexpr int64_t kColumns = 2 * kRows, kStepsAhead = 3;

  static int64_t steps_of(int64_t in) { return (in + kInputs - 1) / kInputs; }

  // `x` with whole steps of inputs.
  static at::Tensor in_steps(const at::Tensor& x) {
    const int64_t rows = x.size(0), in = x.size(1);
    if (in % kInputs == 0) return x;
    at::Tensor padded = at::zeros({rows, steps_of(in) * kInputs}, x.options());
    padded.narrow(1, 0, in).copy_(x);
    return padded;
  }

  // Tiles 0 to 3 are the sums, 4 and 5 rows of x, 6 and 7 weights.
  static void configure(int64_t num_rows) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const auto upper = static_cast<uint8_t>(std::min(kRows, num_rows));
    const auto lower = static_cast<uint8_t>(std::max<int64_t>(1, num_rows - kRows));
    std::fill_n(config.row_bytes, 8, 64);
    const uint8_t rows[8] = {upper, upper, lower, lower, upper, lower, kRows, kRows};
    std::copy_n(rows, 8, config.rows);
    _tile_loadconfig(&config);
  }

  // sums = x times a panel, for one tile or two of rows.
  template <int RowTiles>
  static void multiply_panel(
      const Bf16* x, const Bf16* weights, int64_t num_steps, float (*sums)[kColumns]) {
    const int64_t inputs = num_steps * kInputs, bytes = inputs * sizeof(Bf16);  // of a row of x
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (RowTiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t step = 0; step < num_steps; ++step, x += kInputs, weights += 2 * kTile) {
      // Beyond the page that the processor reads ahead in by itself.
      for (int64_t i = 0; i < 2 * kTile; i += kInputs)
        _mm_prefetch(weights + kStepsAhead * 2 * kTile + i, _MM_HINT_T0);
      _tile_loadd(6, weights, 64);
      _tile_loadd(4, x, bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights + kTile, 64);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (RowTiles == 2) {
        _tile_loadd(5, x + kRows * inputs, bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    constexpr int64_t kStride = kColumns * sizeof(float);
    _tile_stored(0, sums[0], kStride);
    _tile_stored(1, sums[0] + kRows, kStride);
    if constexpr (RowTiles == 2) {
      _tile_stored(2, sums[kRows], kStride);
      _tile_stored(3, sums[kRows] + kRows, kStride);
    }
  }

  // y = sums + bias; rows of y are `stride` apart.
  static void store_rows(
      const float (*sums)[kColumns], int64_t num_rows, int64_t num_columns, int64_t stride,
      const Bf16* bias, Bf16* y) {
    for (int64_t row = 0; row < num_rows; ++row, y += stride) {
#pragma omp simd
      for (int64_t i = 0; i < num_columns; ++i)
        store(y[i], sums[row][i] + (bias ? load(bias[i]) : 0.0f));
    }
  }
};

}  // namespace promptq
#endif
