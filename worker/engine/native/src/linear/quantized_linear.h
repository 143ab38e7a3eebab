// Products with weights of 8 or 4 bits.
//
// A row is rounded to 8 bits, chunk by chunk. A chunk's sums are exact integers, whatever their order. They
// are scaled and added in fp32, in the order of the chunks:
//
//   y = sum over chunks of scale(w) * scale(x) * (sum of w x - 2^(bits - 1) * sum of x)
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "linear/packed.h"
#include "linear/row_groups.h"
#include "machine/buffer.h"
#include "machine/elements.h"
#include "machine/integers.h"
#include "machine/vectors.h"

namespace promptq {

template <typename T, int Bits>
class QuantizedLinear : public Packed<T> {
 public:
  // Packs `weight` into tiles [steps, 2, kLanes columns], and their scales into [groups, kColumns].
  QuantizedLinear(const Matrix& weight, WeightMemory& memory)
      : Packed<T>(weight.rows, weight.columns),
        group_(weight.num_groups() > 1 ? weight.group : round_up(weight.columns, kMostOfChunk)),
        chunk_(std::min(group_, kMostOfChunk)) {
    if (chunk_ % kChunk != 0 || group_ % chunk_ != 0)
      throw std::invalid_argument("groups of weights have 32, 64, 128, 256 or a multiple of 512 inputs");
    const int64_t outputs = weight.rows, inputs = weight.columns, row_bytes = weight.row_bytes();
    const int64_t num_tiles = ceil_div(outputs, kColumns), num_groups = weight.num_groups();
    const int64_t size = num_tiles * num_steps() * kStep, num_scales = num_tiles * num_groups * kColumns;
    uint8_t* numbers = std::fill_n(numbers_ = memory.reserve<uint8_t>(size), size, uint8_t(0)) - size;
    Scale* scales = std::fill_n(scales_ = memory.reserve<Scale>(num_scales), num_scales, Scale(0)) - num_scales;
    for (int64_t output = 0; output < outputs; ++output) {
      const auto* row = static_cast<const uint8_t*>(weight.numbers) + output * row_bytes;
      const int64_t tile = output / kColumns, column = output % kColumns;
      uint8_t* to = numbers + tile * num_steps() * kStep + column / kLanes * Weights::kBytes;
      for (int64_t i = 0; i < inputs; ++i) {
        uint8_t& byte = to[i / kInputs * kStep + Weights::byte_of(column % kLanes, i % kInputs)];
        if constexpr (Bits == 8)
          byte = row[i];
        else
          byte |= (row[i / 2] >> i % 2 * 4 & 15) << i % kInputs / 4 * 4;
      }
      Scale* its = scales + tile * num_groups * kColumns + place_of(column);
      for (int64_t g = 0; g < num_groups; ++g)
        store(its[g * kColumns], weight.scales[output * num_groups + g]);
    }
  }

  void multiply(const T* x, int64_t rows, const T* bias, T* y) const override {
    thread_local Buffer<uint32_t> words;
    thread_local Buffer<Rounded> rounded;
    const Inputs inputs{words.reserve(rows * num_steps() * kWords), rounded.reserve(rows * num_chunks())};
    for_groups<kRows>(rows, [&](auto group, int64_t row) {
      round_rows<group()>(x + row * this->inputs(), inputs.at(*this, row));
    });
    for (int64_t tile = 0; tile < ceil_div(this->outputs(), kColumns); ++tile)
      for_groups<kRows>(rows, [&](auto group, int64_t row) {
        multiply_tile<group()>(inputs.at(*this, row), tile, bias, y + row * this->outputs());
      });
  }

 private:
  using Weights = IntegerWeights<Bits>;
  // Scales of 4 bits would be a fifth of what is read in fp32.
  using Scale = std::conditional_t<Bits == 4, Bf16, float>;
  static constexpr int64_t kInputs = Weights::kInputs, kWords = Weights::kWords;
  static constexpr int64_t kColumns = 2 * kLanes, kStep = 2 * Weights::kBytes;
  static constexpr int64_t kRows = kRegisters / 2 - 2;
  // Chunks have a multiple of so many inputs, and at most so many: 4 bits are summed in 16.
  static constexpr int64_t kChunk = 32, kMostOfChunk = Bits == 4 ? 32 : 512;

  // Weights are read ahead by so many bytes. What the processor reads ahead by itself is not enough.
  static constexpr int64_t kAhead = 2048;

  // A chunk of a row: what its integers are multiplied with, and their sum times 2^(bits - 1).
  struct Rounded {
    float scale;
    int32_t surplus;
  };

  // Rows side by side in their groups: [steps, group, kWords], and [chunks, group].
  struct Inputs {
    uint32_t* words;
    Rounded* chunks;

    Inputs at(const QuantizedLinear& linear, int64_t row) const {
      return {words + row * linear.num_steps() * kWords, chunks + row * linear.num_chunks()};
    }
  };

  static int64_t place_of(int64_t column) { return widened_from<Scale>(column); }

  int64_t num_chunks() const { return ceil_div(this->inputs(), chunk_); }
  int64_t num_steps() const { return round_up(this->inputs(), kChunk) / kInputs; }

  template <int Rows>
  void round_rows(const T* x, const Inputs& to) const {
    for (int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
      const int64_t first = chunk * chunk_, count = std::min(chunk_, this->inputs() - first);
      const int64_t padded = round_up(count, kChunk);
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
    int32_t most_bits = 0;
#pragma omp simd reduction(max : most_bits)
    for (int64_t i = 0; i < count; ++i) most_bits = std::max(most_bits, magnitude(load(x[i])));
    float most;
    std::memcpy(&most, &most_bits, sizeof most);
    const float factor = most > 0.0f ? 127.0f / most : 0.0f;
    int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) {
      const float rounded = std::nearbyint(load(x[i]) * factor);
      const int32_t integer = static_cast<int32_t>(std::min(std::max(-127.0f, rounded), 127.0f));
      integers[i] = static_cast<int8_t>(integer);
      sum += integer;
    }
    return {most / 127.0f, sum * (1 << (Bits - 1))};
  }

  template <int Rows>
  void multiply_tile(const Inputs& inputs, int64_t tile, const T* bias, T* y) const {
    const int64_t num_groups = ceil_div(this->inputs(), group_);
    const uint8_t* weights = numbers_ + tile * num_steps() * kStep;
    const Scale* scales = scales_ + tile * num_groups * kColumns;
    const uint32_t* words = inputs.words;
    const Rounded* rounded = inputs.chunks;
    Pair results[Rows] = {};
    for (int64_t chunk = 0, first = 0; first < this->inputs(); ++chunk, first += chunk_, rounded += Rows) {
      const int64_t last = round_up(std::min(first + chunk_, this->inputs()), kChunk);
      Integers a[Rows] = {}, b[Rows] = {};
      for (int64_t i = first; i < last; i += kInputs, weights += kStep, words += Rows * kWords) {
        for (int64_t line = 0; line < kStep; line += kCacheLine) __builtin_prefetch(weights + kAhead + line);
        const Weights left(weights), right(weights + kStep / 2);
        each<Rows>([&](auto row) __attribute__((always_inline)) {
          left.add_to(a[row()], words + row() * kWords);
          right.add_to(b[row()], words + row() * kWords);
        });
      }
      const Pair scale = widen(scales + first / group_ * kColumns);
      each<Rows>([&](auto row) __attribute__((always_inline)) {
        const auto& [factor, surplus] = rounded[row()];
        results[row()].a += scale.a * factor * as_floats(Weights::total(a[row()]) - surplus);
        results[row()].b += scale.b * factor * as_floats(Weights::total(b[row()]) - surplus);
      });
    }
    const int64_t first = tile * kColumns, count = std::min(kColumns, this->outputs() - first);
    for (int64_t row = 0; row < Rows; ++row) {
      float numbers[kColumns];
      store_pair(numbers, results[row]);
      T* to = y + row * this->outputs() + first;
      for (int64_t i = 0; i < count; ++i)
        store(to[i], numbers[i] + (bias ? load(bias[first + i]) : 0.0f));
    }
  }

  const int64_t group_, chunk_;
  uint8_t* numbers_;
  Scale* scales_;
};

}  // namespace promptq
