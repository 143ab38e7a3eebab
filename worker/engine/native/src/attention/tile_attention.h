// Attention of a piece in tile registers, with K and V as they are in the cache. A product sums over the
// numbers in its rows and over the pairs in its columns. Keys are rows, so the sum is over their numbers.
// Values are columns, and the sum should be over positions, but a pair in the cache is two numbers of one
// position. So each weight is used twice: before a zero for the even numbers of the head, and after a zero
// for the odd numbers.
#pragma once

#ifdef __AMX_BF16__
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "attention/cache_rows.h"
#include "attention/work_pieces.h"
#include "machine/buffer.h"
#include "machine/elements.h"
#include "machine/tiles.h"
#include "machine/vectors.h"

namespace promptq {

class TileAttention {
 public:
  // `scratch` is reused memory.
  TileAttention(const Piece<Bf16>& piece, std::vector<float>& scratch)
      : piece_(piece), stretches_(piece.stretches()), begin_(piece.begin()),
        num_scores_(piece.num_scores()),
        num_spans_(ceil_div(piece.size, kTileInputs)), num_value_spans_(ceil_div(piece.value_size, kTileInputs)),
        queries_each_(piece.queries_each()),
        num_columns_(queries_each_ <= kTileRows ? queries_each_ : round_up(queries_each_, kTileRows)),
        num_sums_(2 * round_up(queries_each_, kHalf)) {
    const int64_t num_heads = piece.num_kv_heads, num_queries = num_heads * queries_each_;
    const int64_t most_halves = ceil_div(queries_each_, kHalf);
    constexpr int64_t kFloats = kTileSize / 2, kFloatsOfLine = kLine / 2;  // of a tile, of a line
    const int64_t sums_size = num_heads * num_value_spans_ * num_sums_ * kTileRows;
    const int64_t scores_size = num_queries * num_scores_;
    const int64_t queries_size = num_heads * num_spans_ * num_columns_ * kTileRows;
    scratch.resize(std::max<size_t>(
        scratch.size(),
        sums_size + scores_size + queries_size + (most_halves + num_spans_) * kFloats + kFloatsOfLine));
    const auto first = reinterpret_cast<uintptr_t>(scratch.data()) / sizeof(float);
    float* place = scratch.data() + kFloatsOfLine - first % kFloatsOfLine;
    const auto take = [&](int64_t count) { return std::exchange(place, place + count); };
    sums_ = take(sums_size);
    scores_ = take(scores_size);
    weights_ = reinterpret_cast<Bf16*>(take(most_halves * kFloats));
    copy_ = reinterpret_cast<Bf16*>(take(num_spans_ * kFloats));
    queries_ = reinterpret_cast<Bf16*>(take(queries_size));
    std::fill_n(sums_, sums_size, 0.0f);
    for (const Stretch& stretch : stretches_)
      for (int64_t start = stretch.first / kTileRows * kTileRows; start < stretch.last; start += kTileRows)
        tiles_.push_back(
            {stretch, start, piece.offset_in_cache(stretch, std::max(stretch.first, start))});
  }

  TileAttention(const TileAttention&) = delete;  // tiles refer to stretches
  TileAttention& operator=(const TileAttention&) = delete;

  void run() {
    const int64_t num_heads = piece_.num_kv_heads;
    for (int64_t head = 0; head < num_heads; ++head) lay_out_queries(head);
    TileProducts products;
    for_tiles(
        piece_.keys,
        [&](int64_t num_queries) {
          products.configure(kTileRows, kTileRows, std::min(kTileRows, num_queries));
        },
        [&](const Tile& tile, int64_t head, const CacheTile& keys) { score(tile, head, keys); });
    for (int64_t head = 0; head < num_heads; ++head)
      for (int64_t query = 0; query < queries_each_; ++query)
        piece_.weigh<Bf16>(head, query, begin_, scores_of(head, query));
    for_tiles(
        piece_.values,
        [&](int64_t num_queries) {
          const int64_t num_rows = 2 * std::min(kHalf, num_queries);
          products.configure(num_rows, num_rows, kTileRows);
        },
        [&](const Tile& tile, int64_t head, const CacheTile& values) { accumulate(tile, head, values); });
    for (int64_t head = 0; head < num_heads; ++head) store_sums(head);
  }

 private:
  static constexpr int64_t kHalf = kTileRows / 2;  // queries whose weights fill a tile
  static constexpr int64_t kNear = 1, kFar = 4;    // tiles ahead
  static_assert(kLanes == kTileRows, "Piece::find_rows finds those of a tile");
  static_assert(kSharingQueries <= kHalf, "a row's unshared positions need at most one tile of weights");

  // kTileRows positions of a stretch from `start` on, and the cache offset of the first head's rows.
  struct Tile {
    const Stretch& stretch;
    int64_t start, offset;
  };

  // Rows of K or V for kTileRows positions, and rows that are used soon (`near`) and later (`far`).
  struct CacheTile {
    TilePlace rows;
    const uint8_t *near, *far;

    TilePlace at(int64_t span) const {
      return {static_cast<const Bf16*>(rows.first) + span * kTileInputs, rows.stride};
    }
    // Reads a span's share of these rows ahead.
    void read_ahead(int64_t span) const {
#pragma GCC unroll 16
      for (int64_t i = span * kTileSize; i < (span + 1) * kTileSize; i += kLine)
        promptq::read_ahead(near + i * sizeof(Bf16), far + i * sizeof(Bf16));
    }
  };

  // Calls work(tile, head, rows) for all tiles and KV heads, in the order of memory, and
  // configure(num_queries) before the tiles of each stretch.
  template <typename Configure, typename Work>
  void for_tiles(const uint8_t* cache, const Configure& configure, const Work& work) {
    const int64_t num_heads = piece_.num_kv_heads, stride = piece_.head_stride;
    const int64_t num_tiles = tiles_.size();
    const auto ahead = [&](int64_t index, int64_t head) {
      for (; head >= num_heads && index + 1 < num_tiles; ++index) head -= num_heads;
      return cache + tiles_[index].offset + std::min(head, num_heads - 1) * stride;
    };
    const Stretch* configured = nullptr;
    for (int64_t index = 0; index < num_tiles; ++index) {
      const Tile& tile = tiles_[index];
      const Stretch& stretch = tile.stretch;
      if (std::exchange(configured, &stretch) != &stretch) configure(stretch.num_queries);
      const bool is_whole = !piece_.is_int8 && piece_.size % kTileInputs == 0 &&
                            piece_.block_size % kTileRows == 0 && tile.start >= stretch.first &&
                            tile.start + kTileRows <= stretch.last;
      for (int64_t head = 0; head < num_heads; ++head) {
        const TilePlace rows =
            is_whole ? TilePlace{cache + tile.offset + head * stride, piece_.position_stride}
                     : copy_rows(tile, cache + head * stride);
        work(tile, head, CacheTile{rows, ahead(index, head + kNear), ahead(index, head + kFar)});
      }
    }
  }

  // Copies a tile whose rows are scattered, are not whole spans, are integers, or are partly outside of the
  // stretch. Memory outside may be NaN, and zero times NaN is not zero.
  TilePlace copy_rows(const Tile& tile, const uint8_t* head) {
    const uint8_t* rows[kTileRows];
    piece_.find_rows(tile.stretch, head, tile.start, rows);
    const int64_t whole = num_spans_ * kTileInputs;
    for (int64_t row = 0; row < kTileRows; ++row) {
      if (piece_.is_int8)
        load_int8_row_of(piece_, rows[row], copy_ + row * whole);
      else
        std::memcpy(copy_ + row * whole, rows[row], bytes(piece_.size));
      std::fill_n(copy_ + row * whole + piece_.size, whole - piece_.size, Bf16(0));
    }
    return {copy_, bytes(whole)};
  }

  // A head's queries as columns: for each span [pairs, num_columns, 2].
  void lay_out_queries(int64_t head) {
    for (int64_t first = 0; first < num_columns_; first += kTileRows)
      for (int64_t span = 0; span < num_spans_; ++span) {
        Vector columns[kTileRows] = {};
        for (int64_t i = 0; i < std::min(kTileRows, queries_each_ - first); ++i) {
          const Bf16* query = piece_.query_at(head, first + i);
          Bf16 padded[kTileInputs];
          columns[i] = load_as<Vector>(whole_span(query, span, piece_.size, padded));
        }
        transpose(columns);
        for (int64_t pair = 0; pair < kTileRows; ++pair)
          std::memcpy(
              queries_at(head, span, first) + pair * 2 * num_columns_, &columns[pair],
              bytes(2 * std::min(kTileRows, num_columns_)));
      }
  }

  void score(const Tile& tile, int64_t head, const CacheTile& keys) {
    const Stretch& stretch = tile.stretch;
    for_pairs(ceil_div(stretch.num_queries, kTileRows), [&](auto groups, int64_t group) {
      alignas(64) float scores[groups()][kTileRows * kTileRows];
      TileProducts::add<1, groups(), true>(
          num_spans_,
          [&](int64_t span, int64_t) {
            if (group == 0) keys.read_ahead(span);
            return keys.at(span);
          },
          [&](int64_t span, int64_t j) {
            const Bf16* columns = queries_at(head, span, stretch.first_query + (group + j) * kTileRows);
            return TilePlace{columns, bytes(2 * num_columns_)};
          },
          [&](int64_t, int64_t j) { return scores[j]; }, kTileRows * sizeof(float));
      for (int64_t j = 0; j < groups(); ++j) {
        Vector rows[kTileRows];
        for (int64_t key = 0; key < kTileRows; ++key)
          rows[key] = load_as<Vector>(scores[j] + key * kTileRows);
        transpose(rows);
        const int64_t first = (group + j) * kTileRows;
        for (int64_t i = 0; i < std::min(kTileRows, stretch.num_queries - first); ++i)
          store_vector(scores_of(head, stretch.first_query + first + i) + tile.start - begin_, rows[i]);
      }
    });
  }

  void accumulate(const Tile& tile, int64_t head, const CacheTile& values) {
    const Stretch& stretch = tile.stretch;
    const int64_t num_halves = ceil_div(stretch.num_queries, kHalf);
    for (int64_t half = 0; half < num_halves; ++half) lay_out_weights(tile, head, half);
    for_pairs(num_halves, [&](auto halves, int64_t half) {
      for_pairs(num_value_spans_, [&](auto spans, int64_t span) {
        TileProducts::add<halves(), spans(), false>(
            1, [&](int64_t, int64_t i) { return TilePlace{weights_ + (half + i) * kTileSize}; },
            [&](int64_t, int64_t j) {
              if (half == 0) values.read_ahead(span + j);
              return values.at(span + j);
            },
            [&](int64_t i, int64_t j) {
              return sums_of(head, span + j, stretch.first_query + (half + i) * kHalf);
            },
            kTileRows * sizeof(float));
      });
    });
  }

  // Two rows of weights for each query: one with the weights before zeros, one with them after zeros.
  void lay_out_weights(const Tile& tile, int64_t head, int64_t half) {
    const Stretch& stretch = tile.stretch;
    for (int64_t i = 0; i < std::min(kHalf, stretch.num_queries); ++i) {
      const int64_t query = half * kHalf + i;
      __m512i before = _mm512_setzero_si512();
      if (query < stretch.num_queries) {
        const auto* weights = reinterpret_cast<const Bf16*>(scores_of(head, stretch.first_query + query));
        before = _mm512_cvtepu16_epi32(load_as<__m256i>(weights + tile.start - begin_));
      }
      Bf16* rows = weights_ + half * kTileSize + i * 2 * kTileInputs;
      _mm512_store_si512(rows, before);
      _mm512_store_si512(rows + kTileInputs, _mm512_slli_epi32(before, 16));
    }
  }

  void store_sums(int64_t head) const {
    for (int64_t query = 0; query < queries_each_; ++query)
      for (int64_t span = 0; span < num_value_spans_; ++span) {
        const float* sums = sums_of(head, span, query);  // of the even numbers, then of the odd ones
        Bf16* out = piece_.out_at(head, query) + span * kTileInputs;
        for (int64_t d = 0; d < std::min(kTileInputs, piece_.value_size - span * kTileInputs); ++d)
          store(out[d], sums[d % 2 * kTileRows + d / 2]);
      }
  }

  // Calls work(1 or 2, first) so that all of `count` are covered.
  template <typename Work>
  static void for_pairs(int64_t count, const Work& work) {
    int64_t first = 0;
    for (; first + 2 <= count; first += 2) work(std::integral_constant<int, 2>(), first);
    if (first < count) work(std::integral_constant<int, 1>(), first);
  }

  static int64_t bytes(int64_t count) { return count * sizeof(Bf16); }
  float* scores_of(int64_t head, int64_t query) const {
    return scores_ + (head * queries_each_ + query) * num_scores_;
  }
  float* sums_of(int64_t head, int64_t span, int64_t query) const {
    return sums_ + ((head * num_value_spans_ + span) * num_sums_ + 2 * query) * kTileRows;
  }
  Bf16* queries_at(int64_t head, int64_t span, int64_t query) const {
    return queries_ + ((head * num_spans_ + span) * kTileRows * num_columns_ + query) * 2;
  }

  const Piece<Bf16>& piece_;
  const std::vector<Stretch> stretches_;
  int64_t begin_, num_scores_, num_spans_, num_value_spans_;  // the piece's, and spans of K and of V
  int64_t queries_each_, num_columns_, num_sums_;  // of a KV head; the last two with padding
  std::vector<Tile> tiles_;
  float* sums_;    // [num_kv_heads, value spans, num_sums, kTileRows], two rows a query
  float* scores_;  // [num_kv_heads * queries_each, num_scores], and then the weights
  Bf16* weights_;  // [halves] of tiles, for some positions
  Bf16* copy_;     // [kTileRows, spans * kTileInputs]
  Bf16* queries_;  // [num_kv_heads, spans, pairs, num_columns, 2]
};

}  // namespace promptq
#endif
