// Activations of an MLP, computed in fp32 and rounded once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "machine/elements.h"
#include "machine/exponential.h"

namespace promptq {

// _ACTIVATIONS in decoders/native_weights.py has the same order.
enum class Activation : int64_t { kSilu, kGelu, kGeluTanh, kRelu, kSquaredRelu, kLimited, kXielu };

// Returns x / (1 + e^-by).
[[gnu::always_inline]] inline float gated(float x, float by) { return x / (1.0f + exponential(-by)); }

// Returns the error function with an error of at most 2e-7 (Abramowitz and Stegun, 7.1.26).
[[gnu::always_inline]] inline float error_function(float x) {
  const float t = 1.0f / (1.0f + 0.3275911f * std::fabs(x));
  float series = 1.061405429f;
  for (const float factor : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
    series = series * t + factor;
  return std::copysign(1.0f - series * t * exponential(-x * x), x);
}

// Returns e^x - 1 - x for x <= 0. Near 0, a series keeps the digits that the difference would lose.
[[gnu::always_inline]] inline float exponential_rest(float x) {
  float series = 1.0f / 40320;
  for (const float factor : {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f})
    series = series * x + factor;
  return x > -0.5f ? series * x * x : exponential(x) - 1.0f - x;
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

// out = g sigmoid(alpha g) (u + 1), where g and u are a gate and an up of at most `limit`, u at least -limit.
template <typename T>
void limited_gate_row(const T* gate, const T* up, float alpha, float limit, int64_t size, T* out) {
#pragma omp simd
  for (int64_t d = 0; d < size; ++d) {
    const float g = std::min(load(gate[d]), limit), u = std::min(std::max(load(up[d]), -limit), limit);
    store(out[d], gated(g, alpha * g) * (u + 1.0f));
  }
}

// `numbers` are alpha and limit of kLimited, or of kXielu the fields of XIELU in decoders/mlp_parts.py.
template <typename T>
void activate_row(
    Activation activation, const float* numbers, const T* gate, float scale, const T* up, int64_t size,
    T* out) {
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
    case Activation::kLimited: return limited_gate_row(gate, up, numbers[0], numbers[1], size, out);
    case Activation::kXielu: {
      const float positive = numbers[0], negative = numbers[1], slope = numbers[2], most = numbers[3];
      return row([=](float x) {
        const float below = std::min(x, most);
        const float curve =
            x > 0.0f ? positive * x * x : negative * (exponential_rest(below) + (below - x));
        return curve + slope * x;
      });
    }
  }
}

}  // namespace promptq
