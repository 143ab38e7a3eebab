// Convolutions of each channel over the last positions of a sequence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention/work_pieces.h"
#include "machine/elements.h"
#include "machine/team.h"

namespace promptq {

// `weight` is [size, num_channels], `bias` [num_channels] or null. `windows` [entries, size - 1,
// num_channels], in the model's numbers, are the inputs before the next one.
struct Convolution {
  const float *weight, *bias;
  int64_t num_channels, size;
  void* windows;
};

// The state entries before and after the step of its sequences, [num_sequences] each, and how many of their
// last rows are drafted. The state after a step does not include drafted rows.
struct StateEntries {
  const int64_t *read, *written, *num_drafted;
};

// The rows of one sequence in a step, and its entries of states.
struct Chunk {
  int64_t first, count, num_known, read, written;
};

// The chunks of a step, and the chunk of each row.
struct Chunks {
  Chunks(const Layout& layout, const StateEntries& entries) {
    for (int64_t i = 0; i < layout.num_sequences; ++i) {
      const int64_t first = layout.query_starts[i], count = layout.query_starts[i + 1] - first;
      all.push_back({first, count, count - entries.num_drafted[i], entries.read[i], entries.written[i]});
      of_row.insert(of_row.end(), count, i);
    }
  }

  const Chunk& of(int64_t row) const { return all[of_row[row]]; }

  std::vector<Chunk> all;
  std::vector<int64_t> of_row;
};

// The inputs [T, num_channels] of a step's convolution, `stride` numbers apart.
template <typename T>
class ConvolutionInputs {
 public:
  ConvolutionInputs(const Convolution& convolution, const T* inputs, int64_t stride)
      : convolution_(convolution), inputs_(inputs), stride_(stride) {}

  // Computes a row [num_channels] in fp32. Each sum goes through the positions in order.
  void convolve(const Chunk& chunk, int64_t row, float* out) const {
    const int64_t size = convolution_.num_channels;
    if (convolution_.bias)
      std::copy_n(convolution_.bias, size, out);
    else
      std::fill_n(out, size, 0.0f);
    for (int64_t i = 0; i < convolution_.size; ++i) {
      const T* input = at(chunk, row - chunk.first + 1 + i - convolution_.size);
      const float* weight = convolution_.weight + i * size;
#pragma omp simd
      for (int64_t d = 0; d < size; ++d) out[d] += weight[d] * load(input[d]);
    }
  }

  // Writes the window after the known rows of a chunk.
  void write_window(const Chunk& chunk) const {
    const int64_t count = convolution_.size - 1, size = convolution_.num_channels;
    T* window = static_cast<T*>(convolution_.windows) + chunk.written * count * size;
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(at(chunk, chunk.num_known + i - count), size, window + i * size);
  }

 private:
  // The input at a place of the chunk. Earlier inputs are in the window before the step.
  const T* at(const Chunk& chunk, int64_t place) const {
    if (place >= 0) return inputs_ + (chunk.first + place) * stride_;
    const int64_t count = convolution_.size - 1;
    const T* windows = static_cast<const T*>(convolution_.windows);
    return windows + ((chunk.read + 1) * count + place) * convolution_.num_channels;
  }

  const Convolution& convolution_;
  const T* inputs_;
  int64_t stride_;
};

constexpr int64_t kRowsOfItem = 8;

// One phase: calls work(row) for each row of a step, and writes the windows after it.
template <typename T, typename Work>
void share_rows(
    Team& team, const Chunks& chunks, const ConvolutionInputs<T>& inputs, const Work& work) {
  const int64_t num_rows = chunks.of_row.size(), num_chunks = chunks.all.size();
  const int64_t num_items = ceil_div(num_rows, kRowsOfItem);
  team.share(num_items + num_chunks, [&](int64_t item) {
    if (item >= num_items) return inputs.write_window(chunks.all[item - num_items]);
    for (int64_t row = item * kRowsOfItem; row < std::min((item + 1) * kRowsOfItem, num_rows); ++row)
      work(row);
  });
}

}  // namespace promptq
