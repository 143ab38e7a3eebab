// Activations of an MLP, computed in fp32 and rounded once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "machine/elements.h"
#include "machine/exponential.h"

namespace promptq {

// ACTIVATIONS in decoders/mlp_parts.py has the same order.
enum class Activation : int64_t { kSilu, kGelu, kGeluTanh, kRelu, kSquaredRelu };

// Returns x / (1 + e^-by).
inline float gated(float x, float by) { return x / (1.0f + exponential(-by)); }

// Returns the error function with an error of at most 2e-7 (Abramowitz and Stegun, 7.1.26).
inline float error_function(float x) {
  const float t = 1.0f / (1.0f + 0.3275911f * std::fabs(x));
  float series = 1.061405429f;
  for (const float factor : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
    series = series * t + factor;
  return std::copysign(1.0f - series * t * exponential(-x * x), x);
}

// out = activation(scale * gate) * up, or without `up` the activation alone.
template <typename T, typename Activate>
void activate_row_with(
    const T* gate, float scale, const T* up, int64_t size, T* out, const Activate& activate) {
  if (up == nullptr) {
#pragma omp simd
    for (int64_t d = 0; d < size; ++d) store(out[d], activate(scale * load(gate[d])));
    return;
  }
#pragma omp simd
  for (int64_t d = 0; d < size; ++d) store(out[d], activate(scale * load(gate[d])) * load(up[d]));
}

template <typename T>
void activate_row(Activation activation, const T* gate, float scale, const T* up, int64_t size, T* out) {
  const auto row = [&](const auto& activate) { activate_row_with(gate, scale, up, size, out, activate); };
  switch (activation) {
    case Activation::kSilu: return row([](float x) { return gated(x, x); });
    case Activation::kGelu:
      return row([](float x) { return 0.5f * x * (1.0f + error_function(x * 0.70710678f)); });
    case Activation::kGeluTanh:  // 1 + tanh(y) = 2 / (1 + e^-2y)
      return row([](float x) { return gated(x, 1.59576912f * (x + 0.044715f * x * x * x)); });
    case Activation::kRelu: return row([](float x) { return std::max(x, 0.0f); });
    case Activation::kSquaredRelu:
      return row([](float x) { return std::max(x, 0.0f) * std::max(x, 0.0f); });
  }
}

// out = g sigmoid(alpha g) (u + 1), where g and u are a gate and an up of at most `limit`, and u is at least
// -limit.
template <typename T>
void limited_gate_row(const T* gate, const T* up, float alpha, float limit, int64_t size, T* out) {
#pragma omp simd
  for (int64_t d = 0; d < size; ++d) {
    const float g = std::min(load(gate[d]), limit), u = std::min(std::max(load(up[d]), -limit), limit);
    store(out[d], gated(g, alpha * g) * (u + 1.0f));
  }
}

}  // namespace promptq
