// Experts of a layer that also has a dense MLP (the larger Gemma 4):
//
//   results = after_mlp(mlp) + after(experts(before(hidden)))
#pragma once

#include <cstdint>

#include "interface.h"
#include "layers/experts.h"
#include "layers/norm.h"
#include "machine/elements.h"
#include "machine/team.h"

namespace promptq {

template <typename T>
class ExpertsBeside {
 public:
  ExpertsBeside(const ExpertsBesideWeights& weights, int64_t size, int num_threads, WeightMemory* memory)
      : size_(size), before_router_(weights.before_router), before_(weights.before), after_(weights.after),
        after_mlp_(weights.after_mlp), experts_(weights.experts, size, num_threads, memory) {}

  // Makes room for a step with `num_rows` rows.
  void reserve(int64_t num_rows, ExpertsMemory<T>& memory) const { experts_.reserve(num_rows, memory); }

  // Some phases: adds experts to the MLP's `results` [num_rows, size]. `inputs` has room for 2 num_rows rows.
  void add(
      Team& team, const T* hidden, int64_t num_rows, ExpertsMemory<T>& memory, T* inputs, T* results) const {
    T* of_router = inputs + num_rows * size_;
    team.share_rows(num_rows, [&](int64_t row) {
      const int64_t place = row * size_;
      norm_row(hidden + place, before_, size_, inputs + place);
      norm_row(hidden + place, before_router_, size_, of_router + place);
    });
    experts_.multiply(team, inputs, of_router, num_rows, memory, [&](T* y, Range rows, Range) {
      T* sum = results + rows.first * size_;
      norm_row(y, after_, size_, y);
      norm_row(sum, after_mlp_, size_, sum);
      add_row(sum, y, size_);
    });
  }

 private:
  const int64_t size_;
  const Norm before_router_, before_, after_, after_mlp_;
  const Experts<T> experts_;
};

}  // namespace promptq
