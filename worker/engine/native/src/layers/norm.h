// Norms of rows, computed in fp32 and rounded once.
#pragma once

#include <cmath>
#include <cstdint>

#include "machine/elements.h"

namespace promptq {

// `weight` and `bias` are [size]; no norm if `weight` is null, no bias if `bias` is null. `is_centered`: the
// mean is subtracted first, as in a LayerNorm.
struct Norm {
  const float *weight, *bias;
  double epsilon;
  int64_t is_centered;

  explicit operator bool() const { return weight != nullptr; }
};

// out[d] = row[d] / rms(row) * weight[d]
template <typename T>
void rms_norm_row(const T* row, const float* weight, float epsilon, int64_t size, T* out) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < size; ++d) sum += load(row[d]) * load(row[d]);
  const float scale = 1.0f / std::sqrt(sum / size + epsilon);
#pragma omp simd
  for (int64_t d = 0; d < size; ++d) store(out[d], load(row[d]) * scale * weight[d]);
}

// out[d] = (row[d] - mean(row)) / deviation(row) * weight[d] + bias[d]
template <typename T>
void layer_norm_row(const T* row, const Norm& norm, int64_t size, T* out) {
  float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < size; ++d) sum += load(row[d]);
  const float mean = sum / size;
#pragma omp simd reduction(+ : squares)
  for (int64_t d = 0; d < size; ++d) squares += (load(row[d]) - mean) * (load(row[d]) - mean);
  const float scale = 1.0f / std::sqrt(squares / size + static_cast<float>(norm.epsilon));
#pragma omp simd
  for (int64_t d = 0; d < size; ++d)
    store(out[d], (load(row[d]) - mean) * scale * norm.weight[d] + (norm.bias ? norm.bias[d] : 0.0f));
}

// `out` may be `row`.
template <typename T>
void norm_row(const T* row, const Norm& norm, int64_t size, T* out) {
  if (norm.is_centered)
    layer_norm_row(row, norm, size, out);
  else
    rms_norm_row(row, norm.weight, static_cast<float>(norm.epsilon), size, out);
}

}  // namespace promptq
