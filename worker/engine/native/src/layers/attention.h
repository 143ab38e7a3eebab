// The attention of a layer: projections, norms and rotation of heads, K and V in the cache, and scores.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/paged_attention.h"
#include "interface.h"
#include "layers/activation.h"
#include "layers/norm.h"
#include "layers/rotation.h"
#include "linear/linear.h"

namespace promptq {

// Memory that the layers of a step share: `qkv` is [T, whole_row_size()], the others are [T, query_size()].
template <typename T>
struct HeadRows {
  T *qkv, *query, *gates, *attended;
};

template <typename T>
class Attention {
 public:
  Attention(const AttentionWeights& weights, int64_t size, int num_threads, WeightMemory* memory)
      : weights_(weights), head_size_(weights.cache.head_size), num_heads_(weights.num_heads),
        num_kv_heads_(weights.shares_kv ? 0 : weights.cache.num_kv_heads),
        qkv_(
            qkv_size() + gates_size(), one_after_another(projections(size)),
            static_cast<const T*>(weights.qkv_bias),
            head_size_, num_threads, memory),
        output_(
            size, side_by_side({matrix(weights.output, size, query_size())}),
            static_cast<const T*>(weights.output_bias), kGranule, num_threads, memory) {}

  int64_t query_size() const { return num_heads_ * head_size_; }
  int64_t qkv_size() const { return (num_heads_ + 2 * num_kv_heads_) * head_size_; }
  int64_t gates_size() const { return weights_.is_gated ? query_size() : 0; }
  int64_t whole_row_size() const { return weights_.norms_whole_rows ? qkv_size() : 0; }
  int64_t group() const { return num_heads_ / cache().num_kv_heads; }
  const LayerCache& cache() const { return weights_.cache; }
  const Linear<T>& output() const { return output_; }

  // Computes `rows.attended`, the input of output(), from `x` [T, size]. Writes its K and V to the cache.
  void attend(
      Team& team, const T* x, const Step& step, const Pieces& pieces, const HeadRows<T>& rows,
      std::vector<float>& scratch) const {
    if (weights_.norms_whole_rows)
      place_whole_rows(team, x, step, rows);
    else
      qkv_.multiply(team, x, step.num_rows, [&](T* y, Range some, Range columns) {
        for (int64_t i = 0; i < some.count; ++i)
          place_heads(
              y + i * columns.count, columns.first / head_size_, columns.count / head_size_, some.first + i,
              step, rows);
      });
    team.share(pieces.count(), [&](int64_t index) {
      attend_sized(
          pieces.at<T>(index, rows.query, rows.attended, weights_.cache, weights_.scoring), scratch);
    });
    if (weights_.is_gated)
      team.share(step.num_rows, [&](int64_t row) {
        T* attended = rows.attended + row * query_size();
        const T* gates = rows.gates + row * query_size();
#pragma omp simd
        for (int64_t d = 0; d < query_size(); ++d)
          store(attended[d], gated(load(attended[d]), load(gates[d])));
      });
  }

 private:
  std::vector<Matrix> projections(int64_t size) const {
    if (!weights_.key.numbers) return {matrix(weights_.query, qkv_size(), size)};
    const int64_t kv_size = num_kv_heads_ * head_size_;
    const Matrix query = matrix(weights_.query, query_size() + gates_size(), size);
    std::vector<Matrix> all, gates;
    for (int64_t head = 0; weights_.is_gated && head < num_heads_; ++head) {
      all.push_back(query.some_rows(2 * head * head_size_, head_size_));
      gates.push_back(query.some_rows((2 * head + 1) * head_size_, head_size_));
    }
    if (!weights_.is_gated) all.push_back(query);
    all.push_back(matrix(weights_.key, kv_size, size));
    all.push_back(matrix(weights_.value, kv_size, size));
    all.insert(all.end(), gates.begin(), gates.end());
    return all;
  }

  // Two phases: the norms need all heads of a row.
  void place_whole_rows(Team& team, const T* x, const Step& step, const HeadRows<T>& rows) const {
    qkv_.multiply_into(team, x, step.num_rows, rows.qkv);
    team.share(step.num_rows, [&](int64_t row) {
      T *query = rows.qkv + row * qkv_size(), *key = query + query_size();
      norm_row(query, weights_.query_norm, query_size(), query);
      norm_row(key, weights_.key_norm, num_kv_heads_ * head_size_, key);
      place_heads(query, 0, num_heads_ + 2 * num_kv_heads_, row, step, rows);
    });
  }

  // Norms and rotates heads of a row, from `first` on. Stores queries and gates in `rows`, K and V in the
  // cache.
  void place_heads(
      T* head, int64_t first, int64_t count, int64_t row, const Step& step, const HeadRows<T>& rows) const {
    const int64_t size = head_size_, position = step.positions[row];
    const LayerCache& cache = weights_.cache;
    const int64_t place = step.layout.write_blocks[row] * cache.block_stride +
                          step.layout.write_offsets[row] * cache.position_stride;
    for (int64_t index = first; index < first + count; ++index, head += size) {
      if (const int64_t gate = index - num_heads_ - 2 * num_kv_heads_; gate >= 0) {
        std::copy_n(head, size, rows.gates + (row * num_heads_ + gate) * size);
        continue;
      }
      const bool is_query = index < num_heads_, is_value = index >= num_heads_ + num_kv_heads_;
      if (is_value && weights_.value_norm) norm_row(head, weights_.value_norm, size, head);
      if (!is_value) {
        const Norm& norm = is_query ? weights_.query_norm : weights_.key_norm;
        const bool has_norm = norm && !weights_.norms_whole_rows;
        if (has_norm && !weights_.norms_rotated) norm_row(head, norm, size, head);
        rotate_head(head, weights_.rotation, position);
        if (has_norm && weights_.norms_rotated) norm_row(head, norm, size, head);
      }
      if (is_query) {
        std::copy_n(head, size, rows.query + (row * num_heads_ + index) * size);
        continue;
      }
      const int64_t kv_head = (index - num_heads_) % num_kv_heads_;
      auto* stored = static_cast<uint8_t*>(is_value ? cache.values : cache.keys);
      store_row(head, cache, stored + place + kv_head * cache.head_stride);
    }
  }

  const AttentionWeights weights_;
  const int64_t head_size_, num_heads_, num_kv_heads_;  // KV heads that the layer computes
  Linear<T> qkv_, output_;
};

}  // namespace promptq
