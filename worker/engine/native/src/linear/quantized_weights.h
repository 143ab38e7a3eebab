// Weights of 8 or 4 bits, and their products with rows of 8 bits. Rows are rounded chunk by chunk. A chunk's
// sums are exact integers in any order. They are scaled and added in fp32, in the order of the chunks:
//
//   y = sum over chunks of scale(x) * (scale(w) * sum of w x + offset(w) * sum of x)
//
// Without offsets, it is scale(w) * scale(x) * (sum of w x - 2^(bits - 1) * sum of x).
//
// Sums stay in fp32 here, so that models of all types share the compiled products.
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
#include "machine/tiles.h"
#include "machine/vectors.h"

namespace promptq {

// A chunk of a row: the scale of its integers, and their sum.
struct RoundedChunk {
  float scale;
  int32_t sum;
};

template <int Bits>
class QuantizedWeights {
  using Weights = IntegerWeights<Bits>;

 public:
  // The outputs of a tile, and the most rows that are multiplied together.
  static constexpr int64_t kColumns = 2 * kLanes, kRows = kRegisters / 2 - 2;
  // Chunks have at most this number of inputs: 4 bits are summed in 16.
  static constexpr int64_t kMostOfChunk = Bits == 4 ? 32 : 512;

  // Packs `weight` into tiles [steps, 2, kLanes columns], and a group's scales, then offsets, into kColumns
  // each.
  QuantizedWeights(const Matrix& weight, WeightMemory& memory)
      : inputs_(weight.columns), num_tiles_(ceil_div(weight.rows, kColumns)),
        group_(weight.num_groups() > 1 ? weight.group : round_up(weight.columns, kMostOfChunk)),
        chunk_(std::min(group_, kMostOfChunk)), padding_(std::min(chunk_, kPadding)),
        has_offsets_(weight.offsets != nullptr), group_scales_((has_offsets_ ? 2 : 1) * kColumns) {
    if (chunk_ % kChunk != 0 || group_ % chunk_ != 0 || kPadding % padding_ != 0 || chunk_ % padding_ != 0)
      throw std::invalid_argument(
          Bits == 4 ? "groups of weights of 4 bits have a multiple of 32 inputs"
                    : "groups of weights of 8 bits have 16, 32, or a multiple of 64 inputs; above 512, of 512");
    const int64_t row_bytes = weight.row_bytes(), num_groups = weight.num_groups();
    const int64_t size = num_tiles_ * num_steps() * kStep, num_scales = num_tiles_ * num_groups * group_scales_;
    uint8_t* numbers = std::fill_n(numbers_ = memory.reserve<uint8_t>(size), size, uint8_t(0)) - size;
    Scale* scales = std::fill_n(scales_ = memory.reserve<Scale>(num_scales), num_scales, Scale(0)) - num_scales;
    for (int64_t output = 0; output < weight.rows; ++output) {
      const auto* row = static_cast<const uint8_t*>(weight.numbers) + output * row_bytes;
      const int64_t tile = output / kColumns, column = output % kColumns;
      uint8_t* to = numbers + tile * num_steps() * kStep + column * kColumnBytes;
      for (int64_t step = 0; step < inputs_ / kInputs; ++step, row += kColumnBytes, to += kStep)
        Weights::pack(row, to);
      if (inputs_ % kInputs > 0) {
        uint8_t padded[kColumnBytes] = {};
        std::copy_n(row, ceil_div(inputs_ % kInputs * Bits, 8), padded);
        Weights::pack(padded, to);
      }
      Scale* its = scales + tile * num_groups * group_scales_ + column;
      for (int64_t g = 0; g < num_groups; ++g) {
        store(its[g * group_scales_], weight.scales[output * num_groups + g]);
        if (has_offsets_) store(its[g * group_scales_ + kColumns], weight.offsets[output * num_groups + g]);
      }
    }
  }

  int64_t num_tiles() const { return num_tiles_; }
  int64_t chunk() const { return chunk_; }
  int64_t num_chunks() const { return ceil_div(inputs_, chunk_); }
  int64_t num_inputs() const { return round_up(inputs_, padding_); }  // padded
  int64_t num_words() const { return num_steps() * Weights::kWords; }  // of a row

  // Lays out a chunk of a row in words [steps, rows, Weights::kWords]. `integers` has room for kMostOfChunk.
  void lay_out(
      int64_t chunk, int64_t count, int8_t* integers, int64_t row, int64_t rows, uint32_t* words) const {
    const int64_t first = chunk * chunk_, padded = round_up(count, padding_);
    std::fill(integers + count, integers + padded, int8_t(0));
    for (int64_t i = 0; i < padded; i += kInputs)
      Weights::lay_out(integers + i, words + ((first + i) / kInputs * rows + row) * Weights::kWords);
  }

  // Computes a tile's `sums` [rows, kColumns] for up to kRows rows: `words`, and `chunks` [chunks, rows].
  void multiply(
      const uint32_t* words, const RoundedChunk* chunks, int64_t rows, int64_t tile, float* sums) const {
    with_constant<kRows>(rows, [&](auto size) { multiply_rows<size()>(words, chunks, tile, sums); });
  }

#ifdef __AMX_INT8__
  static constexpr int64_t kBlock = 2 * kTileRows;  // the most rows of multiply_in_tiles()

  bool fits_tiles() const { return padding_ == kPadding && has_tiles(); }

  // Computes multiply() in tile registers, to the same bits, because the sums of chunks are exact. The rows
  // are `integers` [rows, num_inputs()], and their chunks are [rows, chunks].
  void multiply_in_tiles(
      const int8_t* integers, const RoundedChunk* chunks, int64_t rows, int64_t tile, float* sums) const {
    const int64_t num_groups = ceil_div(inputs_, group_);
    const uint8_t* weights = numbers_ + tile * num_steps() * kStep;
    const Scale* scales = scales_ + tile * num_groups * group_scales_;
    Pair results[kBlock] = {};
    for (int64_t chunk = 0, first = 0; first < inputs_; ++chunk, first += chunk_) {
      alignas(64) int32_t products[kBlock][kColumns];
      const int64_t num_tiles = (std::min(first + chunk_, num_inputs()) - first) / kPadding;
      const uint8_t* columns = weights + first / kInputs * kStep;
      if (rows > kTileRows)
        multiply_chunk<2>(integers + first, columns, num_tiles, products);
      else
        multiply_chunk<1>(integers + first, columns, num_tiles, products);
      const Scale* its = scales + first / group_ * group_scales_;
      const Pair scale = widen(its), offset = has_offsets_ ? widen(its + kColumns) : Pair{};
      for (int64_t row = 0; row < rows; ++row) {
        const RoundedChunk& its_chunk = chunks[row * num_chunks() + chunk];
        const Integers left = load_as<Integers>(products[row]);
        const Integers right = load_as<Integers>(products[row] + kLanes);
        if (has_offsets_)
          add_chunk(results[row], scale, offset, its_chunk, left, right);
        else
          add_chunk(results[row], scale, its_chunk, left, right);
      }
    }
    for (int64_t row = 0; row < rows; ++row) store_pair(sums + row * kColumns, results[row]);
  }
#endif

 private:
  // In fp32, the scales of 4 bits would be a fifth of the bytes that are read.
  using Scale = std::conditional_t<Bits == 4, Fp16, float>;
  static constexpr int64_t kInputs = Weights::kInputs, kWords = Weights::kWords, kStep = 2 * Weights::kBytes;
  // A column's bytes of a step.
  static constexpr int64_t kColumnBytes = kStep / kColumns;
  // Chunks have a multiple of this number of inputs.
  static constexpr int64_t kChunk = Bits == 4 ? 32 : 16;
  // Inputs are padded to a multiple of this number, which tile registers need, or of a chunk.
  static constexpr int64_t kPadding = 64;

  // Weights are read ahead by this number of bytes. The processor's prefetching alone is not enough.
  static constexpr int64_t kAhead = 2048;

  int64_t num_steps() const { return num_inputs() / kInputs; }

  template <int Rows>
  void multiply_rows(const uint32_t* words, const RoundedChunk* chunks, int64_t tile, float* sums) const {
    const int64_t num_groups = ceil_div(inputs_, group_);
    const uint8_t* weights = numbers_ + tile * num_steps() * kStep;
    const Scale* scales = scales_ + tile * num_groups * group_scales_;
    Pair results[Rows] = {};
    for (int64_t first = 0; first < inputs_; first += chunk_, chunks += Rows) {
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
              results[row()], scale, offset, chunks[row()], Weights::total(a[row()]),
              Weights::total(b[row()]));
        });
      } else {
        each<Rows>([&](auto row) __attribute__((always_inline)) {
          add_chunk(results[row()], scale, chunks[row()], Weights::total(a[row()]), Weights::total(b[row()]));
        });
      }
    }
    each<Rows>([&](auto row) __attribute__((always_inline)) {
      store_pair(sums + row() * kColumns, results[row()]);
    });
  }

  // results += the sums of a chunk, scaled
  [[gnu::always_inline]] static void add_chunk(
      Pair& results, const Pair& scale, const RoundedChunk& chunk, const Integers& a, const Integers& b) {
    const int32_t surplus = chunk.sum * (1 << (Bits - 1));
    results.a += scale.a * chunk.scale * as_floats(a - surplus);
    results.b += scale.b * chunk.scale * as_floats(b - surplus);
  }

  [[gnu::always_inline]] static void add_chunk(
      Pair& results, const Pair& scale, const Pair& offset, const RoundedChunk& chunk, const Integers& a,
      const Integers& b) {
    const float sum = static_cast<float>(chunk.sum);
    results.a += chunk.scale * (scale.a * as_floats(a) + offset.a * sum);
    results.b += chunk.scale * (scale.b * as_floats(b) + offset.b * sum);
  }

#ifdef __AMX_INT8__
  // products = a chunk of one tile or two of rows, times one of the weights
  template <int RowTiles>
  void multiply_chunk(
      const int8_t* rows, const uint8_t* weights, int64_t num_tiles, int32_t (*products)[kColumns]) const {
    TileProducts::add<RowTiles, 2, true, TileNumbers::kBytes>(
        num_tiles,
        [&](int64_t step, int64_t i) {
          return TilePlace{rows + i * kTileRows * num_inputs() + step * kPadding, num_inputs()};
        },
        [&](int64_t step, int64_t j) {
          return TilePlace{weights + step * kTileRows * kStep + j * kStep / 2, kStep};
        },
        [&](int64_t i, int64_t j) { return products[i * kTileRows] + j * kTileRows; },
        kColumns * sizeof(int32_t));
  }
#endif

  const int64_t inputs_, num_tiles_, group_, chunk_, padding_;
  const bool has_offsets_;
  const int64_t group_scales_;  // how many scales and offsets a group has in a tile
  uint8_t* numbers_;
  Scale* scales_;
};

}  // namespace promptq
