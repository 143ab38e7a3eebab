// Which rows of a step attend together, and what they read of the paged KV cache.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
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
struct Piece {
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

  int64_t offset_in_cache(int64_t position) const {  // of a position's first KV head
    return blocks[position / block_size] * block_stride + position % block_size * size;
  }

  // The first KV head's rows of kLanes positions from `start` on; a position that no row of the
  // piece sees is replaced by one that is seen.
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

constexpr int64_t kPieceRows = 16;  // rows that attend together, at most

// A step's pieces, those that take longest first, none much longer than a thread's share.
class Pieces {
 public:
  Pieces(const Layout& layout, const Pattern& pattern, int64_t num_kv_heads, int64_t num_threads)
      : layout_(layout), num_kv_heads_(num_kv_heads) {
    const int64_t* starts = data<int64_t>(layout.query_starts);
    std::vector<Part> whole;
    int64_t total = 0;
    for (int64_t sequence = 0; sequence < layout.context_lens.size(0); ++sequence)
      for (int64_t row = starts[sequence]; row < starts[sequence + 1]; row += kPieceRows) {
        Part part{sequence, row, std::min(kPieceRows, starts[sequence + 1] - row), 0, num_kv_heads};
        const int64_t position = position_of(part);
        part.cost = part.num_rows * (position + part.num_rows - pattern.first(position));
        total += part.cost;
        whole.push_back(part);
      }
    // Heads lie side by side in a block, so they stay together where that keeps nobody waiting.
    const int64_t share = total / (4 * num_threads) + 1;
    for (Part part : whole) {
      // The scores of many rows are large, and stay nearer head by head.
      const bool has_many = part.num_rows > kFewRows;
      const int64_t pieces = has_many ? num_kv_heads : std::min(num_kv_heads, part.cost / share + 1);
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
  Piece<T> at(
      int64_t index, const at::Tensor& query, const at::Tensor& out, const LayerCache& cache,
      float scale) const {
    const Part& part = parts_[index];
    const int64_t stride = query.size(1), size = cache.key.size(3);
    const int64_t group = stride / size / num_kv_heads_;
    const int64_t offset = part.row * stride + part.kv_head * group * size;
    const int64_t head_stride = cache.key.stride(1), in_block = part.kv_head * head_stride;
    return Piece<T>{
        data<T>(query) + offset, data<T>(out) + offset, stride, part.num_rows, position_of(part),
        data<T>(cache.key) + in_block, data<T>(cache.value) + in_block,
        data<int64_t>(layout_.block_tables) + part.sequence * layout_.block_tables.size(1),
        cache.key.stride(0), head_stride, cache.key.size(2),
        std::min(part.num_kv_heads, num_kv_heads_ - part.kv_head), group, size, cache.pattern,
        scale};
  }

 private:
  static constexpr int64_t kFewRows = 4;  // whose heads stay together

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
