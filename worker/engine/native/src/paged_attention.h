// Attention over the paged KV cache.
//
// A decode reads each K and V of its context once for all query heads that share it, straight
// through the block table. A chunk's rows attend together, with the library's blocked kernel.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "elements.h"

namespace promptq {

// Which earlier positions a query sees (Pattern in attention/__init__.py).
enum class Visible : int64_t { kFull = 0, kSliding = 1, kChunked = 2 };

struct Pattern {
  Visible kind;
  int64_t size;

  int64_t first(int64_t position) const {
    if (kind == Visible::kSliding) return std::max<int64_t>(0, position + 1 - size);
    if (kind == Visible::kChunked) return position - position % size;
    return 0;
  }
};

// One layer's K [num_blocks, num_kv_heads, block_size, head_size] and V likewise.
struct LayerCache {
  at::Tensor key, value;
  Pattern pattern;
};

// Where a step's rows lie (StepLayout in attention/__init__.py); int64 tensors, contiguous.
struct Layout {
  int64_t num_decodes;
  at::Tensor query_starts, context_lens;  // [num_sequences + 1], [num_sequences]
  at::Tensor block_tables;                // [num_sequences, max_blocks]
  at::Tensor write_blocks, write_offsets; // [T]
};

// A step's queries, keys and values: rows of one packed tensor, `stride` numbers apart.
template <typename T>
struct Packed {
  T *query, *key, *value;
  int64_t stride;
  int64_t num_heads, num_kv_heads, head_size;
};

// Groups of query heads up to this size are computed with one pass over K and V.
constexpr int64_t kMaxGroup = 8;

// scores[g] = q[g] . k for `Group` query heads, whose rows are `size` apart.
template <int Group, typename T>
inline void dot_products(const float* query, const T* key, int64_t size, float* scores) {
  float sums[Group] = {};
  for (int g = 0; g < Group; ++g) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < size; ++d) sum += query[g * size + d] * load(key[d]);
    sums[g] = sum;
  }
  for (int g = 0; g < Group; ++g) scores[g] = sums[g];
}

template <int Group, typename T>
inline void add_weighted(const float* weights, const T* value, int64_t size, float* out) {
#pragma omp simd
  for (int64_t d = 0; d < size; ++d) {
    const float v = load(value[d]);
    for (int g = 0; g < Group; ++g) out[g * size + d] += weights[g] * v;
  }
}

// `Group` query heads of one row attend to positions `first` to `last` of one KV head.
template <int Group, typename T>
void attend_group(
    const T* query, const T* keys, const T* values, const int64_t* blocks, int64_t block_stride,
    int64_t block_size, int64_t size, int64_t first, int64_t last, float scale, T* out,
    std::vector<float>& scratch) {
  const int64_t length = last - first;
  scratch.resize(Group * (2 * size + length));
  float* scaled = scratch.data();
  float* sums = scaled + Group * size;
  float* weights = sums + Group * size;  // [length, Group]
  for (int64_t d = 0; d < Group * size; ++d) scaled[d] = load(query[d]) * scale;
  for (int64_t position = first; position < last; ++position) {
    const T* key = keys + blocks[position / block_size] * block_stride + position % block_size * size;
    dot_products<Group>(scaled, key, size, weights + (position - first) * Group);
  }
  float highest[Group], total[Group] = {};
  std::fill_n(highest, Group, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < length; ++i)
    for (int g = 0; g < Group; ++g) highest[g] = std::max(highest[g], weights[i * Group + g]);
  for (int64_t i = 0; i < length; ++i)
    for (int g = 0; g < Group; ++g)
      weights[i * Group + g] = weights[i * Group + g] - highest[g];
#pragma omp simd
  for (int64_t i = 0; i < length * Group; ++i) weights[i] = std::exp(weights[i]);
  for (int64_t i = 0; i < length; ++i)
    for (int g = 0; g < Group; ++g) total[g] += weights[i * Group + g];
  std::fill_n(sums, Group * size, 0.0f);
  for (int64_t position = first; position < last; ++position) {
    const T* value =
        values + blocks[position / block_size] * block_stride + position % block_size * size;
    add_weighted<Group>(weights + (position - first) * Group, value, size, sums);
  }
  for (int g = 0; g < Group; ++g)
    for (int64_t d = 0; d < size; ++d) store(out[g * size + d], sums[g * size + d] / total[g]);
}

template <typename T, typename... Arguments>
void attend_heads(int64_t group, Arguments&&... arguments) {
  switch (group) {
    case 1: return attend_group<1, T>(arguments...);
    case 2: return attend_group<2, T>(arguments...);
    case 3: return attend_group<3, T>(arguments...);
    case 4: return attend_group<4, T>(arguments...);
    case 5: return attend_group<5, T>(arguments...);
    case 6: return attend_group<6, T>(arguments...);
    case 7: return attend_group<7, T>(arguments...);
    case 8: return attend_group<8, T>(arguments...);
  }
}

// The decodes' rows of `out` [T, num_heads * head_size]; threads take (row, KV head) in turns.
template <typename T>
void attend_decodes(
    const Packed<T>& packed, const LayerCache& cache, const Layout& layout, float scale,
    at::Tensor& out) {
  const int64_t size = packed.head_size, block_size = cache.key.size(2);
  const int64_t group = packed.num_heads / packed.num_kv_heads;
  const int64_t head_stride = block_size * size, block_stride = cache.key.stride(0);
  const int64_t num_items = layout.num_decodes * packed.num_kv_heads;
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(num_items, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    std::vector<float> scratch;
    for (int64_t item = next++; item < num_items; item = next++) {
      const int64_t row = item / packed.num_kv_heads, head = item % packed.num_kv_heads;
      const int64_t context = data<int64_t>(layout.context_lens)[row];
      const int64_t* blocks = data<int64_t>(layout.block_tables) + row * layout.block_tables.size(1);
      const T* keys = data<T>(cache.key) + head * head_stride;
      const T* values = data<T>(cache.value) + head * head_stride;
      for (int64_t from = 0; from < group; from += kMaxGroup) {
        const int64_t first_head = head * group + from;
        attend_heads<T>(
            std::min(kMaxGroup, group - from), packed.query + row * packed.stride + first_head * size,
            keys, values, blocks, block_stride, block_size, size,
            cache.pattern.first(context - 1), context, scale,
            data<T>(out) + (row * packed.num_heads + first_head) * size, scratch);
      }
    }
  });
}

// Additive mask [rows, length] for queries from `position` on and keys from `start` on.
inline at::Tensor chunk_mask(
    const Pattern& pattern, int64_t position, int64_t rows, int64_t start, int64_t length) {
  at::Tensor mask = at::full({rows, length}, -std::numeric_limits<float>::infinity());
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t from = pattern.first(position + row) - start;
    std::fill(
        data<float>(mask) + row * length + from,
        data<float>(mask) + row * length + position + row + 1 - start, 0.0f);
  }
  return mask;
}

// K or V [num_kv_heads, length, head_size] of positions `start` to `start + length`.
template <typename T>
at::Tensor gather(const at::Tensor& cache, const int64_t* blocks, int64_t start, int64_t length) {
  const int64_t num_heads = cache.size(1), block_size = cache.size(2), size = cache.size(3);
  at::Tensor rows = at::empty({num_heads, length, size}, cache.options());
  at::parallel_for(0, num_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      for (int64_t i = 0; i < length;) {
        const int64_t position = start + i, offset = position % block_size;
        const int64_t count = std::min(block_size - offset, length - i);
        std::memcpy(
            data<T>(rows) + (head * length + i) * size,
            data<T>(cache) + blocks[position / block_size] * cache.stride(0) +
                (head * block_size + offset) * size,
            count * size * sizeof(T));
        i += count;
      }
    }
  });
  return rows;
}

// The chunks' rows of `out`: each chunk of the step attends to all of its sequence it sees.
template <typename T>
void attend_chunks(
    const at::Tensor& query, const LayerCache& cache, const Layout& layout, double scale,
    at::Tensor& out) {
  const int64_t num_heads = query.size(1), num_kv_heads = cache.key.size(1);
  const int64_t* starts = data<int64_t>(layout.query_starts);
  for (int64_t index = layout.num_decodes; index < layout.context_lens.size(0); ++index) {
    const int64_t rows = starts[index + 1] - starts[index];
    const int64_t context = data<int64_t>(layout.context_lens)[index], position = context - rows;
    const int64_t start = cache.pattern.first(position);
    const int64_t* blocks = data<int64_t>(layout.block_tables) + index * layout.block_tables.size(1);
    const at::Tensor keys = gather<T>(cache.key, blocks, start, context - start).unsqueeze(0);
    const at::Tensor values = gather<T>(cache.value, blocks, start, context - start).unsqueeze(0);
    const bool is_causal = start == position && cache.pattern.first(context - 1) == start;
    c10::optional<at::Tensor> mask;
    if (!is_causal)
      mask = chunk_mask(cache.pattern, position, rows, start, context - start).to(query.scalar_type());
    const at::Tensor queries = query.narrow(0, starts[index], rows).transpose(0, 1).unsqueeze(0);
    const at::Tensor attended = at::scaled_dot_product_attention(
        queries, keys, values, mask, 0.0, is_causal, scale, num_heads != num_kv_heads);
    out.narrow(0, starts[index], rows)
        .view({rows, num_heads, -1})
        .copy_(attended.squeeze(0).transpose(0, 1));
  }
}

}  // namespace promptq
