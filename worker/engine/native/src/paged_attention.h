// Attention over the paged KV cache, straight through the block tables.
//
// Neighbouring rows of a sequence attend together and read each K and V once. What is computed for
// a row, and in which order, depends on its own query and context alone, not on the rows beside it:
// the same bits come out for a decode, a drafted token and a row of a chunk.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
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
  at::Tensor query_starts, context_lens;   // [num_sequences + 1], [num_sequences]
  at::Tensor block_tables;                 // [num_sequences, max_blocks]
  at::Tensor write_blocks, write_offsets;  // [T]
};

// Some rows of one sequence and some neighbouring KV heads, which attend together.
template <typename T>
struct Tile {
  const T* query;  // first row, first query head
  T* out;          // likewise
  int64_t row_stride;
  int64_t num_rows, position;  // of the first row
  const T *keys, *values;      // of the first KV head in block 0
  const int64_t* blocks;
  int64_t block_stride, head_stride, block_size;
  int64_t num_kv_heads, group, size;
  Pattern pattern;
  float scale;

  int64_t first() const { return pattern.first(position); }
  int64_t last() const { return position + num_rows; }
  int64_t queries_each() const { return num_rows * group; }  // of a KV head
  int64_t offset_of(int64_t head, int64_t query) const {     // in `query` and `out`
    return query / group * row_stride + (head * group + query % group) * size;
  }

  // The first KV head's rows of kLanes positions from `start` on; a position that no row of the
  // tile sees is replaced by one that is seen.
  void find_rows(const T* head, int64_t start, const T** rows) const {
    const int64_t first_seen = first(), last_seen = last() - 1;
    const int64_t place = std::clamp(start, first_seen, last_seen);
    int64_t block = place / block_size, offset = place % block_size;
    for (int i = 0; i < kLanes; ++i) {
      rows[i] = head + blocks[block] * block_stride + offset * size;
      const bool is_seen = start + i >= first_seen && start + i < last_seen;
      if (is_seen && ++offset == block_size) offset = 0, ++block;
    }
  }
};

// scores[g * stride + i] = query[g] . rows[i] for kLanes keys.
template <int Group, int NumSpans, typename T>
void score(
    const Factor<T>* query, const T* const* rows, int64_t offset, int64_t size, float* scores,
    int64_t stride) {
  const int64_t num_spans = NumSpans ? NumSpans : spans_of(size);
  if (NumSpans) size = NumSpans * kSpan;
  Vector products[Group][kLanes];
  for (int i = 0; i < kLanes; ++i) {
    Vector sums[Group] = {};
    for (int64_t s = 0; s < num_spans; ++s) {
      T padded[kSpan];
      const T* key = whole_span(rows[i] + offset, s, size, padded);
#pragma GCC unroll 8
      for (int g = 0; g < Group; ++g) add_dot<T>(sums[g], query + (g * num_spans + s) * kSpan, key);
    }
#pragma GCC unroll 8
    for (int g = 0; g < Group; ++g) products[g][i] = sums[g];
  }
#pragma GCC unroll 8
  for (int g = 0; g < Group; ++g) store_vector(scores + g * stride, sum_each(products[g]));
}

// sums[g] += weights[g * stride + i] * rows[i] for kLanes values.
template <int Group, int NumSpans, typename T>
void accumulate(
    const Factor<T>* weights, const T* const* rows, int64_t offset, int64_t size, float* sums,
    int64_t stride) {
  // Spans whose sums fit into the registers; a number that the compiler knows, so that they stay.
  constexpr int kTile =
      std::max(1, std::min(NumSpans, kRegisters / (4 * std::max(2, Group))));
  const int64_t num_spans = NumSpans ? NumSpans : spans_of(size);
  if (NumSpans) size = NumSpans * kSpan;
  for (int64_t from = 0; from < num_spans; from += kTile) {
    Pair totals[Group][kTile];
#pragma GCC unroll 8
    for (int g = 0; g < Group; ++g)
#pragma GCC unroll 8
      for (int s = 0; s < kTile; ++s)
        totals[g][s] = load_pair(sums + (g * num_spans + from + s) * kSpan);
    for (int i = 0; i < kLanes; i += 2)
#pragma GCC unroll 8
      for (int s = 0; s < kTile; ++s) {
        T padded[2][kSpan];
        const TwoValues<T> values(
            whole_span(rows[i] + offset, from + s, size, padded[0]),
            whole_span(rows[i + 1] + offset, from + s, size, padded[1]));
#pragma GCC unroll 8
        for (int g = 0; g < Group; ++g) values.add_to(totals[g][s], weights + g * stride + i);
      }
#pragma GCC unroll 8
    for (int g = 0; g < Group; ++g)
#pragma GCC unroll 8
      for (int s = 0; s < kTile; ++s)
        store_pair(sums + (g * num_spans + from + s) * kSpan, totals[g][s]);
  }
}

// Calls work(std::integral_constant<int, Group>, first query) so that all queries are covered.
template <typename Work>
void in_groups(int64_t num_queries, const Work& work) {
  int64_t query = 0;
  for (; query + 4 <= num_queries; query += 4) work(std::integral_constant<int, 4>(), query);
  for (; query + 2 <= num_queries; query += 2) work(std::integral_constant<int, 2>(), query);
  for (; query < num_queries; ++query) work(std::integral_constant<int, 1>(), query);
}

// Calls work(group, query, i, rows, offset) for `Group` queries at a time, each kLanes positions from
// `begin` + i on and each KV head, whose rows lie `offset` behind `rows`. Block by block and through
// the heads within a block, as they lie in memory: what the processor reads ahead comes next.
template <typename T, typename Work>
void over_blocks(
    const Tile<T>& tile, const T* cache, int64_t begin, int64_t length, const Work& work) {
  const T* rows[kLanes];
  for (int64_t i = 0; i < length; i += kLanes) {
    tile.find_rows(cache, begin + i, rows);
    for (int64_t head = 0; head < tile.num_kv_heads; ++head)
      in_groups(tile.queries_each(), [&](auto group, int64_t query) {
        work(group, head * tile.queries_each() + query, i, rows, head * tile.head_stride);
      });
  }
}

// `scratch` is reused.
template <int NumSpans, typename T>
void attend(const Tile<T>& tile, std::vector<float>& scratch) {
  const int64_t size = tile.size, padded_size = spans_of(size) * kSpan;
  const int64_t queries_each = tile.queries_each(), num_queries = queries_each * tile.num_kv_heads;
  const int64_t begin = tile.first() / kLanes * kLanes;
  const int64_t length = (tile.last() - begin + kLanes - 1) / kLanes * kLanes;
  scratch.assign(num_queries * (2 * padded_size + length), 0.0f);
  float* sums = scratch.data();                      // [num_queries, padded_size]
  float* scores = sums + num_queries * padded_size;  // [num_queries, length], and then the weights
  auto* queries = reinterpret_cast<Factor<T>*>(scores + num_queries * length);  // likewise as sums

  for (int64_t query = 0; query < num_queries; ++query)
    lay_out(
        tile.query + tile.offset_of(query / queries_each, query % queries_each), size,
        queries + query * padded_size);
  over_blocks(tile, tile.keys, begin, length, [&](auto group, int64_t query, int64_t i,
                                                  const T* const* rows, int64_t offset) {
    score<group(), NumSpans>(
        queries + query * padded_size, rows, offset, size, scores + query * length + i, length);
  });
  for (int64_t query = 0; query < num_queries; ++query) {
    const int64_t position = tile.position + query % queries_each / tile.group;
    softmax<Factor<T>>(
        scores + query * length, length, tile.pattern.first(position) - begin,
        position + 1 - begin, tile.scale);
  }
  over_blocks(tile, tile.values, begin, length, [&](auto group, int64_t query, int64_t i,
                                                    const T* const* rows, int64_t offset) {
    accumulate<group(), NumSpans>(
        reinterpret_cast<const Factor<T>*>(scores + query * length) + i, rows, offset, size,
        sums + query * padded_size, length * sizeof(float) / sizeof(Factor<T>));
  });
  for (int64_t query = 0; query < num_queries; ++query) {
    T* out = tile.out + tile.offset_of(query / queries_each, query % queries_each);
    for (int64_t place = 0; place < padded_size; ++place)
      if (const int64_t d = place / kSpan * kSpan + TwoValues<T>::index_of(place % kSpan); d < size)
        store(out[d], sums[query * padded_size + place]);
  }
}

template <typename T>
void attend_sized(const Tile<T>& tile, std::vector<float>& scratch) {
  switch (tile.size) {  // the usual ones, known to the compiler
    case 64: return attend<64 / kSpan>(tile, scratch);
    case 128: return attend<128 / kSpan>(tile, scratch);
    default: return attend<0>(tile, scratch);
  }
}

constexpr int64_t kTileRows = 16;  // rows that attend together, at most

// A step's tiles, those that take longest first, none much longer than a thread's share.
class Tiles {
 public:
  Tiles(const Layout& layout, const Pattern& pattern, int64_t num_kv_heads, int64_t num_threads)
      : layout_(layout), num_kv_heads_(num_kv_heads) {
    const int64_t* starts = data<int64_t>(layout.query_starts);
    std::vector<Part> whole;
    int64_t total = 0;
    for (int64_t sequence = 0; sequence < layout.context_lens.size(0); ++sequence)
      for (int64_t row = starts[sequence]; row < starts[sequence + 1]; row += kTileRows) {
        Part part{sequence, row, std::min(kTileRows, starts[sequence + 1] - row), 0, num_kv_heads};
        const int64_t position = position_of(part);
        part.cost = part.num_rows * (position + part.num_rows - pattern.first(position));
        total += part.cost;
        whole.push_back(part);
      }
    // Heads lie side by side in a block, so they stay together where that keeps nobody waiting.
    const int64_t share = total / (4 * num_threads) + 1;
    for (Part part : whole) {
      const int64_t pieces = std::min(num_kv_heads, part.cost / share + 1);
      part.num_kv_heads = (num_kv_heads + pieces - 1) / pieces;
      part.cost /= pieces;
      for (; part.kv_head < num_kv_heads; part.kv_head += part.num_kv_heads) parts_.push_back(part);
    }
    std::stable_sort(parts_.begin(), parts_.end(), [](const Part& one, const Part& other) {
      return one.cost > other.cost;
    });
  }

  int64_t count() const { return static_cast<int64_t>(parts_.size()); }

  // `query` and `out` are [T, num_heads * size].
  template <typename T>
  Tile<T> at(
      int64_t index, const at::Tensor& query, const at::Tensor& out, const LayerCache& cache,
      float scale) const {
    const Part& part = parts_[index];
    const int64_t stride = query.size(1), size = cache.key.size(3);
    const int64_t group = stride / size / num_kv_heads_;
    const int64_t offset = part.row * stride + part.kv_head * group * size;
    const int64_t head_stride = cache.key.stride(1), in_block = part.kv_head * head_stride;
    return Tile<T>{
        data<T>(query) + offset, data<T>(out) + offset, stride, part.num_rows, position_of(part),
        data<T>(cache.key) + in_block, data<T>(cache.value) + in_block,
        data<int64_t>(layout_.block_tables) + part.sequence * layout_.block_tables.size(1),
        cache.key.stride(0), head_stride, cache.key.size(2),
        std::min(part.num_kv_heads, num_kv_heads_ - part.kv_head), group, size, cache.pattern,
        scale};
  }

 private:
  struct Part {
    int64_t sequence, row, num_rows, kv_head, num_kv_heads, cost = 0;
  };

  int64_t position_of(const Part& part) const {
    return data<int64_t>(layout_.context_lens)[part.sequence] -
           (data<int64_t>(layout_.query_starts)[part.sequence + 1] - part.row);
  }

  const Layout& layout_;
  int64_t num_kv_heads_;
  std::vector<Part> parts_;
};

}  // namespace promptq
