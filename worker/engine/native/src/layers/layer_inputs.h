// Inputs that layers have beside the hidden states of the layer before (Gemma 4):
//
//   inputs = scale * (norm(projection_scale * projection(embedded)) + table_scale * table(ids))
//   hidden += after(output(activation(gate(hidden)) * inputs of the layer))
#pragma once

#include <cstdint>

#include "interface.h"
#include "layers/activation.h"
#include "layers/norm.h"
#include "linear/linear.h"
#include "machine/buffer.h"
#include "machine/elements.h"
#include "machine/team.h"

namespace promptq {

// The inputs of all layers.
template <typename T>
class LayerInputs {
 public:
  LayerInputs(const LayerInputsWeights& weights, const ModelShape& shape, int num_threads, WeightMemory* memory)
      : weights_(weights), row_size_(weights.num_layers * weights.size),
        table_(matrix(weights.table, shape.vocab_size, row_size_)),
        projection_(
            row_size_, side_by_side({matrix(weights.projection, row_size_, shape.size)}), nullptr, kGranule,
            num_threads, memory) {}

  int64_t row_size() const { return row_size_; }  // of all layers

  // Computes `inputs` [T, row_size()] of the tokens `ids`, in two phases. `embedded` are their embeddings.
  void compute(Team& team, const int64_t* ids, const T* embedded, int64_t num_rows, T* inputs) const {
    projection_.multiply_into(team, embedded, num_rows, inputs);
    team.share_rows(num_rows, [&](int64_t row) {
      thread_local Buffer<T> memory;
      T *sums = inputs + row * row_size_, *entry = memory.reserve(row_size_);
      copy_row(table_, ids[row], entry);
      scale_row(entry, static_cast<float>(weights_.table_scale), row_size_);
      scale_row(sums, static_cast<float>(weights_.projection_scale), row_size_);
      for (int64_t first = 0; first < row_size_; first += weights_.size)
        norm_row(sums + first, weights_.norm, weights_.size, sums + first);
      add_row(sums, entry, row_size_);
      scale_row(sums, static_cast<float>(weights_.scale), row_size_);
    });
  }

 private:
  const LayerInputsWeights weights_;
  const int64_t row_size_;
  const Matrix table_;
  Linear<T> projection_;
};

// The part of a layer that reads its inputs.
template <typename T>
class LayerInput {
 public:
  LayerInput(const LayerInputWeights& weights, int64_t size, int num_threads, WeightMemory* memory)
      : size_(weights.size), activation_(static_cast<Activation>(weights.activation)), after_(weights.after),
        gate_(
            size_, side_by_side({matrix(weights.gate, size_, size)}), nullptr, kGranule, num_threads, memory),
        output_(
            size, side_by_side({matrix(weights.output, size, size_)}), nullptr, kGranule, num_threads, memory) {
  }

  int64_t size() const { return size_; }
  const Norm& after() const { return after_; }
  const Linear<T>& output() const { return output_; }

  // One phase: computes the inputs of output() [num_rows, size()] of hidden states `x` and of the layer's
  // `inputs`, whose rows are `stride` numbers apart.
  void activate(
      Team& team, const T* x, int64_t num_rows, const T* inputs, int64_t stride, T* inner) const {
    gate_.multiply(team, x, num_rows, [&](const T* y, Range rows, Range columns) {
      for (int64_t i = 0; i < rows.count; ++i) {
        const int64_t row = rows.first + i;
        activate_row(
            activation_, nullptr, y + i * columns.count, 1.0f, inputs + row * stride + columns.first,
            columns.count, inner + row * size_ + columns.first);
      }
    });
  }

 private:
  const int64_t size_;
  const Activation activation_;
  const Norm after_;
  Linear<T> gate_, output_;
};

}  // namespace promptq
