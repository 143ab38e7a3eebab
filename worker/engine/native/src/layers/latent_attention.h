// Latent attention in the absorbed form (DeepSeek-V2, https://arxiv.org/abs/2405.04434, appendix C):
//
//   latent, key = split(down(x))    a row of the cache is (norm(latent), rotate(key))
//   q, r = split(a head of query(norm(query_down(x))))    a head's query is (keys' q, rotate(r))
//   a head's result is values (the latents, weighed by their scores)
//
// The weights that compute a head's keys and values from latents multiply its query and its result instead.
// So the cache has only latents, and all heads read the same rows.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "attention/paged_attention.h"
#include "interface.h"
#include "layers/norm.h"
#include "layers/rotation.h"
#include "linear/linear.h"

namespace promptq {

// Memory that the layers of a step share.
template <typename T>
struct LatentMemory {
  Buffer<T> projected;  // [T, query rank + row of the cache]
  Buffer<T> normed;     // [T, query rank]
  Buffer<T> query;      // [T, heads, row of the cache]
  Buffer<T> attended;   // [T, heads, latent]
};

template <typename T>
class LatentAttention {
 public:
  LatentAttention(
      const LatentAttentionWeights& weights, int64_t size, int num_threads, WeightMemory* memory)
      : weights_(weights), rank_(weights.cache.value_size), rotated_size_(weights.cache.head_size - rank_),
        inputs_(
            projected_size(), one_after_another(inputs(weights, size)), static_cast<const T*>(weights.input_bias),
            kGranule, num_threads, memory),
        query_(
            weights.num_heads * query_size(),
            side_by_side({matrix(
                weights.query, weights.num_heads * query_size(), weights.query_rank ? weights.query_rank : size)}),
            static_cast<const T*>(weights.query_bias), query_size(), num_threads, memory),
        output_(
            size, side_by_side({matrix(weights.output, size, weights.num_heads * weights.value_size)}),
            static_cast<const T*>(weights.output_bias), kGranule, num_threads, memory),
        keys_(weights.num_heads), values_(weights.num_heads) {
    const int64_t each = weights.key_size + weights.value_size;
    const Matrix up = matrix(weights.up, weights.num_heads * each, rank_);
    Team::run(num_threads, [&](Team& team) {
      team.share(weights.num_heads, [&](int64_t head) {
        values_[head] = pack_or_read<T>(up.some_rows(head * each + weights.key_size, weights.value_size), memory);
        keys_[head].pack(up.some_rows(head * each, weights.key_size), memory);
      });
    });
  }

  const LayerCache& cache() const { return weights_.cache; }
  int64_t group() const { return weights_.num_heads / cache().num_kv_heads; }
  const Linear<T>& output() const { return output_; }

  void reserve(int64_t num_rows, LatentMemory<T>& memory) const {
    memory.projected.reserve(num_rows * projected_size());
    memory.normed.reserve(num_rows * weights_.query_rank);
    memory.query.reserve(num_rows * weights_.num_heads * cache().head_size);
    memory.attended.reserve(num_rows * weights_.num_heads * rank_);
  }

  // Computes `mixed` [T, num_heads value_size], the input of output(), from `x` [T, size]. Writes the cache.
  void attend(
      Team& team, const T* x, const Step& step, const Pieces& pieces, const LatentMemory<T>& memory, T* mixed,
      std::vector<float>& scratch) const {
    const int64_t num_rows = step.num_rows, query_rank = weights_.query_rank;
    T *projected = memory.projected.data(), *normed = memory.normed.data();
    inputs_.multiply_into(team, x, num_rows, projected);
    team.share_rows(num_rows, [&](int64_t row) {
      T* its = projected + row * projected_size();
      if (query_rank) norm_row(its, weights_.query_norm, query_rank, normed + row * query_rank);
      store_latent(its + query_rank, row, step);
    });
    query_.multiply(team, query_rank ? normed : x, num_rows, [&](T* y, Range rows, Range columns) {
      for (int64_t column = 0; column < columns.count; column += query_size())
        place_queries(
            y + column, columns.count, rows, (columns.first + column) / query_size(), step,
            memory.query.data());
    });
    team.share(pieces.count(), [&](int64_t index) {
      attend_sized(
          pieces.at<T>(index, memory.query.data(), memory.attended.data(), cache(), weights_.scoring), scratch);
    });
    const int64_t num_parts = ceil_div(num_rows, kMostRows);
    team.share(num_parts * weights_.num_heads, [&](int64_t item) {
      const Range rows = part_of(num_rows, item / weights_.num_heads, num_parts);
      multiply_values(memory.attended.data(), rows, item % weights_.num_heads, mixed);
    });
  }

 private:
  // The transposed weight that computes a head's keys from latents.
  struct Keys {
    std::unique_ptr<Packed<T>> weight;
    std::vector<T> numbers;  // if `weight` reads them in place

    void pack(const Matrix& keys, WeightMemory* memory) {
      std::vector<T> row(keys.columns);
      numbers.resize(keys.rows * keys.columns);
      for (int64_t i = 0; i < keys.rows; ++i) {
        copy_row(keys, i, row.data());
        for (int64_t d = 0; d < keys.columns; ++d) numbers[d * keys.rows + i] = row[d];
      }
      weight = pack_or_read<T>(
          {numbers.data(), nullptr, nullptr, 8 * sizeof(T), 0, keys.columns, keys.rows}, memory);
      if (memory) numbers = {};
    }
  };

  int64_t projected_size() const { return weights_.query_rank + cache().head_size; }
  int64_t query_size() const { return weights_.key_size + rotated_size_; }  // of a head, before the weights

  static std::vector<Matrix> inputs(const LatentAttentionWeights& weights, int64_t size) {
    std::vector<Matrix> all;
    if (weights.query_rank) all.push_back(matrix(weights.query_down, weights.query_rank, size));
    all.push_back(matrix(weights.down, weights.cache.head_size, size));
    return all;
  }

  // Norms a latent, rotates the key after it, and stores both.
  void store_latent(T* latent, int64_t row, const Step& step) const {
    norm_row(latent, weights_.norm, rank_, latent);
    rotate_head(latent + rank_, weights_.rotation, step.positions[row]);
    uint8_t* target = static_cast<uint8_t*>(cache().keys) +
                      step.layout.write_blocks[row] * cache().block_stride +
                      step.layout.write_offsets[row] * cache().position_stride;
    store_row(latent, cache(), target);
  }

  // Computes some rows' queries of a head from `from` [rows, stride]. Rotates them in place.
  void place_queries(
      T* from, int64_t stride, Range rows, int64_t head, const Step& step, T* query) const {
    const int64_t key_size = weights_.key_size, row_size = weights_.num_heads * cache().head_size;
    thread_local Buffer<T> memory;
    T *keys = memory.reserve(rows.count * key_size), *to = query + rows.first * row_size + head * cache().head_size;
    for (int64_t i = 0; i < rows.count; ++i, from += stride) {
      std::copy_n(from, key_size, keys + i * key_size);
      rotate_head(from + key_size, weights_.rotation, step.positions[rows.first + i]);
      std::copy_n(from + key_size, rotated_size_, to + i * row_size + rank_);
    }
    keys_[head].weight->multiply(keys, rows.count, nullptr, to, row_size);
  }

  // Computes some rows' results of a head from `attended` [T, heads, rank].
  void multiply_values(const T* attended, Range rows, int64_t head, T* mixed) const {
    const int64_t num_heads = weights_.num_heads, value_size = weights_.value_size;
    thread_local Buffer<T> memory;
    T* latents = memory.reserve(rows.count * rank_);
    for (int64_t i = 0; i < rows.count; ++i)
      std::copy_n(attended + ((rows.first + i) * num_heads + head) * rank_, rank_, latents + i * rank_);
    values_[head]->multiply(
        latents, rows.count, nullptr, mixed + (rows.first * num_heads + head) * value_size,
        num_heads * value_size);
  }

  const LatentAttentionWeights weights_;
  const int64_t rank_, rotated_size_;
  Linear<T> inputs_, query_, output_;
  std::vector<Keys> keys_;
  std::vector<std::unique_ptr<Packed<T>>> values_;
};

}  // namespace promptq
