// A gated linear recurrence (layers/scan.h) with its projections, a convolution of queries, keys and values,
// their rates, and a gated norm. Gated DeltaNet and Mamba 2 are of this kind.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "interface.h"
#include "layers/activation.h"
#include "layers/convolution.h"
#include "layers/scan.h"
#include "linear/linear.h"

namespace promptq {

// Memory that the layers of a step share.
template <typename T>
struct RecurrenceMemory {
  Buffer<T> projected;               // [T, width()]
  Buffer<float> query, key, value;   // [heads, T, stride]
  Buffer<float> decay, rate;         // [value heads, T]
  Buffer<float> scratch;             // [threads, scratch_size()]
};

template <typename T>
class Recurrence {
 public:
  Recurrence(const RecurrenceWeights& weights, int64_t size, int num_threads, WeightMemory* memory)
      : weights_(weights), num_threads_(num_threads), key_stride_(round_up(weights.key_size, kKeysAtOnce)),
        value_stride_(round_up(weights.value_size, kSpan)),
        inputs_(
            width(), one_after_another(projections(weights, size)),
            static_cast<const T*>(weights.input_bias), kGranule, num_threads, memory),
        output_(
            size, side_by_side({matrix(weights.output, size, mixed_size())}),
            static_cast<const T*>(weights.output_bias), kGranule, num_threads, memory) {}

  int64_t mixed_size() const { return weights_.num_value_heads * weights_.value_size; }
  const Linear<T>& output() const { return output_; }

  void reserve(int64_t num_rows, RecurrenceMemory<T>& memory) const {
    memory.projected.reserve(num_rows * width());
    memory.query.reserve(weights_.num_key_heads * num_rows * key_stride_);
    memory.key.reserve(weights_.num_key_heads * num_rows * key_stride_);
    memory.value.reserve(weights_.num_value_heads * num_rows * value_stride_);
    memory.decay.reserve(weights_.num_value_heads * num_rows);
    memory.rate.reserve(weights_.num_value_heads * num_rows);
    memory.scratch.reserve(num_threads_ * scratch_size());
  }

  // Computes `mixed` [T, mixed_size()], the input of output(), from `x` [T, size]. Reads and writes states.
  void mix(
      Team& team, const T* x, int64_t num_rows, const Chunks& chunks, const RecurrenceMemory<T>& memory,
      T* mixed) const {
    T* projected = memory.projected.data();
    inputs_.multiply(team, x, num_rows, [&](const T* y, Range rows, Range columns) {
      for (int64_t i = 0; i < rows.count; ++i) {
        T* to = projected + (rows.first + i) * width() + columns.first;
        std::copy_n(y + i * columns.count, columns.count, to);
        if (!weights_.input_scale) continue;
        const float* scale = weights_.input_scale + columns.first;
#pragma omp simd
        for (int64_t d = 0; d < columns.count; ++d) store(to[d], load(to[d]) * scale[d]);
      }
    });
    const int64_t num_channels = weights_.convolution.num_channels;
    float* scratch = memory.scratch.data() + Team::thread() * scratch_size();
    const ConvolutionInputs<T> inputs(weights_.convolution, projected, width());
    share_rows(team, chunks, inputs, [&](int64_t row) {
      float* convolved = scratch;
      inputs.convolve(chunks.of(row), row, convolved);
#pragma omp simd
      for (int64_t d = 0; d < num_channels; ++d) convolved[d] = gated(convolved[d], convolved[d]);
      place_tokens(convolved, row, num_rows, memory);
      place_rates(projected + row * width() + num_channels + mixed_size(), row, num_rows, memory);
    });
    // The last chunks are the longest.
    const int64_t num_heads = weights_.num_value_heads, num_spans = spans_of(weights_.value_size);
    const int64_t num_chunks = chunks.all.size();
    team.share(num_chunks * num_heads * num_spans, [&](int64_t item) {
      const Chunk& chunk = chunks.all[num_chunks - 1 - item / (num_heads * num_spans)];
      scan(chunk, item / num_spans % num_heads, item % num_spans, num_rows, memory, scratch);
    });
    team.share(ceil_div(num_rows, kRowsOfItem), [&](int64_t item) {
      for (int64_t row = item * kRowsOfItem; row < std::min((item + 1) * kRowsOfItem, num_rows); ++row)
        gate(
            projected + row * width() + num_channels, row, num_rows, memory, scratch,
            mixed + row * mixed_size());
    });
  }

 private:
  // Numbers of a projected row: inputs of the convolution, the gate, and the rates of each value head.
  int64_t width() const {
    const int64_t rates = (weights_.is_delta ? 2 : 1) * weights_.num_value_heads;
    return weights_.convolution.num_channels + mixed_size() + rates;
  }

  // Numbers of a thread, in whole cache lines.
  int64_t scratch_size() const {
    return round_up(
        std::max({weights_.convolution.num_channels, mixed_size(), key_stride_ * kSpan}),
        kCacheLine / static_cast<int64_t>(sizeof(float)));
  }

  static std::vector<Matrix> projections(const RecurrenceWeights& weights, int64_t size) {
    std::vector<Matrix> all;
    for (int64_t i = 0; i < weights.num_inputs; ++i) {
      const RowsOfWeight& part = weights.inputs[i];
      all.push_back(matrix(part.weight, part.first + part.count, size).some_rows(part.first, part.count));
    }
    return all;
  }

  // Places the queries, keys and values of a row. In the delta rule, queries and keys get length 1.
  void place_tokens(
      const float* convolved, int64_t row, int64_t num_rows, const RecurrenceMemory<T>& memory) const {
    const int64_t key_size = weights_.key_size, value_size = weights_.value_size;
    for (int64_t head = 0; head < weights_.num_key_heads; ++head) {
      const int64_t place = (head * num_rows + row) * key_stride_;
      const auto put = [&](const float* from, float scale, float* to) {
        if (weights_.is_delta) {
          float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
          for (int64_t d = 0; d < key_size; ++d) sum += from[d] * from[d];
          scale /= std::sqrt(sum + 1e-6f);
        }
#pragma omp simd
        for (int64_t d = 0; d < key_size; ++d) to[d] = scale * from[d];
        std::fill(to + key_size, to + key_stride_, 0.0f);
      };
      const float scale = static_cast<float>(weights_.query_scale);
      put(convolved + weights_.query_first + head * key_size, scale, memory.query.data() + place);
      put(convolved + weights_.key_first + head * key_size, 1.0f, memory.key.data() + place);
    }
    for (int64_t head = 0; head < weights_.num_value_heads; ++head) {
      float* to = memory.value.data() + (head * num_rows + row) * value_stride_;
      std::copy_n(convolved + weights_.value_first + head * value_size, value_size, to);
      std::fill(to + value_size, to + value_stride_, 0.0f);
    }
  }

  void place_rates(const T* rates, int64_t row, int64_t num_rows, const RecurrenceMemory<T>& memory) const {
    const int64_t num_heads = weights_.num_value_heads;
    for (int64_t head = 0; head < num_heads; ++head) {
      const float x = load(rates[weights_.is_delta ? num_heads + head : head]) + weights_.time_bias[head];
      float time = x > 20.0f ? x : std::log1p(std::exp(x));
      time = std::min(std::max(time, static_cast<float>(weights_.least_time)),
                      static_cast<float>(weights_.most_time));
      const int64_t place = head * num_rows + row;
      memory.decay.data()[place] = std::exp(time * weights_.decay[head]);
      memory.rate.data()[place] = time;
      if (weights_.is_delta)
        memory.rate.data()[place] = static_cast<float>(weights_.most_rate) / (1.0f + std::exp(-load(rates[head])));
    }
  }

  void scan(
      const Chunk& chunk, int64_t head, int64_t span, int64_t num_rows, const RecurrenceMemory<T>& memory,
      float* scratch) const {
    const int64_t key_head = head / (weights_.num_value_heads / weights_.num_key_heads);
    const int64_t first_key = (key_head * num_rows + chunk.first) * key_stride_;
    const int64_t first = head * num_rows + chunk.first;
    const ScanRows rows{
        memory.query.data() + first_key, memory.key.data() + first_key,
        memory.value.data() + first * value_stride_, memory.decay.data() + first, memory.rate.data() + first,
        weights_.skip ? weights_.skip[head] : 0.0f, chunk.count, chunk.num_known,
        weights_.key_size, weights_.value_size};
    const int64_t size = weights_.key_size * weights_.value_size;
    const auto state = [&](int64_t entry) {
      return weights_.states + (entry * weights_.num_value_heads + head) * size;
    };
    if (weights_.is_delta)
      scan_span<true>(rows, span, state(chunk.read), state(chunk.written), scratch);
    else
      scan_span<false>(rows, span, state(chunk.read), state(chunk.written), scratch);
  }

  // Norms the values that a row read. The gate multiplies them before or after the norm.
  void gate(
      const T* gates, int64_t row, int64_t num_rows, const RecurrenceMemory<T>& memory, float* read,
      T* mixed) const {
    const int64_t size = mixed_size(), value_size = weights_.value_size;
    for (int64_t head = 0; head < weights_.num_value_heads; ++head)
      std::copy_n(
          memory.value.data() + (head * num_rows + row) * value_stride_, value_size, read + head * value_size);
    const auto apply_gate = [&] {
#pragma omp simd
      for (int64_t d = 0; d < size; ++d) read[d] *= gated(load(gates[d]), load(gates[d]));
    };
    if (weights_.gates_first) apply_gate();
    if (weights_.norm)
      for (int64_t first = 0; first < size; first += weights_.norm_size) {
        Norm norm = weights_.norm;
        norm.weight += first;
        norm_row(read + first, norm, weights_.norm_size, read + first);
      }
    if (!weights_.gates_first) apply_gate();
#pragma omp simd
    for (int64_t d = 0; d < size; ++d) store(mixed[d], read[d]);
  }

  const RecurrenceWeights weights_;
  const int64_t num_threads_, key_stride_, value_stride_;
  Linear<T> inputs_, output_;
};

}  // namespace promptq
