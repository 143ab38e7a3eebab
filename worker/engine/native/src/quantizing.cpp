// Rounds weights to 8 or 4 bits, and packs those of 4 bits. Threads share the rows. With 8 bits, the largest
// number of a group is 127 or -127 steps. With 4 bits, some step sizes are tried, and the one with the least
// squared error is used.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "guarded.h"
#include "interface.h"
#include "machine/buffer.h"
#include "machine/elements.h"
#include "machine/rounding.h"
#include "machine/team.h"

namespace promptq {

// Groups are padded with zeros to blocks of this size, whose loops the compiler unrolls.
constexpr int64_t kBlock = 32;

// Returns the number with the largest absolute value.
float extreme_of(const float* numbers, int64_t blocks) {
  float most = 0.0f, least = 0.0f;
  for (int64_t block = 0; block < blocks; ++block, numbers += kBlock)
#pragma omp simd reduction(max : most) reduction(min : least)
    for (int64_t i = 0; i < kBlock; ++i) {
      most = std::max(most, numbers[i]);
      least = std::min(least, numbers[i]);
    }
  return most > -least ? most : least;
}

float as_fp16(float number) {
  Fp16 half;
  store(half, number);
  return load(half);
}

// Returns the scale of a group in steps of -8 to 7, rounded to fp16 as scales are kept.
float scale_of_4_bits(const float* numbers, int64_t blocks) {
  const float extreme = extreme_of(numbers, blocks);
  float best = as_fp16(extreme / -8.0f), most_explained = 0.0f;
  // The largest number is `steps` steps. If that is out of range, it is cut off.
  for (float steps : {-8.0f, -7.4f, -8.6f}) {
    const float factor = extreme != 0.0f ? steps / extreme : 0.0f;
    float with_numbers = 0.0f, with_itself = 0.0f;
    for (int64_t block = 0; block < blocks; ++block)
#pragma omp simd reduction(+ : with_numbers, with_itself)
      for (int64_t i = block * kBlock; i < (block + 1) * kBlock; ++i) {
        const float step = rounded(numbers[i], factor, -8.0f, 7.0f);
        with_numbers += step * numbers[i];
        with_itself += step * step;
      }
    // The scale of least squared error is the quotient, and the error is less by this than that of zeros.
    const float explained = with_itself > 0.0f ? with_numbers * with_numbers / with_itself : 0.0f;
    if (explained > most_explained) {
      most_explained = explained;
      best = as_fp16(with_numbers / with_itself);
    }
  }
  return best;
}

// Rounds a row to `numbers` [columns] without a sign.
void quantize_row(
    const float* row, int64_t columns, int64_t bits, int64_t group, uint8_t* numbers, float* scales) {
  const float half = 1 << (bits - 1), lowest = bits == 8 ? -127.0f : -half;
  const int64_t blocks = ceil_div(std::min(group, columns), kBlock);
  std::vector<float> padded(blocks * kBlock);
  for (int64_t first = 0; first < columns; first += group, ++scales) {
    const int64_t count = std::min(group, columns - first);
    std::fill(std::copy_n(row + first, count, padded.begin()), padded.end(), 0.0f);
    *scales = bits == 8 ? std::fabs(extreme_of(padded.data(), blocks)) / 127.0f
                        : scale_of_4_bits(padded.data(), blocks);
    if (!std::isfinite(*scales)) throw std::invalid_argument("it has numbers too large for 4 bits");
    const float factor = *scales != 0.0f ? 1.0f / *scales : 0.0f;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i)
      numbers[first + i] = static_cast<int32_t>(rounded(padded[i], factor, lowest, half - 1.0f) + half);
  }
}

// Packs two of `numbers` [count] into each byte, the lower half first (quantization/int4_packing.py).
void pack_int4(const uint8_t* numbers, int64_t count, uint8_t* bytes) {
#pragma omp simd
  for (int64_t i = 0; i < count / 2; ++i) bytes[i] = numbers[2 * i] | numbers[2 * i + 1] << 4;
  if (count % 2) bytes[count / 2] = numbers[count - 1];
}

template <typename T>
void quantize_rows(
    const T* weight, int64_t rows, int64_t columns, int64_t bits, int64_t group, int num_threads,
    uint8_t* numbers, float* scales) {
  const int64_t row_bytes = (columns * bits + 7) / 8, num_groups = ceil_div(columns, group);
  Team::run(num_threads, [&](Team& team) {
    std::vector<float> row(columns);
    std::vector<uint8_t> halves(bits == 4 ? columns : 0);
    team.share(rows, [&](int64_t index) {
      for (int64_t i = 0; i < columns; ++i) row[i] = load(weight[index * columns + i]);
      if (!std::isfinite(largest_magnitude(row.data(), columns)))
        throw std::invalid_argument("it has a number that is not finite");
      uint8_t* to = numbers + index * row_bytes;
      quantize_row(
          row.data(), columns, bits, group, bits == 4 ? halves.data() : to, scales + index * num_groups);
      if (bits == 4) pack_int4(halves.data(), columns, to);
    });
  });
}

}  // namespace promptq

const char* quantize(
    int64_t is_bf16, const void* weight, int64_t rows, int64_t columns, int64_t bits, int64_t group,
    int64_t num_threads, uint8_t* numbers, float* scales) {
  return promptq::guarded([&] {
    promptq::with_type(is_bf16, weight, [&](const auto* from) {
      const int threads = static_cast<int>(num_threads);
      promptq::quantize_rows(from, rows, columns, bits, group, threads, numbers, scales);
    });
  });
}
