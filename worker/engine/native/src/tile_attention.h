// Attention of a piece in tile registers, with K and V as they lie in the cache.
//
// A product sums over the numbers in its rows and over the pairs in its columns. Keys are rows: their
// numbers are summed over. Values are columns: positions are summed over, but the pairs that they lie
// in are two numbers of one position. So each weight goes in twice, once before a zero and once behind
// one, which gives the even and the odd numbers of the head.
#pragma once

#ifdef __AMX_BF16__
#include <ATen/ceil_div.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "elements.h"
#include "pieces.h"
#include "tiles.h"
#include "vectors.h"

namespace promptq {

class TileAttention {
 public:
  // `scratch` is reused.
  TileAttention(const Piece<Bf16>& piece, std::vector<float>& scratch)
      : piece_(piece), stretches_(piece.stretches()), begin_(whole_tile(piece.first())),
        num_scores_(whole_vectors(piece.last() - begin_)),
        num_spans_(at::ceil_div(piece.size, kTileInputs)), queries_each_(piece.queries_each()),
        num_columns_(queries_each_ <= kTileRows ? queries_each_ : whole_vectors(queries_each_)),
        num_sums_(at::ceil_div(queries_each_, kHalf) * kTileRows) {
    const int64_t num_heads = piece.num_kv_heads, num_queries = num_heads * queries_each_;
    const int64_t most_halves = at::ceil_div(queries_each_, kHalf);
    constexpr int64_t kFloats = kTileSize / 2, kFloatsOfLine = kLine / 2;  // of a tile, of a line
    const int64_t sums_size = num_heads * num_spans_ * num_sums_ * kTileRows;
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
      for (int64_t start = whole_tile(stretch.first); start < stretch.last; start += kTileRows)
        offsets_.push_back(piece.offset_in_cache(stretch, std::max(stretch.first, start)));
  }

  void run() {
    const int64_t num_heads = piece_.num_kv_heads;
    for (int64_t head = 0; head < num_heads; ++head) lay_out_queries(head);
    TileProducts products;
    for_tiles(
        piece_.keys,
        [&](int64_t num_queries) {
          products.configure(kTileRows, kTileRows, std::min(kTileRows, num_queries));
        },
        [&](const Stretch& stretch, int64_t start, int64_t head, const CacheTile& keys) {
          score(stretch, start, head, keys);
        });
    for (int64_t head = 0; head < num_heads; ++head)
      for (int64_t query = 0; query < queries_each_; ++query) {
        const int64_t position = piece_.position_of(query);
        softmax<Bf16>(
            scores_of(head, query), whole_vectors(piece_.last(query) - begin_),
            piece_.pattern.first(position) - begin_, position + 1 - begin_, piece_.scale);
      }
    for_tiles(
        piece_.values,
        [&](int64_t num_queries) {
          const int64_t num_rows = 2 * std::min(kHalf, num_queries);
          products.configure(num_rows, num_rows, kTileRows);
        },
        [&](const Stretch& stretch, int64_t start, int64_t head, const CacheTile& values) {
          accumulate(stretch, start, head, values);
        });
    for (int64_t head = 0; head < num_heads; ++head) store_sums(head);
  }

 private:
  static constexpr int64_t kHalf = kTileRows / 2;  // queries whose weights fill a tile
  static constexpr int64_t kNear = 1, kFar = 4;    // tiles ahead
  static_assert(kLanes == kTileRows, "Piece::find_rows finds those of a tile");

  // Rows of K or V for kTileRows positions, and those that come a little and a little more later.
  struct CacheTile {
    TilePlace rows;
    const Bf16 *near, *far;

    TilePlace at(int64_t span) const {
      return {static_cast<const Bf16*>(rows.first) + span * kTileInputs, rows.stride};
    }
    // A span's share of it.
    void read_ahead(int64_t span) const {
      promptq::read_ahead(near + span * kTileSize, far + span * kTileSize);
    }
  };

  // Call configure(num_queries) for each stretch, and work(stretch, start, head, rows) for each tile of
  // positions and each KV head, as they lie in memory.
  template <typename Configure, typename Work>
  void for_tiles(const Bf16* cache, const Configure& configure, const Work& work) {
    const int64_t num_heads = piece_.num_kv_heads, stride = piece_.head_stride;
    const int64_t num_tiles = offsets_.size();
    const auto ahead = [&](int64_t tile, int64_t head) {
      for (; head >= num_heads && tile + 1 < num_tiles; ++tile) head -= num_heads;
      return cache + offsets_[tile] + std::min(head, num_heads - 1) * stride;
    };
    int64_t tile = 0;
    for (const Stretch& stretch : stretches_) {
      configure(stretch.num_queries);
      for (int64_t start = whole_tile(stretch.first); start < stretch.last; start += kTileRows, ++tile) {
        const bool is_whole = piece_.size % kTileInputs == 0 && piece_.block_size % kTileRows == 0 &&
                              start >= stretch.first && start + kTileRows <= stretch.last;
        for (int64_t head = 0; head < num_heads; ++head) {
          const TilePlace rows =
              is_whole ? TilePlace{cache + offsets_[tile] + head * stride, bytes(piece_.size)}
                       : copy_rows(stretch, cache + head * stride, start);
          work(
              stretch, start, head,
              CacheTile{rows, ahead(tile, head + kNear), ahead(tile, head + kFar)});
        }
      }
    }
  }

  // What is not in one place, in whole spans, or not seen by any row, is copied: zero times what
  // nobody has written need not be zero.
  TilePlace copy_rows(const Stretch& stretch, const Bf16* head, int64_t start) {
    const Bf16* rows[kTileRows];
    piece_.find_rows(stretch, head, start, rows);
    const int64_t whole = num_spans_ * kTileInputs;
    for (int64_t row = 0; row < kTileRows; ++row) {
      std::copy_n(rows[row], piece_.size, copy_ + row * whole);
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
          const Bf16* query = piece_.query + piece_.offset_of(head, first + i);
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

  void score(const Stretch& stretch, int64_t start, int64_t head, const CacheTile& keys) {
    for_pairs(at::ceil_div(stretch.num_queries, kTileRows), [&](auto groups, int64_t group) {
      alignas(64) float scores[groups()][kTileRows * kTileRows];
      TileProducts::add<1, groups(), true>(
          num_spans_,
          [&](int64_t span, int64_t) {
            if (group == 0) keys.read_ahead(span);
            return keys.at(span);
          },
          [&](int64_t span, int64_t j) {
            const Bf16* columns = queries_at(head, span, stretch.query + (group + j) * kTileRows);
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
          store_vector(scores_of(head, stretch.query + first + i) + start - begin_, rows[i]);
      }
    });
  }

  void accumulate(const Stretch& stretch, int64_t start, int64_t head, const CacheTile& values) {
    const int64_t num_halves = at::ceil_div(stretch.num_queries, kHalf);
    for (int64_t half = 0; half < num_halves; ++half) lay_out_weights(stretch, start, head, half);
    for_pairs(num_halves, [&](auto halves, int64_t half) {
      for_pairs(num_spans_, [&](auto spans, int64_t span) {
        TileProducts::add<halves(), spans(), false>(
            1, [&](int64_t, int64_t i) { return TilePlace{weights_ + (half + i) * kTileSize}; },
            [&](int64_t, int64_t j) {
              if (half == 0) values.read_ahead(span + j);
              return values.at(span + j);
            },
            [&](int64_t i, int64_t j) {
              return sums_of(head, span + j, stretch.query + (half + i) * kHalf);
            },
            kTileRows * sizeof(float));
      });
    });
  }

  // Two rows of weights for each query: before zeros, and behind them.
  void lay_out_weights(const Stretch& stretch, int64_t start, int64_t head, int64_t half) {
    for (int64_t i = 0; i < std::min(kHalf, stretch.num_queries); ++i) {
      const int64_t query = half * kHalf + i;
      __m512i before = _mm512_setzero_si512();
      if (query < stretch.num_queries) {
        const auto* weights = reinterpret_cast<const Bf16*>(scores_of(head, stretch.query + query));
        before = _mm512_cvtepu16_epi32(load_as<__m256i>(weights + start - begin_));
      }
      Bf16* rows = weights_ + half * kTileSize + i * 2 * kTileInputs;
      _mm512_store_si512(rows, before);
      _mm512_store_si512(rows + kTileInputs, _mm512_slli_epi32(before, 16));
    }
  }

  void store_sums(int64_t head) const {
    for (int64_t query = 0; query < queries_each_; ++query)
      for (int64_t span = 0; span < num_spans_; ++span) {
        const float *even = sums_of(head, span, query), *odd = even + kTileRows;
        Bf16* out = piece_.out + piece_.offset_of(head, query) + span * kTileInputs;
        for (int64_t d = 0; d < std::min(kTileInputs, piece_.size - span * kTileInputs); ++d)
          store(out[d], (d % 2 ? odd : even)[d / 2]);
      }
  }

  // Call work(1 or 2, first) so that all of `count` are covered.
  template <typename Work>
  static void for_pairs(int64_t count, const Work& work) {
    int64_t first = 0;
    for (; first + 2 <= count; first += 2) work(std::integral_constant<int, 2>(), first);
    if (first < count) work(std::integral_constant<int, 1>(), first);
  }

  static int64_t bytes(int64_t count) { return count * sizeof(Bf16); }
  static int64_t whole_tile(int64_t position) { return position / kTileRows * kTileRows; }
  float* scores_of(int64_t head, int64_t query) const {
    return scores_ + (head * queries_each_ + query) * num_scores_;
  }
  float* sums_of(int64_t head, int64_t span, int64_t query) const {
    return sums_ + ((head * num_spans_ + span) * num_sums_ + 2 * query) * kTileRows;
  }
  Bf16* queries_at(int64_t head, int64_t span, int64_t query) const {
    return queries_ + ((head * num_spans_ + span) * kTileRows * num_columns_ + query) * 2;
  }

  const Piece<Bf16>& piece_;
  const std::vector<Stretch> stretches_;
  int64_t begin_, num_scores_, num_spans_;           // first position, then as below
  int64_t queries_each_, num_columns_, num_sums_;    // of a KV head; the last two with what pads them
  std::vector<int64_t> offsets_;  // of tiles of positions, in the cache
  float* sums_;     // [num_kv_heads, spans, num_sums, kTileRows], two rows a query
  float* scores_;   // [num_kv_heads * queries_each, num_scores], and then the weights
  Bf16* weights_;   // [halves] of tiles, at some positions
  Bf16* copy_;      // [kTileRows, spans * kTileInputs]
  Bf16* queries_;   // [num_kv_heads, spans, pairs, num_columns, 2]
};

}  // namespace promptq
#endif
