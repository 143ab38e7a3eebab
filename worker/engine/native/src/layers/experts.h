// A mixture of experts in place of an MLP: a row goes to a few of many MLPs, the experts, and only their
// weights are read. An expert's rows are multiplied together. A row's results are added in the order of its
// router, so the sum does not depend on other rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "interface.h"
#include "layers/dense_mlp.h"
#include "layers/routing.h"
#include "linear/linear.h"
#include "machine/buffer.h"
#include "machine/elements.h"
#include "machine/team.h"

namespace promptq {

// Some rows of an expert, at successive places in the order of the experts.
struct ExpertRows {
  int64_t mlp;
  Range places;
  int64_t inner;  // where the first row's inner numbers begin
};

// The memory of a step. The experts of all layers use it, one after the other.
template <typename T>
struct ExpertsMemory {
  Buffer<float> logits, shares;           // [rows, outputs of the router], [rows, slots]
  Buffer<int64_t> experts, places, rows;  // [rows, top_k], [rows, slots], [places]
  Buffer<T> inner, results;               // [places, inner sizes], [places, size]
  std::vector<ExpertRows> pieces;
};

template <typename T>
class Experts {
 public:
  // See Linear for `num_threads` and `memory`.
  Experts(const ExpertWeights& weights, int64_t size, int num_threads, WeightMemory* memory)
      : size_(size), num_threads_(num_threads), num_routed_(weights.routing.num_experts),
        top_k_(weights.routing.top_k), has_shared_gate_(weights.has_shared_gate), choice_(weights.routing),
        router_(
            num_routed_ + has_shared_gate_,
            side_by_side({matrix(weights.router, num_routed_ + has_shared_gate_, size)}),
            weights.router_bias, kSmallGranule, num_threads, memory) {
    for (int64_t i = 0; i < weights.num_mlps; ++i)
      mlps_.emplace_back(weights.mlps[i], size, num_threads, memory, kSmallGranule);
  }

  // Makes room for a step with `num_rows` rows.
  void reserve(int64_t num_rows, ExpertsMemory<T>& memory) const {
    const int64_t num_places = num_rows * num_slots();
    memory.logits.reserve(num_rows * (num_routed_ + has_shared_gate_));
    memory.shares.reserve(num_places);
    memory.experts.reserve(num_rows * top_k_);
    memory.places.reserve(num_places);
    memory.rows.reserve(num_places);
    int64_t inner_size = 0;
    for (const DenseMlp<T>& mlp : mlps_) inner_size = std::max(inner_size, mlp.inner_size());
    memory.inner.reserve(num_places * inner_size);
    memory.results.reserve(num_places * size_);
  }

  // Some phases: calls use(y, rows, outputs) with the results y [rows, size] for some rows of `x` [num_rows,
  // size]. The router has the rows `of_router`.
  template <typename Use>
  void multiply(
      Team& team, const T* x, const T* of_router, int64_t num_rows, ExpertsMemory<T>& memory,
      const Use& use) const {
    route(team, of_router, num_rows, memory);
    team.share(1, [&](int64_t) { group(num_rows, memory); });
    T *inner = memory.inner.data(), *results = memory.results.data();
    share_slices(team, memory, &DenseMlp<T>::inputs, [&](const ExpertRows& rows, int64_t slice) {
      mlps_[rows.mlp].activate_slice(slice, inputs_of(rows, x, memory), rows.places.count, inner + rows.inner);
    });
    share_slices(team, memory, &DenseMlp<T>::down, [&](const ExpertRows& rows, int64_t slice) {
      T* to = results + rows.places.first * size_;
      mlps_[rows.mlp].down().multiply_slice(
          slice, inner + rows.inner, {0, rows.places.count},
          [&](const T* y, Range range, Range columns) { place_results(y, range, columns, to, size_); });
    });
    team.share_rows(num_rows, [&](int64_t row) { use(sum(row, memory), Range{row, 1}, Range{0, size_}); });
  }

 private:
  // Slices end at multiples of this number of outputs, so that few experts suffice for many threads.
  static constexpr int64_t kSmallGranule = 32;

  // The results that are added for a row: those of its experts, then those of the shared experts.
  int64_t num_slots() const { return top_k_ + num_shared(); }
  int64_t num_shared() const { return mlps_.size() - num_routed_; }

  // Calls work(rows, slice) for each slice of a linear layer of the experts.
  template <typename Work>
  void share_slices(
      Team& team, const ExpertsMemory<T>& memory, const Linear<T>& (DenseMlp<T>::*linear)() const,
      const Work& work) const {
    team.share(memory.pieces.size() * num_threads_, [&](int64_t item) {
      const ExpertRows& rows = memory.pieces[item / num_threads_];
      if (const int64_t slice = item % num_threads_; slice < (mlps_[rows.mlp].*linear)().num_slices())
        work(rows, slice);
    });
  }

  // Chooses the experts of each row. The router computes in fp32, because a choice is all or nothing.
  void route(Team& team, const T* x, int64_t num_rows, ExpertsMemory<T>& memory) const {
    const int64_t num_outputs = num_routed_ + has_shared_gate_;
    float* logits = memory.logits.data();
    router_.share(team, num_rows, [&](int64_t slice, Range part) {
      router_.multiply_slice(
          slice, widened(x + part.first * size_, part.count * size_), {0, part.count},
          [&](const float* y, Range rows, Range columns) {
            place_results(y, rows, columns, logits + part.first * num_outputs, num_outputs);
          });
    });
    team.share_rows(num_rows, [&](int64_t row) {
      const float* its = logits + row * num_outputs;
      float* shares = memory.shares.data() + row * num_slots();
      choice_.choose(its, memory.experts.data() + row * top_k_, shares);
      const float shared = has_shared_gate_ ? 1.0f / (1.0f + exponential(-its[num_routed_])) : 1.0f;
      std::fill_n(shares + top_k_, num_shared(), shared);
    });
  }

  // Numbers in fp32, in memory of this thread unless they already are.
  static const float* widened(const T* numbers, int64_t count) {
    if constexpr (std::is_same_v<T, float>) {
      return numbers;
    } else {
      thread_local Buffer<float> memory;
      float* to = memory.reserve(count);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) to[i] = load(numbers[i]);
      return to;
    }
  }

  // Sorts the rows by expert, and cuts them into pieces.
  void group(int64_t num_rows, ExpertsMemory<T>& memory) const {
    const int64_t num_experts = mlps_.size();
    std::vector<int64_t> next(num_experts + 1);  // the place of each expert's next row
    for (int64_t i = 0; i < num_rows * top_k_; ++i) ++next[memory.experts.data()[i] + 1];
    std::fill(next.begin() + num_routed_ + 1, next.end(), num_rows);
    for (int64_t expert = 0; expert < num_experts; ++expert) next[expert + 1] += next[expert];
    memory.pieces.clear();
    for (int64_t expert = 0, inner = 0; expert < num_experts; ++expert) {
      const int64_t count = next[expert + 1] - next[expert], num_parts = ceil_div(count, kMostRows);
      for (int64_t part = 0; part < num_parts; ++part) {
        const Range rows = part_of(count, part, num_parts);
        memory.pieces.push_back({expert, {next[expert] + rows.first, rows.count}, inner});
        inner += rows.count * mlps_[expert].inner_size();
      }
    }
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t slot = 0; slot < num_slots(); ++slot) {
        const int64_t expert =
            slot < top_k_ ? memory.experts.data()[row * top_k_ + slot] : num_routed_ + slot - top_k_;
        const int64_t place = next[expert]++;
        memory.places.data()[row * num_slots() + slot] = place;
        memory.rows.data()[place] = row;
      }
  }

  // The inputs of a piece's rows, one after the other, in this thread's memory unless they are so already.
  const T* inputs_of(const ExpertRows& piece, const T* x, const ExpertsMemory<T>& memory) const {
    const int64_t* rows = memory.rows.data() + piece.places.first;
    const int64_t count = piece.places.count;
    if (rows[count - 1] - rows[0] == count - 1) return x + rows[0] * size_;
    thread_local Buffer<T> copies;
    T* to = copies.reserve(count * size_);
    for (int64_t i = 0; i < count; ++i) std::copy_n(x + rows[i] * size_, size_, to + i * size_);
    return to;
  }

  // The sum of a row's results, in memory of this thread.
  T* sum(int64_t row, const ExpertsMemory<T>& memory) const {
    thread_local Buffer<float> sum_memory;
    thread_local Buffer<T> row_memory;
    float* sums = std::fill_n(sum_memory.reserve(size_), size_, 0.0f) - size_;
    for (int64_t slot = row * num_slots(); slot < (row + 1) * num_slots(); ++slot) {
      const float share = memory.shares.data()[slot];
      const T* result = memory.results.data() + memory.places.data()[slot] * size_;
#pragma omp simd
      for (int64_t d = 0; d < size_; ++d) sums[d] += share * load(result[d]);
    }
    T* to = row_memory.reserve(size_);
#pragma omp simd
    for (int64_t d = 0; d < size_; ++d) store(to[d], sums[d]);
    return to;
  }

  const int64_t size_, num_threads_, num_routed_, top_k_, has_shared_gate_;
  const ExpertChoice choice_;
  const Linear<float> router_;
  std::vector<DenseMlp<T>> mlps_;  // of the experts, then of the shared ones
};

}  // namespace promptq
