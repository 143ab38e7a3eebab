// An e^x with which compilers can vectorise loops on any processor. The C library has few vector variants.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace promptq {

// Returns e^x with a relative error of at most 4e-7; e^-87 below -87, and e^88 above 88. The result is 2^n
// for the nearest n, times a Taylor series for the rest. Loops vectorise only if this call is inlined.
[[gnu::always_inline]] inline float exponential(float x) {
  constexpr float kLog2 = 0.693147180559945f;
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float n = std::rint(x * (1.0f / kLog2));
  const float r = x - n * kLog2;
  float series = 1.0f / 5040;
  for (const float factorial : {720.0f, 120.0f, 24.0f, 6.0f, 2.0f, 1.0f, 1.0f})
    series = series * r + 1.0f / factorial;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return series * power;
}

// Returns the hyperbolic tangent of x with a relative error of at most 4e-7.
[[gnu::always_inline]] inline float hyperbolic_tangent(float x) {
  const float square = x * x, magnitude = std::fabs(x);
  float series = -5.70498872745e-3f;
  for (const float factor : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f})
    series = series * square + factor;
  const float near = x + x * square * series;
  const float far = std::copysign(1.0f - 2.0f / (exponential(2.0f * magnitude) + 1.0f), x);
  return magnitude < 0.625f ? near : far;
}

// Returns ln(1 + e^x) with a relative error of at most 1e-6.
[[gnu::always_inline]] inline float softplus(float x) {
  const float power = exponential(-std::fabs(x));  // ln(1 + power) = 2 artanh(s)
  const float s = power / (2.0f + power), square = s * s;
  float series = 1.0f / 13;
  for (const float divisor : {11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) series = series * square + 1.0f / divisor;
  return std::max(x, 0.0f) + 2.0f * s * series;
}

}  // namespace promptq
