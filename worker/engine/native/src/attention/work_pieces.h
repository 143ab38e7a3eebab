// Pieces of a step: rows that attend together, and the positions of the paged KV cache that they read.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "machine/buffer.h"
#include "machine/elements.h"
#include "machine/vectors.h"

namespace promptq {

// The positions that a query sees (Pattern in attention/types.py).
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

// How keys are scored (Scoring in attention/types.py). `softcap` 0 means no cap. `sinks` [heads] may be null.
struct Scoring {
  double scale, softcap;
  const float* sinks;
};

// One layer's K [num_blocks, num_kv_heads, block_size] of rows, and its V. A row has head_size of the model's
// numbers, or the format of cache_rows.h. Of V, the first value_size numbers are used. So in latent attention,
// the rows of K are those of V, too. The strides are in bytes.
struct LayerCache {
  void *keys, *values;
  int64_t num_kv_heads, block_size, head_size, value_size, block_stride, head_stride, position_stride, is_int8;
  Pattern pattern;
};

// The places of a step's rows (StepLayout in attention/types.py).
struct Layout {
  int64_t num_sequences, max_blocks;
  const int64_t *query_starts, *context_lens;    // [num_sequences + 1], [num_sequences]
  const int64_t* block_tables;                   // [num_sequences, max_blocks]
  const int64_t *write_blocks, *write_offsets;   // [T]
};

// A row of the step, and the blocks of its sequence.
struct Row {
  int64_t index, position;
  const int64_t* blocks;
};

// Positions in the blocks of one sequence, and the queries of each KV head that read them there.
struct Stretch {
  int64_t first, last;
  const int64_t* blocks;
  int64_t first_query, num_queries;
};

constexpr int64_t kSharingQueries = 8;  // most queries of a KV head in a row that may share

// Some rows and neighbouring KV heads that attend together. The rows are neighbours in one sequence, or one
// row each of sequences whose first `shared` positions are in the same blocks. `shared` is a multiple of
// kLanes, so that each position has the same lane for all rows. It includes the position of no row.
template <typename T>
struct Piece {
  const T* query;  // of the step's first row, the first query head
  T* out;          // likewise
  int64_t num_heads;  // of a row of the step
  const Row* rows;
  int64_t num_rows, shared;
  const uint8_t *keys, *values;  // of the first KV head in block 0
  int64_t block_stride, head_stride, position_stride;  // in bytes
  bool is_int8;
  int64_t block_size, num_kv_heads, group, size, value_size;
  Pattern pattern;
  Scoring scoring;  // with the sinks of these heads

  int64_t queries_each() const { return num_rows * group; }  // of a KV head
  int64_t num_queries() const { return queries_each() * num_kv_heads; }
  int64_t position_of(int64_t query) const { return rows[query / group].position; }
  const T* query_at(int64_t head, int64_t query) const { return this->query + place_of(head, query) * size; }
  T* out_at(int64_t head, int64_t query) const { return out + place_of(head, query) * value_size; }

  int64_t first() const {
    int64_t least = pattern.first(rows[0].position);
    for (int64_t row = 1; row < num_rows; ++row)
      least = std::min(least, pattern.first(rows[row].position));
    return least;
  }
  int64_t last() const {
    int64_t most = 0;
    for (int64_t row = 0; row < num_rows; ++row) most = std::max(most, rows[row].position + 1);
    return most;
  }

  // The scores of a query are whole vectors. The first of these has the score of first().
  int64_t begin() const { return first() / kLanes * kLanes; }
  int64_t num_scores() const { return round_up(last() - begin(), kLanes); }

  // Turns a query's scores into weights of type W. `begin` is begin().
  template <typename W>
  void weigh(int64_t head, int64_t query, int64_t begin, float* scores) const {
    const int64_t position = position_of(query);
    // A query has scores up to the position of the last row of its sequence.
    const int64_t last = (shared > 0 ? position : rows[num_rows - 1].position) + 1;
    const int64_t length = round_up(last - begin, kLanes);
    float scale = static_cast<float>(scoring.scale);
    if (const float cap = static_cast<float>(scoring.softcap); cap > 0.0f) {
      cap_scores(scores, length, scale, cap);
      scale = 1.0f;
    }
    softmax<W>(
        scores, length, pattern.first(position) - begin, position + 1 - begin, scale,
        scoring.sinks ? scoring.sinks + head * group + query % group : nullptr);
  }

  // Returns, by ascending position, the shared positions, then the other positions of each sequence.
  std::vector<Stretch> stretches() const {
    std::vector<Stretch> all;
    const int64_t first = this->first();
    if (first < shared) all.push_back({first, shared, rows[0].blocks, 0, queries_each()});
    for (int64_t row = 0, next; row < num_rows; row = next) {
      const Row& here = rows[row];
      for (next = row + 1; next < num_rows && rows[next].blocks == here.blocks;) ++next;
      all.push_back(
          {std::max(shared, pattern.first(here.position)), rows[next - 1].position + 1, here.blocks,
           row * group, (next - row) * group});
    }
    return all;
  }

  int64_t offset_in_cache(const Stretch& stretch, int64_t position) const {  // of its first KV head
    return stretch.blocks[position / block_size] * block_stride + position % block_size * position_stride;
  }

  // Sets `rows_at` to the first KV head's rows of kLanes positions from `start` on. Positions outside of the
  // stretch are replaced by ones inside.
  void find_rows(
      const Stretch& stretch, const uint8_t* head, int64_t start, const uint8_t** rows_at) const {
    const int64_t last = stretch.last - 1, place = std::clamp(start, stretch.first, last);
    int64_t block = place / block_size, offset = place % block_size;
    for (int i = 0; i < kLanes; ++i) {
      rows_at[i] = head + stretch.blocks[block] * block_stride + offset * position_stride;
      if (start + i >= stretch.first && start + i < last && ++offset == block_size) offset = 0, ++block;
    }
  }

 private:
  int64_t place_of(int64_t head, int64_t query) const {
    return rows[query / group].index * num_heads + head * group + query % group;
  }
};

// A step's pieces, longest first. None takes much longer than a thread's part of the work.
class Pieces {
 public:
  // `cache` is that of a layer for which these pieces are. `group` query heads have one KV head.
  Pieces(const Layout& layout, const LayerCache& cache, int64_t group, int64_t num_threads)
      : num_kv_heads_(cache.num_kv_heads), group_(group), block_size_(cache.block_size) {
    const int64_t *starts = layout.query_starts, *contexts = layout.context_lens;
    std::vector<Row> lone;
    for (int64_t sequence = 0; sequence < layout.num_sequences; ++sequence) {
      const int64_t count = starts[sequence + 1] - starts[sequence];
      Row row{
          starts[sequence], contexts[sequence] - count,
          layout.block_tables + sequence * layout.max_blocks};
      if (count == 1 && group <= kSharingQueries)
        lone.push_back(row);
      else
        for (int64_t i = 0; i < count; ++i, ++row.index, ++row.position) add(row, i % kPieceRows == 0);
    }
    add_sharing(lone, std::max<int64_t>(1, lone.size() * num_kv_heads_ / (4 * num_threads)));
    split(cache.pattern, num_threads);
  }

  int64_t count() const { return static_cast<int64_t>(parts_.size()); }

  // `query` is [T, num_heads, head_size], `out` [T, num_heads, value_size].
  template <typename T>
  Piece<T> at(
      int64_t index, const T* query, T* out, const LayerCache& cache, const Scoring& scoring) const {
    const Part& part = parts_[index];
    const int64_t size = cache.head_size, first_head = part.kv_head * group_;
    const int64_t in_block = part.kv_head * cache.head_stride;
    Scoring of_heads = scoring;
    if (scoring.sinks) of_heads.sinks += first_head;
    return Piece<T>{
        query + first_head * size, out + first_head * cache.value_size, num_kv_heads_ * group_,
        &rows_[part.first_row], part.num_rows, part.shared, static_cast<const uint8_t*>(cache.keys) + in_block,
        static_cast<const uint8_t*>(cache.values) + in_block, cache.block_stride, cache.head_stride,
        cache.position_stride, cache.is_int8 != 0, block_size_,
        std::min(part.num_kv_heads, num_kv_heads_ - part.kv_head), group_, size, cache.value_size,
        cache.pattern, of_heads};
  }

 private:
  static constexpr int64_t kPieceRows = 16;    // most rows that attend together
  static constexpr int64_t kFewRows = 4;       // most rows whose heads stay together
  static constexpr int64_t kLeastShared = 64;  // positions; it is faster to read fewer for each row
  static constexpr int64_t kLeastShare = 4;    // at least 1 in kLeastShare of a row's positions is shared

  struct Part {
    int64_t first_row, num_rows = 0, shared = 0, kv_head = 0, num_kv_heads = 0, cost = 0;
  };

  void add(const Row& row, bool begins_part) {
    if (begins_part) parts_.push_back(Part{static_cast<int64_t>(rows_.size())});
    ++parts_.back().num_rows;
    rows_.push_back(row);
  }

  // Adds one row each of several sequences, at most `most` to a part.
  void add_sharing(std::vector<Row>& lone, int64_t most) {
    const auto final_blocks = [&](const Row& row) { return row.position / block_size_; };  // without the last
    std::sort(lone.begin(), lone.end(), [&](const Row& one, const Row& other) {
      return std::lexicographical_compare(
          one.blocks, one.blocks + final_blocks(one), other.blocks, other.blocks + final_blocks(other));
    });
    const Row* before = nullptr;  // rows that share the most are side by side now
    for (const Row& row : lone) {
      int64_t shared = 0, least = kLeastShared;
      if (before != nullptr) {
        const int64_t count = std::min(final_blocks(row), final_blocks(*before));
        const auto differing = std::mismatch(row.blocks, row.blocks + count, before->blocks).first;
        shared = (differing - row.blocks) * block_size_ / kLanes * kLanes;
        if (parts_.back().num_rows > 1) shared = std::min(shared, parts_.back().shared);
        least = std::max(least, std::max(row.position, before->position) / kLeastShare);
      }
      // A row does not join rows that share more than twice as much without it.
      const bool joins = shared >= least && 2 * shared >= parts_.back().shared &&
                         parts_.back().num_rows < std::min(most, kPieceRows);
      add(row, !joins);
      if (joins) parts_.back().shared = shared;
      before = &row;
    }
  }

  // Heads are side by side in a block, so they stay together unless threads would have to wait.
  void split(const Pattern& pattern, int64_t num_threads) {
    int64_t total = 0;
    for (Part& part : parts_) {
      for (int64_t row = part.first_row; row < part.first_row + part.num_rows; ++row)
        part.cost += rows_[row].position + 1 - pattern.first(rows_[row].position);
      total += part.cost;
    }
    const int64_t share = total / (4 * num_threads) + 1;
    for (Part part : std::exchange(parts_, {})) {
      // The scores of many rows are large. Head by head, they stay in a nearer cache.
      const bool has_many = part.num_rows > kFewRows;
      const int64_t pieces = has_many ? num_kv_heads_ : std::min(num_kv_heads_, part.cost / share + 1);
      part.num_kv_heads = (num_kv_heads_ + pieces - 1) / pieces;
      part.cost /= pieces;
      for (; part.kv_head < num_kv_heads_; part.kv_head += part.num_kv_heads) parts_.push_back(part);
    }
    std::stable_sort(parts_.begin(), parts_.end(), [](const Part& one, const Part& other) {
      return one.cost > other.cost;
    });
  }

  int64_t num_kv_heads_, group_, block_size_;
  std::vector<Row> rows_;
  std::vector<Part> parts_;
};

}  // namespace promptq
