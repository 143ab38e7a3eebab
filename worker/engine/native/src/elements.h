// Loads and stores of bf16 and fp32 as fp32, and the small row-wise operations of a decoder layer.
//
// The loops are plain, so that the compiler makes vectors of them for whatever processor it is on.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "exponential.h"

namespace promptq {

using Bf16 = uint16_t;

inline float load(float value) { return value; }

inline float load(Bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void store(float& place, float value) { place = value; }

// Rounds to the nearest, ties to even; what is not a number stays so.
inline void store(Bf16& place, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  place = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : static_cast<Bf16>(rounded);
}

template <typename T>
T* data(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// Rows that one thread takes at least; fewer are not worth waking another for.
constexpr int64_t kGrain = 8;

// out[d] = row[d] / rms(row) * weight[d], computed in fp32.
template <typename T>
void rms_norm_row(const T* row, const T* weight, float epsilon, int64_t size, T* out) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < size; ++d) sum += load(row[d]) * load(row[d]);
  const float scale = 1.0f / std::sqrt(sum / size + epsilon);
#pragma omp simd
  for (int64_t d = 0; d < size; ++d) store(out[d], load(row[d]) * scale * load(weight[d]));
}

// hidden += delta (where there is one); returns the norm of each row. [T, size] all.
template <typename T>
at::Tensor add_rms_norm(
    at::Tensor& hidden, const at::Tensor& delta, const at::Tensor& weight, float epsilon) {
  const int64_t size = hidden.size(1);
  at::Tensor normed = at::empty_like(hidden);
  at::parallel_for(0, hidden.size(0), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* x = data<T>(hidden) + row * size;
      if (delta.defined()) {
        const T* y = data<T>(delta) + row * size;
#pragma omp simd
        for (int64_t d = 0; d < size; ++d) store(x[d], load(x[d]) + load(y[d]));
      }
      rms_norm_row(x, data<T>(weight), epsilon, size, data<T>(normed) + row * size);
    }
  });
  return normed;
}

// [T, 2 * size] of gate and up gives [T, size]: silu(gate) * up.
template <typename T>
at::Tensor silu_and_multiply(const at::Tensor& gate_up) {
  const int64_t size = gate_up.size(1) / 2;
  at::Tensor out = at::empty({gate_up.size(0), size}, gate_up.options());
  at::parallel_for(0, gate_up.size(0), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = data<T>(gate_up) + row * 2 * size;
      const T* up = gate + size;
      T* y = data<T>(out) + row * size;
#pragma omp simd
      for (int64_t d = 0; d < size; ++d) {
        const float x = load(gate[d]);
        store(y[d], x / (1.0f + exponential(-x)) * load(up[d]));
      }
    }
  });
  return out;
}

// Rotate the first `rotary` dimensions of a head in place, each of the first half with its partner
// in the second (RoFormer, as Llama lays it out). `cosine` and `sine` hold `rotary` numbers.
template <typename T>
void rotate_row(T* head, const float* cosine, const float* sine, int64_t rotary) {
  const int64_t half = rotary / 2;
#pragma omp simd
  for (int64_t d = 0; d < half; ++d) {
    const float first = load(head[d]), second = load(head[d + half]);
    store(head[d], first * cosine[d] - second * sine[d]);
    store(head[d + half], second * cosine[d + half] + first * sine[d + half]);
  }
}

}  // namespace promptq
