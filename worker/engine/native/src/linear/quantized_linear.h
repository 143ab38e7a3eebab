// Products with weights of 8 or 4 bits.
//
// Rows are rounded to 8 bits, chunk by chunk. A chunk's sums are exact integers in any order. They are
// scaled and added in fp32, in the order of the chunks:
//
//   y = sum over chunks of scale(x) * (scale(w) * sum of w x + offset(w) * sum of x)
//
// Without offsets, it is scale(w) * scale(x) * (sum of w x - 2^(bits - 1) * sum of x).
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "linear/packed.h"
#include "linear/row_groups.h"
#include "machine/buffer.h"
#include "machine/elements.h"
#include "machine/integers.h"
#include "machine/rounding.h"
#include "machine/tiles.h"
#include "machine/vectors.h"

namespace promptq {

template <typename T, int Bits>
class QuantizedLinear : public Packed<T> {
 public:
  // Packs `weight` into tiles [steps, 2, kLanes columns], and scales into [groups, kColumns]. A group's
  // offsets follow its scales.
  QuantizedLinear(const Matrix& weight, WeightMemory& memory)
      : Packed<T>(weight.rows, weight.columns),
        group_(weight.num_groups() > 1 ? weight.group : round_up(weight.columns, kMostOfChunk)),
        chunk_(std::min(group_, kMostOfChunk)), padding_(std::min(chunk_, kPadding)),
        has_offsets_(weight.offsets != nullptr), group_scales_((has_offsets_ ? 2 : 1) * kColumns) {
    if (chunk_ % kChunk != 0 || group_ % chunk_ != 0 || kPadding % padding_ != 0 || chunk_ % padding_ != 0)
      throw std::invalid_argument(
          Bits == 4 ? "groups of weights of 4 bits have a multiple of 32 inputs"
                    : "groups of weights of 8 bits have 16, 32, or a multiple of 64 inputs; above 512, of 512");
    const int64_t outputs = weight.rows, inputs = weight.columns, row_bytes = weight.row_bytes();
    const int64_t num_tiles = ceil_div(outputs, kColumns), num_groups = weight.num_groups();
    const int64_t size = num_tiles * num_steps() * kStep, num_scales = num_tiles * num_groups * group_scales_;
    uint8_t* numbers = std::fill_n(numbers_ = memory.reserve<uint8_t>(size), size, uint8_t(0)) - size;
    Scale* scales = std::fill_n(scales_ = memory.reserve<Scale>(num_scales), num_scales, Scale(0)) - num_scales;
    for (int64_t output = 0; output < outputs; ++output) {
      const auto* row = static_cast<const uint8_t*>(weight.numbers) + output * row_bytes;
      const int64_t tile = output / kColumns, column = output % kColumns;
      uint8_t* to = numbers + tile * num_steps() * kStep + column * kColumnBytes;
      for (int64_t step = 0; step < inputs / kInputs; ++step, row += kColumnBytes, to += kStep)
        Weights::pack(row, to);
      if (inputs % kInputs > 0) {
        uint8_t padded[kColumnBytes] = {};
        std::copy_n(row, ceil_div(inputs % kInputs * Bits, 8), padded);
        Weights::pack(padded, to);
      }
      Scale* its = scales + tile * num_groups * group_scales_ + column;
      for (int64_t g = 0; g < num_groups; ++g) {
        store(its[g * group_scales_], weight.scales[output * num_groups + g]);
        if (has_offsets_) store(its[g * group_scales_ + kColumns], weight.offsets[output * num_groups + g]);
      }
    }
  }

  void multiply(const T* x, int64_t rows, const T* bias, T* y, int64_t stride) const override {
#ifdef __AMX_INT8__
    if constexpr (Bits == 8)
      if (rows >= kTileRows && padding_ == kPadding && has_tiles())
        return multiply_in_tiles(x, rows, bias, y, stride);
#endif
    thread_local Buffer<uint32_t> words;
    thread_local Buffer<Rounded> rounded;
    const Inputs inputs{words.reserve(rows * num_steps() * kWords), rounded.reserve(rows * num_chunks())};
    for_groups<kRows>(rows, [&](auto group, int64_t row) {
      round_rows<group()>(x + row * this->inputs(), inputs.at(*this, row));
    });
    for (int64_t tile = 0; tile < ceil_div(this->outputs(), kColumns); ++tile)
      for_groups<kRows>(rows, [&](auto group, int64_t row) {
        multiply_tile<group()>(inputs.at(*this, row), tile, bias, y + row * stride, stride);
      });
  }

 private:
  using Weights = IntegerWeights<Bits>;
  // In fp32, the scales of 4 bits would be a fifth of the bytes that are read.
  using Scale = std::conditional_t<Bits == 4, Fp16, float>;
  static constexpr int64_t kInputs = Weights::kInputs, kWords = Weights::kWords;
  static constexpr int64_t kColumns = 2 * kLanes, kStep = 2 * Weights::kBytes;
  // A column's bytes of a step.
  static constexpr int64_t kColumnBytes = kStep / kColumns;
  static constexpr int64_t kRows = kRegisters / 2 - 2;
  // Chunks have a multiple of kChunk inputs, and at most kMostOfChunk: 4 bits are summed in 16.
  static constexpr int64_t kChunk = Bits == 4 ? 32 : 16, kMostOfChunk = Bits == 4 ? 32 : 512;
  // Inputs are padded to a multiple of this number, which tile registers need, or of a chunk.
  static constexpr int64_t kPadding = 64;

  // Weights are read ahead by this number of bytes. The processor's prefetching alone is not enough.
  static constexpr int64_t kAhead = 2048;

  // A chunk of a row: the scale of its integers, and their sum.
  struct Rounded {
    float scale;
    int32_t sum;
  };

  // Rows side by side in their groups: [steps, group, kWords], and [chunks, group].
  struct Inputs {
    uint32_t* words;
    Rounded* chunks;

    Inputs at(const QuantizedLinear& linear, int64_t row) const {
      return {words + row * linear.num_steps() * kWords, chunks + row * linear.num_chunks()};
    }
  };

  int64_t num_chunks() const { return ceil_div(this->inputs(), chunk_); }
  int64_t num_inputs() const { return round_up(this->inputs(), padding_); }
  int64_t num_steps() const { return num_inputs() / kInputs; }

  template <int Rows>
  void round_rows(const T* x, const Inputs& to) const {
    for (int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
      const int64_t first = chunk * chunk_, count = std::min(chunk_, this->inputs() - first);
      const int64_t padded = round_up(count, padding_);
      for (int64_t row = 0; row < Rows; ++row) {
        alignas(64) int8_t integers[kMostOfChunk];
        to.chunks[chunk * Rows + row] = round_chunk(x + row * this->inputs() + first, count, integers);
        std::fill(integers + count, integers + padded, int8_t(0));
        for (int64_t i = 0; i < padded; i += kInputs)
          Weights::lay_out(integers + i, to.words + ((first + i) / kInputs * Rows + row) * kWords);
      }
    }
  }

  // A number that is not finite makes the scale infinite or NaN, and with it the row's results.
  static Rounded round_chunk(const T* x, int64_t count, int8_t* integers) {
    const float most = largest_magnitude(x, count);
    round_to_int8(x, count, most > 0.0f ? 127.0f / most : 0.0f, integers);
    int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += integers[i];
    return {most / 127.0f, sum};
  }

  template <int Rows>
  void multiply_tile(const Inputs& inputs, int64_t tile, const T* bias, T* y, int64_t stride) const {
    const int64_t num_groups = ceil_div(this->inputs(), group_);
    const uint8_t* weights = numbers_ + tile * num_steps() * kStep;
    const Scale* scales = scales_ + tile * num_groups * group_scales_;
    const uint32_t* words = inputs.words;
    const Rounded* rounded = inputs.chunks;
    Pair results[Rows] = {};
    for (int64_t chunk = 0, first = 0; first < this->inputs(); ++chunk, first += chunk_, rounded += Rows) {
      const int64_t last = std::min(first + chunk_, num_inputs());
      Integers a[Rows] = {}, b[Rows] = {};
      for (int64_t i = first; i < last; i += kInputs, weights += kStep, words += Rows * kWords) {
        for (int64_t line = 0; line < kStep; line += kCacheLine) __builtin_prefetch(weights + kAhead + line);
        const Weights left(weights), right(weights + kStep / 2);
        each<Rows>([&](auto row) __attribute__((always_inline)) {
          left.add_to(a[row()], words + row() * kWords);
          right.add_to(b[row()], words + row() * kWords);
        });
      }
      const Scale* its = scales + first / group_ * group_scales_;
      const Pair scale = widen(its);
      if (has_offsets_) {
        const Pair offset = widen(its + kColumns);
        each<Rows>([&](auto row) __attribute__((always_inline)) {
          add_chunk(
              results[row()], scale, offset, rounded[row()], Weights::total(a[row()]),
              Weights::total(b[row()]));
        });
      } else {
        each<Rows>([&](auto row) __attribute__((always_inline)) {
          add_chunk(results[row()], scale, rounded[row()], Weights::total(a[row()]), Weights::total(b[row()]));
        });
      }
    }
    for (int64_t row = 0; row < Rows; ++row) store_row(results[row], tile, bias, y + row * stride);
  }

  // results += the sums of a chunk, scaled
  [[gnu::always_inline]] static void add_chunk(
      Pair& results, const Pair& scale, const Rounded& rounded, const Integers& a, const Integers& b) {
    const int32_t surplus = rounded.sum * (1 << (Bits - 1));
    results.a += scale.a * rounded.scale * as_floats(a - surplus);
    results.b += scale.b * rounded.scale * as_floats(b - surplus);
  }

  [[gnu::always_inline]] static void add_chunk(
      Pair& results, const Pair& scale, const Pair& offset, const Rounded& rounded, const Integers& a,
      const Integers& b) {
    const float sum = static_cast<float>(rounded.sum);
    results.a += rounded.scale * (scale.a * as_floats(a) + offset.a * sum);
    results.b += rounded.scale * (scale.b * as_floats(b) + offset.b * sum);
  }

  void store_row(const Pair& results, int64_t tile, const T* bias, T* y) const {
    const int64_t first = tile * kColumns, count = std::min(kColumns, this->outputs() - first);
    float numbers[kColumns];
    store_pair(numbers, results);
    for (int64_t i = 0; i < count; ++i)
      store(y[first + i], numbers[i] + (bias ? load(bias[first + i]) : 0.0f));
  }

#ifdef __AMX_INT8__
  // Computes multiply() in tile registers, to the same bits, because the sums of chunks are exact.
  void multiply_in_tiles(const T* x, int64_t rows, const T* bias, T* y, int64_t stride) const {
    constexpr int64_t kBlock = 2 * kTileRows;  // rows of a block
    const int64_t inputs = this->inputs(), num_groups = ceil_div(inputs, group_);
    thread_local Buffer<int8_t> memory;
    thread_local Buffer<Rounded> rounded;
    int8_t* integers = memory.reserve(rows * num_inputs());
    Rounded* chunks = rounded.reserve(rows * num_chunks());
    for (int64_t row = 0; row < rows; ++row) {
      int8_t* to = integers + row * num_inputs();
      for (int64_t chunk = 0, first = 0; first < inputs; ++chunk, first += chunk_)
        chunks[row * num_chunks() + chunk] =
            round_chunk(x + row * inputs + first, std::min(chunk_, inputs - first), to + first);
      std::fill(to + inputs, to + num_inputs(), int8_t(0));
    }
    TileProducts products;
    int64_t configured = 0;
    for (int64_t tile = 0; tile < ceil_div(this->outputs(), kColumns); ++tile) {
      const uint8_t* weights = numbers_ + tile * num_steps() * kStep;
      const Scale* scales = scales_ + tile * num_groups * group_scales_;
      for (int64_t block = 0; block < rows; block += kBlock) {
        const int64_t num_rows = std::min(kBlock, rows - block);
        if (num_rows != configured) {
          products.configure(std::min(kTileRows, num_rows), num_rows - kTileRows, kTileRows);
          configured = num_rows;
        }
        Pair results[kBlock] = {};
        for (int64_t chunk = 0, first = 0; first < inputs; ++chunk, first += chunk_) {
          alignas(64) int32_t sums[kBlock][kColumns];
          const int64_t num_tiles = (std::min(first + chunk_, num_inputs()) - first) / kPadding;
          const int8_t* from = integers + block * num_inputs() + first;
          const uint8_t* columns = weights + first / kInputs * kStep;
          if (num_rows > kTileRows)
            multiply_chunk<2>(from, columns, num_tiles, sums);
          else
            multiply_chunk<1>(from, columns, num_tiles, sums);
          const Scale* its = scales + first / group_ * group_scales_;
          const Pair scale = widen(its), offset = has_offsets_ ? widen(its + kColumns) : Pair{};
          for (int64_t row = 0; row < num_rows; ++row) {
            const Rounded& its_chunk = chunks[(block + row) * num_chunks() + chunk];
            const Integers left = load_as<Integers>(sums[row]), right = load_as<Integers>(sums[row] + kLanes);
            if (has_offsets_)
              add_chunk(results[row], scale, offset, its_chunk, left, right);
            else
              add_chunk(results[row], scale, its_chunk, left, right);
          }
        }
        for (int64_t row = 0; row < num_rows; ++row)
          store_row(results[row], tile, bias, y + (block + row) * stride);
      }
    }
  }

  // sums = a chunk of one tile or two of rows, times one of the weights
  template <int RowTiles>
  void multiply_chunk(
      const int8_t* rows, const uint8_t* weights, int64_t num_tiles, int32_t (*sums)[kColumns]) const {
    TileProducts::add<RowTiles, 2, true, TileNumbers::kBytes>(
        num_tiles,
        [&](int64_t step, int64_t i) {
          return TilePlace{rows + i * kTileRows * num_inputs() + step * kPadding, num_inputs()};
        },
        [&](int64_t step, int64_t j) {
          return TilePlace{weights + step * kTileRows * kStep + j * kStep / 2, kStep};
        },
        [&](int64_t i, int64_t j) { return sums[i * kTileRows] + j * kTileRows; },
        kColumns * sizeof(int32_t));
  }
#endif

  const int64_t group_, chunk_, padding_;
  const bool has_offsets_;
  const int64_t group_scales_;  // how many scales and offsets a group has in a tile
  uint8_t* numbers_;
  Scale* scales_;
};

}  // namespace promptq
