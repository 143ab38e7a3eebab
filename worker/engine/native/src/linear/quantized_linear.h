// Products of rows of a model's type with quantized weights: rounds the rows, and the results.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear/packed.h"
#include "linear/quantized_weights.h"
#include "linear/row_groups.h"
#include "machine/buffer.h"
#include "machine/elements.h"
#include "machine/rounding.h"
#include "machine/tiles.h"

namespace promptq {

template <typename T, int Bits>
class QuantizedLinear : public Packed<T> {
 public:
  QuantizedLinear(const Matrix& weight, WeightMemory& memory)
      : Packed<T>(weight.rows, weight.columns), weights_(weight, memory) {}

  void multiply(const T* x, int64_t rows, const T* bias, T* y, int64_t stride) const override {
#ifdef __AMX_INT8__
    if constexpr (Bits == 8)
      if (rows >= kTileRows && weights_.fits_tiles()) return multiply_in_tiles(x, rows, bias, y, stride);
#endif
    thread_local Buffer<uint32_t> word_memory;
    thread_local Buffer<RoundedChunk> chunk_memory;
    uint32_t* words = word_memory.reserve(rows * weights_.num_words());
    RoundedChunk* chunks = chunk_memory.reserve(rows * weights_.num_chunks());
    over_groups(rows, kRows, [&](int64_t row, int64_t group) {
      round_group(
          x + row * this->inputs(), group, words + row * weights_.num_words(),
          chunks + row * weights_.num_chunks());
    });
    for (int64_t tile = 0; tile < weights_.num_tiles(); ++tile)
      over_groups(rows, kRows, [&](int64_t row, int64_t group) {
        alignas(64) float sums[kRows * kColumns];
        weights_.multiply(
            words + row * weights_.num_words(), chunks + row * weights_.num_chunks(), group, tile, sums);
        store_rows(sums, group, tile, bias, y + row * stride, stride);
      });
  }

 private:
  static constexpr int64_t kRows = QuantizedWeights<Bits>::kRows, kColumns = QuantizedWeights<Bits>::kColumns;
  static constexpr int64_t kMostOfChunk = QuantizedWeights<Bits>::kMostOfChunk;

  // Calls use(chunk, its first input, its number of inputs) for each chunk.
  template <typename Use>
  void over_chunks(const Use& use) const {
    for (int64_t chunk = 0, first = 0; first < this->inputs(); ++chunk, first += weights_.chunk())
      use(chunk, first, std::min(weights_.chunk(), this->inputs() - first));
  }

  // Rounds rows that are multiplied together, chunk by chunk.
  void round_group(const T* x, int64_t rows, uint32_t* words, RoundedChunk* chunks) const {
    over_chunks([&](int64_t chunk, int64_t first, int64_t count) {
      for (int64_t row = 0; row < rows; ++row) {
        alignas(64) int8_t integers[kMostOfChunk];
        chunks[chunk * rows + row] = round_chunk(x + row * this->inputs() + first, count, integers);
        weights_.lay_out(chunk, count, integers, row, rows, words);
      }
    });
  }

  // A number that is not finite makes the scale infinite or NaN, and with it the row's results.
  static RoundedChunk round_chunk(const T* x, int64_t count, int8_t* integers) {
    const float most = largest_magnitude(x, count);
    round_to_int8(x, count, most > 0.0f ? 127.0f / most : 0.0f, integers);
    int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += integers[i];
    return {most / 127.0f, sum};
  }

  // y = sums + bias
  void store_rows(const float* sums, int64_t rows, int64_t tile, const T* bias, T* y, int64_t stride) const {
    const int64_t first = tile * kColumns, count = std::min(kColumns, this->outputs() - first);
    for (int64_t row = 0; row < rows; ++row, sums += kColumns, y += stride)
      for (int64_t i = 0; i < count; ++i)
        store(y[first + i], sums[i] + (bias ? load(bias[first + i]) : 0.0f));
  }

#ifdef __AMX_INT8__
  void multiply_in_tiles(const T* x, int64_t rows, const T* bias, T* y, int64_t stride) const {
    constexpr int64_t kBlock = QuantizedWeights<Bits>::kBlock;
    const int64_t num_inputs = weights_.num_inputs(), num_chunks = weights_.num_chunks();
    thread_local Buffer<int8_t> integer_memory;
    thread_local Buffer<RoundedChunk> chunk_memory;
    int8_t* integers = integer_memory.reserve(rows * num_inputs);
    RoundedChunk* chunks = chunk_memory.reserve(rows * num_chunks);
    for (int64_t row = 0; row < rows; ++row) {
      int8_t* to = integers + row * num_inputs;
      over_chunks([&](int64_t chunk, int64_t first, int64_t count) {
        chunks[row * num_chunks + chunk] = round_chunk(x + row * this->inputs() + first, count, to + first);
      });
      std::fill(to + this->inputs(), to + num_inputs, int8_t(0));
    }
    TileProducts products;
    int64_t configured = 0;
    for (int64_t tile = 0; tile < weights_.num_tiles(); ++tile)
      for (int64_t block = 0; block < rows; block += kBlock) {
        const int64_t num_rows = std::min(kBlock, rows - block);
        if (num_rows != configured) {
          products.configure(std::min(kTileRows, num_rows), num_rows - kTileRows, kTileRows);
          configured = num_rows;
        }
        alignas(64) float sums[kBlock * kColumns];
        weights_.multiply_in_tiles(
            integers + block * num_inputs, chunks + block * num_chunks, num_rows, tile, sums);
        store_rows(sums, num_rows, tile, bias, y + block * stride, stride);
      }
  }
#endif

  const QuantizedWeights<Bits> weights_;
};

}  // namespace promptq
