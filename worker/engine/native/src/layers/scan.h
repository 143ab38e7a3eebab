// Gated linear recurrences. A head has a state S [key size, value size]. A token with a query q, a key k, a
// value v, a decay a and a rate b reads o and changes the state. A decay may be a number for each key's number:
//
//   S' = a S + k c'    o = S'' q + skip v    c = b (v - a S' k) in the delta rule, otherwise c = b v
//
// Prompts are computed token by token, too. So a token's result depends on the state before it alone, to the
// last bit, and not on how steps cut the prompt. The chunked form, which GPUs use, needs as many operations
// in fp32. It helps only where products of coarse numbers are much faster, and a state needs finer ones.
// Columns of a state are independent, so some columns stay in the nearest cache for all tokens of a sequence.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear/row_groups.h"
#include "machine/buffer.h"
#include "machine/vectors.h"

namespace promptq {

// Independent sums: a processor begins the next sum before it has the one before.
constexpr int kKeysAtOnce = 4;

// The rows of a sequence for one value head. A query and a key have `key_stride` numbers, a multiple of
// kKeysAtOnce, with zeros after the key size. A value has `value_stride`, a multiple of kSpan.
struct ScanRows {
  const float *query, *key;   // [count, key_stride]
  float* value;               // [count, value_stride], replaced by what the rows read
  const float *decay, *rate;  // [count, decays_each], [count]
  float skip;
  int64_t count, num_known, key_size, value_size;
  int64_t decays_each;        // 1, or key_stride() with zeros after the key size

  int64_t key_stride() const { return round_up(key_size, kKeysAtOnce); }
  int64_t value_stride() const { return round_up(value_size, kSpan); }
};

// Changes some columns [key_stride, kSpan] of a state by one token. Returns what the token reads.
template <bool kIsDelta, bool kHasKeyDecays>
[[gnu::always_inline]] inline Pair scan_token(
    float* state, int64_t key_stride, const float* query, const float* key, const Pair& value,
    const float* decays, float rate, float skip) {
  const auto decay_of = [&](int64_t i) { return decays[kHasKeyDecays ? i : 0]; };
  Pair change = {rate * value.a, rate * value.b};
  if constexpr (kIsDelta) {
    Pair seen[kKeysAtOnce] = {};
    for (int64_t i = 0; i < key_stride; i += kKeysAtOnce)
      each<kKeysAtOnce>([&](auto j) __attribute__((always_inline)) {
        const Pair row = load_pair(state + (i + j) * kSpan);
        const float by = kHasKeyDecays ? decay_of(i + j) * key[i + j] : key[i + j];
        seen[j].a += by * row.a;
        seen[j].b += by * row.b;
      });
    const float decay = kHasKeyDecays ? 1.0f : *decays;
    change.a = rate * (value.a - decay * (seen[0].a + seen[1].a + (seen[2].a + seen[3].a)));
    change.b = rate * (value.b - decay * (seen[0].b + seen[1].b + (seen[2].b + seen[3].b)));
  }
  Pair read[kKeysAtOnce] = {};
  for (int64_t i = 0; i < key_stride; i += kKeysAtOnce)
    each<kKeysAtOnce>([&](auto j) __attribute__((always_inline)) {
      Pair row = load_pair(state + (i + j) * kSpan);
      row.a = decay_of(i + j) * row.a + key[i + j] * change.a;
      row.b = decay_of(i + j) * row.b + key[i + j] * change.b;
      store_pair(state + (i + j) * kSpan, row);
      read[j].a += query[i + j] * row.a;
      read[j].b += query[i + j] * row.b;
    });
  return {
      read[0].a + read[1].a + (read[2].a + read[3].a) + skip * value.a,
      read[0].b + read[1].b + (read[2].b + read[3].b) + skip * value.b};
}

// Computes the columns of span `index`. A head's state is stored span by span, each [key size, columns].
// `before` and `after` are its states; `memory` is [key_stride, kSpan].
template <bool kIsDelta, bool kHasKeyDecays>
void scan_span(const ScanRows& rows, int64_t index, const float* before, float* after, float* memory) {
  const int64_t key_stride = rows.key_stride(), value_stride = rows.value_stride();
  const int64_t first = index * kSpan, columns = std::min(kSpan, rows.value_size - first);
  const int64_t place = first * rows.key_size;
  std::fill_n(memory, key_stride * kSpan, 0.0f);
  for (int64_t i = 0; i < rows.key_size; ++i)
    std::copy_n(before + place + i * columns, columns, memory + i * kSpan);
  for (int64_t row = 0; row < rows.count; ++row) {
    float* value = rows.value + row * value_stride + first;
    store_pair(
        value, scan_token<kIsDelta, kHasKeyDecays>(
                   memory, key_stride, rows.query + row * key_stride, rows.key + row * key_stride,
                   load_pair(value), rows.decay + row * rows.decays_each, rows.rate[row], rows.skip));
    if (row + 1 != rows.num_known) continue;
    for (int64_t i = 0; i < rows.key_size; ++i)
      std::copy_n(memory + i * kSpan, columns, after + place + i * columns);
  }
}

}  // namespace promptq
