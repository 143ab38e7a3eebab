// Groups of rows that are multiplied together, of a size that the compiler knows.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "machine/buffer.h"

namespace promptq {

// Calls work(std::integral_constant<int, value>), for a value from 1 to Most.
template <int Most, typename Work>
void with_constant(int64_t value, const Work& work) {
  if constexpr (Most > 1)
    if (value < Most) return with_constant<Most - 1>(value, work);
  work(std::integral_constant<int, Most>());
}

// Calls work(first row, group) for groups of at most `most` of all rows. Groups are as equal as possible,
// because a small group takes nearly as long as a large one.
template <typename Work>
void over_groups(int64_t rows, int64_t most, const Work& work) {
  const int64_t num_groups = ceil_div(rows, most);
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t row = rows * group / num_groups;
    work(row, rows * (group + 1) / num_groups - row);
  }
}

// Calls work(std::integral_constant<int, group>, first row) for the groups of over_groups().
template <int Most, typename Work>
void for_groups(int64_t rows, const Work& work) {
  over_groups(rows, Most, [&](int64_t row, int64_t group) {
    with_constant<Most>(group, [&](auto size) { work(size, row); });
  });
}

// Calls work(std::integral_constant<int, i>) for each i below Count. Sums at constant places stay in
// registers.
template <int Count, typename Work>
[[gnu::always_inline]] inline void each(const Work& work) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (work(std::integral_constant<int, I>()), ...);
  }(std::make_integer_sequence<int, Count>());
}

}  // namespace promptq
