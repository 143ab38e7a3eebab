// Attention over the paged KV cache, straight through the block tables. Neighbouring rows of a sequence
// attend together, and read each K and V once. The operations for a row and their order depend only on its
// query and context. So a decode, a drafted token and a row of a chunk have the same bits. (K and V must be
// finite, because positions that only other rows see have the weight zero.)
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention/cache_rows.h"
#include "attention/work_pieces.h"
#include "machine/elements.h"
#include "machine/vectors.h"

namespace promptq {

// scores[g * stride + i] = query[g] . rows[i] for kLanes keys.
template <int Group, int NumSpans, typename T>
void score(
    const Factor<T>* query, const T* const* rows, int64_t size, float* scores, int64_t stride) {
  const int64_t num_spans = NumSpans ? NumSpans : spans_of(size);
  if (NumSpans) size = NumSpans * kSpan;
  Vector products[Group][kLanes];
  for (int i = 0; i < kLanes; ++i) {
    Vector sums[Group] = {};
    for (int64_t s = 0; s < num_spans; ++s) {
      T padded[kSpan];
      const T* key = NumSpans ? rows[i] + s * kSpan : whole_span(rows[i], s, size, padded);
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
    const Factor<T>* weights, const T* const* rows, int64_t size, float* sums, int64_t stride) {
  // The number of spans whose sums fit into registers, a constant, so that the compiler keeps them there.
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
        const auto span_of = [&](int64_t row, T* copy) {
          return NumSpans ? rows[row] + (from + s) * kSpan : whole_span(rows[row], from + s, size, copy);
        };
        const TwoValues<T> values(span_of(i, padded[0]), span_of(i + 1, padded[1]));
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

// Calls work(group, query, i, rows) for each group of queries, each kLanes positions from `begin` + i on, and
// each KV head, in the order of memory: block by block, and within a block head by head. Reads the next rows
// ahead, because the processor does not know which block follows. Widens rows of integers to R in `widened`.
template <typename R, typename T, typename Work>
void over_blocks(
    const Piece<T>& piece, const std::vector<Stretch>& stretches, const uint8_t* cache, int64_t begin,
    R* widened, const Work& work) {
  const uint8_t *current[kLanes], *next[kLanes];
  const R* rows[kLanes];
  for (const Stretch& stretch : stretches) {
    const int64_t first = stretch.first / kLanes * kLanes;
    piece.find_rows(stretch, cache, first, next);
    for (int64_t start = first; start < stretch.last; start += kLanes) {
      std::copy_n(next, kLanes, current);
      piece.find_rows(stretch, cache, start + kLanes, next);
      for (int64_t head = 0; head < piece.num_kv_heads; ++head) {
        for (int64_t i = 0; i < kLanes; ++i) {
          const uint8_t* row = current[i] + head * piece.head_stride;
          for (int64_t byte = 0; byte < piece.position_stride; byte += kCacheLine)
            __builtin_prefetch(next[i] + head * piece.head_stride + byte);
          if (piece.is_int8) load_int8_row_of(piece, row, widened + i * piece.size);
          rows[i] = piece.is_int8 ? widened + i * piece.size : reinterpret_cast<const R*>(row);
        }
        in_groups(stretch.num_queries, [&](auto group, int64_t query) {
          work(group, head * piece.queries_each() + stretch.first_query + query, start - begin, rows);
        });
      }
    }
  }
}

// The parts of attend() that have the same code for all sizes of heads.
template <typename R, typename T>
struct Around {
  // Lays out the queries [num_queries, padded size]. `widened` is memory for one row.
  [[gnu::noinline]] static void lay_out_queries(const Piece<T>& piece, R* widened, Factor<R>* queries) {
    const int64_t size = piece.size;
    for (int64_t query = 0; query < piece.num_queries(); ++query, queries += spans_of(size) * kSpan) {
      const T* row = piece.query_at(query / piece.queries_each(), query % piece.queries_each());
      if constexpr (std::is_same_v<R, T>) {
        lay_out(row, size, queries);
      } else {
        for (int64_t d = 0; d < size; ++d) store(widened[d], load(row[d]));
        lay_out(widened, size, queries);
      }
    }
  }

  // Turns the scores [num_queries, length] into weights.
  [[gnu::noinline]] static void weigh(const Piece<T>& piece, int64_t begin, int64_t length, float* scores) {
    for (int64_t query = 0; query < piece.num_queries(); ++query)
      piece.template weigh<Factor<R>>(
          query / piece.queries_each(), query % piece.queries_each(), begin, scores + query * length);
  }

  // Rounds the sums [num_queries, padded size] to their places.
  [[gnu::noinline]] static void place_output(const Piece<T>& piece, const float* sums) {
    const int64_t size = piece.value_size, padded_size = spans_of(size) * kSpan;
    for (int64_t query = 0; query < piece.num_queries(); ++query, sums += padded_size) {
      T* out = piece.out_at(query / piece.queries_each(), query % piece.queries_each());
      for (int64_t place = 0; place < padded_size; ++place)
        if (const int64_t d = place / kSpan * kSpan + TwoValues<R>::index_of(place % kSpan); d < size)
          store(out[d], sums[place]);
    }
  }
};

// Computes attention of one piece over cache rows of type R, or of integers widened to R. Reuses `scratch`.
template <int KeySpans, int ValueSpans, typename R, typename T>
void attend(const Piece<T>& piece, std::vector<float>& scratch) {
  const std::vector<Stretch> stretches = piece.stretches();
  const int64_t size = piece.size, num_queries = piece.num_queries();
  const int64_t padded_size = spans_of(size) * kSpan, padded_value_size = spans_of(piece.value_size) * kSpan;
  const int64_t begin = piece.begin(), length = piece.num_scores();
  scratch.assign(num_queries * (padded_size + padded_value_size + length) + kLanes * size, 0.0f);
  float* sums = scratch.data();                            // [num_queries, padded_value_size]
  float* scores = sums + num_queries * padded_value_size;  // [num_queries, length], and then the weights
  auto* queries = reinterpret_cast<Factor<R>*>(scores + num_queries * length);  // [num_queries, padded_size]
  auto* widened = reinterpret_cast<R*>(scores + num_queries * (length + padded_size));  // [kLanes, size]

  Around<R, T>::lay_out_queries(piece, widened, queries);
  over_blocks(piece, stretches, piece.keys, begin, widened, [&](auto group, int64_t query, int64_t i,
                                                                const R* const* rows) {
    score<group(), KeySpans>(
        queries + query * padded_size, rows, size, scores + query * length + i, length);
  });
  Around<R, T>::weigh(piece, begin, length, scores);
  over_blocks(piece, stretches, piece.values, begin, widened, [&](auto group, int64_t query, int64_t i,
                                                                  const R* const* rows) {
    accumulate<group(), ValueSpans>(
        reinterpret_cast<const Factor<R>*>(scores + query * length) + i, rows, piece.value_size,
        sums + query * padded_value_size, length * sizeof(float) / sizeof(Factor<R>));
  });
  Around<R, T>::place_output(piece, sums);
}

template <typename R, typename T>
void attend_over(const Piece<T>& piece, std::vector<float>& scratch) {
  if (piece.size != piece.value_size) {  // latents, usually of these sizes
    if (piece.size == 576 && piece.value_size == 512) return attend<576 / kSpan, 512 / kSpan, R>(piece, scratch);
    return attend<0, 0, R>(piece, scratch);
  }
  switch (piece.size) {  // the usual sizes, as constants
    case 64: return attend<64 / kSpan, 64 / kSpan, R>(piece, scratch);
    case 128: return attend<128 / kSpan, 128 / kSpan, R>(piece, scratch);
    case 256: return attend<256 / kSpan, 256 / kSpan, R>(piece, scratch);
    default: return attend<0, 0, R>(piece, scratch);
  }
}

// Returns false without tile registers. Defined in tiles.cpp.
bool attend_in_tiles(const Piece<Bf16>& piece, std::vector<float>& scratch);

template <typename T>
void attend_sized(const Piece<T>& piece, std::vector<float>& scratch) {
  if constexpr (std::is_same_v<T, Bf16>)
    if (attend_in_tiles(piece, scratch)) return;
  if (piece.is_int8)
    attend_over<Factor<T>>(piece, scratch);
  else
    attend_over<T>(piece, scratch);
}

}  // namespace promptq
