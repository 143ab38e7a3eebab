// A gated linear recurrence (layers/scan.h) with its projections, a convolution of queries, keys and values,
// their rates, and a gated norm. Gated DeltaNet, Kimi Delta Attention and Mamba 2 are of this kind.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
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
  Buffer<T> narrow, gates, times;    // [T, inputs] of gates or times, and what is computed from these
  Buffer<float> query, key, value;   // [heads, T, stride]
  Buffer<float> decay, rate;         // [value heads, T, decays_each()], [value heads, T]
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
            static_cast<const T*>(weights.output_bias), kGranule, num_threads, memory) {
    const auto expand = [&](std::unique_ptr<Linear<T>>& part, const Weight& weight, int64_t inputs, int64_t outputs,
                            const void* bias) {
      if (weight.numbers)
        part = std::make_unique<Linear<T>>(
            outputs, side_by_side({matrix(weight, outputs, inputs)}), static_cast<const T*>(bias), kGranule,
            num_threads, memory);
    };
    expand(gates_, weights.gates, weights.gate_inputs, mixed_size(), weights.gates_bias);
    expand(times_, weights.times, weights.time_inputs, num_times(), weights.times_bias);
  }

  int64_t mixed_size() const { return weights_.num_value_heads * weights_.value_size; }
  const Linear<T>& output() const { return output_; }

  void reserve(int64_t num_rows, RecurrenceMemory<T>& memory) const {
    memory.projected.reserve(num_rows * width());
    if (gates_ || times_) memory.narrow.reserve(num_rows * std::max(weights_.gate_inputs, weights_.time_inputs));
    if (gates_) memory.gates.reserve(num_rows * mixed_size());
    if (times_) memory.times.reserve(num_rows * num_times());
    memory.query.reserve(weights_.num_key_heads * num_rows * key_stride_);
    memory.key.reserve(weights_.num_key_heads * num_rows * key_stride_);
    memory.value.reserve(weights_.num_value_heads * num_rows * value_stride_);
    memory.decay.reserve(weights_.num_value_heads * num_rows * decays_each());
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
    const int64_t first_rate = num_channels + weights_.gate_inputs;
    const int64_t first_time = width() - weights_.time_inputs;
    const auto expanded = [&](const std::unique_ptr<Linear<T>>& part, int64_t first, T* outputs, int64_t count) {
      const T* from = projected + first;
      if (!part) return RowsAt{from, width()};
      T* narrow = memory.narrow.data();
      team.share_rows(num_rows, [&](int64_t row) {
        std::copy_n(from + row * width(), part->inputs(), narrow + row * part->inputs());
      });
      part->multiply_into(team, narrow, num_rows, outputs);
      return RowsAt{outputs, count};
    };
    const RowsAt gates = expanded(gates_, num_channels, memory.gates.data(), mixed_size());
    const RowsAt times = expanded(times_, first_time, memory.times.data(), num_times());
    float* scratch = memory.scratch.data() + Team::thread() * scratch_size();
    const ConvolutionInputs<T> inputs(weights_.convolution, projected, width());
    share_rows(team, chunks, inputs, [&](int64_t row) {
      float* convolved = scratch;
      inputs.convolve(chunks.of(row), row, convolved);
#pragma omp simd
      for (int64_t d = 0; d < num_channels; ++d) convolved[d] = gated(convolved[d], convolved[d]);
      place_tokens(convolved, row, num_rows, memory);
      place_rates(projected + row * width() + first_rate, times.at(row), row, num_rows, memory);
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
        gate(gates.at(row), row, num_rows, memory, scratch, mixed + row * mixed_size());
    });
  }

 private:
  // Rows that begin `stride` numbers apart.
  struct RowsAt {
    const T* first;
    int64_t stride;
    const T* at(int64_t row) const { return first + row * stride; }
  };

  // Numbers of a projected row: inputs of the convolution, of the gate, the rates of each value head in the
  // delta rule, and inputs of time steps.
  int64_t width() const {
    const int64_t num_rates = weights_.is_delta ? weights_.num_value_heads : 0;
    return weights_.convolution.num_channels + weights_.gate_inputs + num_rates + weights_.time_inputs;
  }

  int64_t num_times() const { return weights_.num_value_heads * (weights_.has_key_decays ? weights_.key_size : 1); }
  int64_t decays_each() const { return weights_.has_key_decays ? key_stride_ : 1; }  // of a value head

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

  void place_rates(
      const T* rates, const T* times, int64_t row, int64_t num_rows, const RecurrenceMemory<T>& memory) const {
    const int64_t num_heads = weights_.num_value_heads, count = num_times() / num_heads;
    const float least = static_cast<float>(weights_.least_time), most = static_cast<float>(weights_.most_time);
    for (int64_t head = 0; head < num_heads; ++head) {
      const int64_t place = head * num_rows + row;
      float *decay = memory.decay.data() + place * decays_each(), &rate = memory.rate.data()[place];
      const auto time_of = [&](int64_t i) __attribute__((always_inline)) {
        const float time = softplus(load(times[head * count + i]) + weights_.time_bias[head * count + i]);
        return std::min(std::max(time, least), most);
      };
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) decay[i] = exponential(time_of(i) * weights_.decay[head]);
      std::fill(decay + count, decay + decays_each(), 0.0f);
      rate = weights_.is_delta ? gated(static_cast<float>(weights_.most_rate), load(rates[head])) : time_of(0);
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
        memory.value.data() + first * value_stride_, memory.decay.data() + first * decays_each(),
        memory.rate.data() + first, weights_.skip ? weights_.skip[head] : 0.0f, chunk.count, chunk.num_known,
        weights_.key_size, weights_.value_size, decays_each()};
    const int64_t size = weights_.key_size * weights_.value_size;
    const auto state = [&](int64_t entry) {
      return weights_.states + (entry * weights_.num_value_heads + head) * size;
    };
    const auto scan_with = [&](auto is_delta, auto has_key_decays) {
      scan_span<is_delta(), has_key_decays()>(rows, span, state(chunk.read), state(chunk.written), scratch);
    };
    if (!weights_.is_delta)
      scan_with(std::false_type(), std::false_type());
    else if (weights_.has_key_decays)
      scan_with(std::true_type(), std::true_type());
    else
      scan_with(std::true_type(), std::false_type());
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
      for (int64_t d = 0; d < size; ++d)
        read[d] *= gated(weights_.has_sigmoid ? 1.0f : load(gates[d]), load(gates[d]));
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
  std::unique_ptr<Linear<T>> gates_, times_;  // null: a projected row has gates or times themselves
};

}  // namespace promptq
