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
#include "vectors.h"

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

// One decode: a query row, and the context that it sees in some neighbouring KV heads.
template <typename T>
struct Decode {
  const T* query;         // [num_kv_heads * group, size]
  const T *keys, *values; // of the first KV head in block 0
  const int64_t* blocks;
  int64_t block_stride, head_stride, block_size;
  int64_t num_kv_heads, group, size;
  int64_t first, last;    // visible positions
  float scale;
  T* out;                 // like query

  // The rows of the first KV head for kLanes positions from `position` on; places behind the end
  // repeat the last row.
  void find_rows(const T* head, int64_t position, const T** rows) const {
    int64_t block = position / block_size, offset = position % block_size;
    for (int i = 0; i < kLanes; ++i) {
      rows[i] = head + blocks[block] * block_stride + offset * size;
      if (position + i + 1 < last && ++offset == block_size) offset = 0, ++block;
    }
  }
};

// scores[g * stride + lane] = q[g] . k for kLanes keys and `Group` query heads.
template <int Group, int NumVectors, typename T>
void score(
    const float* query, const T* const* rows, int64_t offset, int64_t size, float* scores,
    int64_t stride) {
  const int64_t num_vectors = NumVectors ? NumVectors : (size + kLanes - 1) / kLanes;
  if (NumVectors) size = NumVectors * kLanes;
  Vector products[Group][kLanes];
  for (int t = 0; t < kLanes; ++t) {
    Vector sums[Group] = {};
    for (int64_t v = 0; v < num_vectors; ++v) {
      const Vector key = load_vector(rows[t] + offset, v, size);
      for (int g = 0; g < Group; ++g)
        sums[g] += widen(query + (g * num_vectors + v) * kLanes) * key;
    }
    for (int g = 0; g < Group; ++g) products[g][t] = sums[g];
  }
  for (int g = 0; g < Group; ++g) {
    const Vector sums = sum_each(products[g]);
    std::memcpy(scores + g * stride, &sums, sizeof sums);
  }
}

// sums[g] += weights[g * stride + t] * v[t] for `count` values and `Group` query heads.
template <int Group, int NumVectors, typename T>
void accumulate(
    const float* weights, const T* const* rows, int64_t offset, int64_t size, int64_t count,
    float* sums, int64_t stride) {
  const int64_t num_vectors = NumVectors ? NumVectors : (size + kLanes - 1) / kLanes;
  if (NumVectors) size = NumVectors * kLanes;
  for (int64_t tile = 0; tile < num_vectors; tile += kTileVectors) {
    const int width = std::min<int64_t>(kTileVectors, num_vectors - tile);
    Vector totals[Group][kTileVectors] = {};
    for (int64_t t = 0; t < count; ++t)
      for (int v = 0; v < kTileVectors && v < width; ++v) {
        const Vector value = load_vector(rows[t] + offset, tile + v, size);
        for (int g = 0; g < Group; ++g) totals[g][v] += weights[g * stride + t] * value;
      }
    for (int g = 0; g < Group; ++g)
      for (int v = 0; v < width; ++v) {
        float* place = sums + (g * num_vectors + tile + v) * kLanes;
        const Vector sum = widen(place) + totals[g][v];
        std::memcpy(place, &sum, sizeof sum);
      }
  }
}

// Goes through the context block by block and through the heads within a block, as they lie in
// memory: what the processor reads ahead is then what comes next.
template <int Group, int NumVectors, typename T>
void attend(const Decode<T>& decode, std::vector<float>& scratch) {
  const int64_t size = decode.size, num_heads = decode.num_kv_heads * decode.group;
  const int64_t padded_size = (size + kLanes - 1) / kLanes * kLanes;
  const int64_t length = decode.last - decode.first;
  const int64_t padded = (length + kLanes - 1) / kLanes * kLanes;
  scratch.assign(num_heads * (2 * padded_size + padded), 0.0f);
  float* queries = scratch.data();                  // [num_heads, padded_size]
  float* sums = queries + num_heads * padded_size;  // [num_heads, padded_size]
  float* weights = sums + num_heads * padded_size;  // [num_heads, padded]
  const T* rows[kLanes];

  for (int64_t head = 0; head < num_heads; ++head)
    for (int64_t d = 0; d < size; ++d)
      queries[head * padded_size + d] = load(decode.query[head * size + d]) * decode.scale;
  for (int64_t i = 0; i < padded; i += kLanes) {
    decode.find_rows(decode.keys, decode.first + i, rows);
    for (int64_t head = 0; head < num_heads; head += Group)
      score<Group, NumVectors>(
          queries + head * padded_size, rows, head / decode.group * decode.head_stride, size,
          weights + head * padded + i, padded);
  }
  for (int64_t head = 0; head < num_heads; ++head) softmax(weights + head * padded, length, padded);
  for (int64_t i = 0; i < padded; i += kLanes) {
    decode.find_rows(decode.values, decode.first + i, rows);
    for (int64_t head = 0; head < num_heads; head += Group)
      accumulate<Group, NumVectors>(
          weights + head * padded + i, rows, head / decode.group * decode.head_stride, size,
          std::min<int64_t>(kLanes, length - i), sums + head * padded_size, padded);
  }
  for (int64_t head = 0; head < num_heads; ++head)
    for (int64_t d = 0; d < size; ++d)
      store(decode.out[head * size + d], sums[head * padded_size + d]);
}

template <int Group, typename T>
void attend_sized(const Decode<T>& decode, std::vector<float>& scratch) {
  switch (decode.size) {  // the usual ones, known to the compiler
    case 64: return attend<Group, 4>(decode, scratch);
    case 128: return attend<Group, 8>(decode, scratch);
    default: return attend<Group, 0>(decode, scratch);
  }
}

template <typename T>
void attend_grouped(const Decode<T>& decode, std::vector<float>& scratch) {
  if (decode.group % 4 == 0) return attend_sized<4>(decode, scratch);
  if (decode.group % 3 == 0) return attend_sized<3>(decode, scratch);
  if (decode.group % 2 == 0) return attend_sized<2>(decode, scratch);
  return attend_sized<1>(decode, scratch);
}

// The decodes' rows of `out` [T, num_heads * head_size]. Threads take rows in turns, or parts of
// rows where these are few.
template <typename T>
void attend_decodes(
    const Packed<T>& packed, const LayerCache& cache, const Layout& layout, float scale,
    at::Tensor& out) {
  const int64_t size = packed.head_size, block_size = cache.key.size(2);
  const int64_t group = packed.num_heads / packed.num_kv_heads;
  const int64_t num_threads = at::get_num_threads();
  const int64_t wanted = (2 * num_threads + layout.num_decodes - 1) / layout.num_decodes;
  const int64_t heads_each = std::max<int64_t>(1, packed.num_kv_heads / wanted);
  const int64_t parts = (packed.num_kv_heads + heads_each - 1) / heads_each;
  const int64_t num_items = layout.num_decodes * parts;
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min(num_items, num_threads), 1, [&](int64_t, int64_t) {
    std::vector<float> scratch;
    for (int64_t item = next++; item < num_items; item = next++) {
      const int64_t row = item / parts, head = item % parts * heads_each;
      const int64_t context = data<int64_t>(layout.context_lens)[row];
      const int64_t head_stride = block_size * size;
      attend_grouped(
          Decode<T>{
              packed.query + row * packed.stride + head * group * size,
              data<T>(cache.key) + head * head_stride,
              data<T>(cache.value) + head * head_stride,
              data<int64_t>(layout.block_tables) + row * layout.block_tables.size(1),
              cache.key.stride(0), head_stride, block_size,
              std::min(heads_each, packed.num_kv_heads - head), group, size,
              cache.pattern.first(context - 1), context, scale,
              data<T>(out) + (row * packed.num_heads + head * group) * size},
          scratch);
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
