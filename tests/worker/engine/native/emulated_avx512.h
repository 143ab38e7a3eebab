// AVX-512 with VNNI and bf16 in plain C++, for tests on processors without them: each intrinsic that the
// native code uses computes what Intel's manual says of its instruction. It is included before everything else.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace emulated {

template <typename T, typename V>
struct Lanes {
  T of[sizeof(V) / sizeof(T)];

  Lanes() = default;
  explicit Lanes(const V& vector) { std::memcpy(of, &vector, sizeof of); }

  V vector() const {
    V result;
    std::memcpy(&result, of, sizeof result);
    return result;
  }
};

// Each lane of the result is what `lane` gives for its index.
template <typename T, typename V, typename Lane>
V each_lane(const Lane& lane) {
  Lanes<T, V> result;
  for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(T)); ++i) result.of[i] = static_cast<T>(lane(i));
  return result.vector();
}

inline __m512i set1(int value) {
  return each_lane<int32_t, __m512i>([&](int) { return value; });
}

inline void store(void* place, const __m512i& vector) { std::memcpy(place, &vector, sizeof vector); }

inline __m512i widen_bytes(const __m256i& bytes) {
  const Lanes<uint8_t, __m256i> from(bytes);
  return each_lane<int16_t, __m512i>([&](int i) { return from.of[i]; });
}

inline __m512i widen_shorts(const __m256i& shorts) {
  const Lanes<uint16_t, __m256i> from(shorts);
  return each_lane<int32_t, __m512i>([&](int i) { return from.of[i]; });
}

inline __m512 widen_fp16(const __m256i& halves) {
  const Lanes<uint16_t, __m256i> from(halves);
  return each_lane<float, __m512>([&](int i) { return _cvtsh_ss(from.of[i]); });
}

inline __m512i shift_left(const __m512i& words, int count) {
  const Lanes<uint32_t, __m512i> from(words);
  return each_lane<uint32_t, __m512i>([&](int i) { return from.of[i] << count; });
}

// VPMADDWD
inline __m512i multiply_shorts(const __m512i& a, const __m512i& b) {
  const Lanes<int16_t, __m512i> left(a), right(b);
  return each_lane<int32_t, __m512i>([&](int i) {
    return left.of[2 * i] * right.of[2 * i] + left.of[2 * i + 1] * right.of[2 * i + 1];
  });
}

// VPMADDUBSW
inline __m512i multiply_bytes(const __m512i& a, const __m512i& b) {
  const Lanes<uint8_t, __m512i> left(a);
  const Lanes<int8_t, __m512i> right(b);
  return each_lane<int16_t, __m512i>([&](int i) {
    const int sum = left.of[2 * i] * right.of[2 * i] + left.of[2 * i + 1] * right.of[2 * i + 1];
    return sum > INT16_MAX ? INT16_MAX : sum < INT16_MIN ? INT16_MIN : sum;
  });
}

// VPDPBUSD
inline __m512i add_products_of_bytes(const __m512i& sums, const __m512i& a, const __m512i& b) {
  const Lanes<int32_t, __m512i> so_far(sums);
  const Lanes<uint8_t, __m512i> left(a);
  const Lanes<int8_t, __m512i> right(b);
  return each_lane<int32_t, __m512i>([&](int i) {
    int32_t sum = so_far.of[i];
    for (int j = 4 * i; j < 4 * i + 4; ++j) sum += left.of[j] * right.of[j];
    return sum;
  });
}

// VPUNPCKLWD and VPUNPCKHWD
inline __m512i unpack(const __m512i& a, const __m512i& b, int first) {
  const Lanes<int16_t, __m512i> left(a), right(b);
  return each_lane<int16_t, __m512i>([&](int i) {
    const int from = i / 8 * 8 + first + i % 8 / 2;
    return i % 2 ? right.of[from] : left.of[from];
  });
}

inline float widen_half(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

inline uint16_t round_to_half(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline __m256bh round_16(const __m512& numbers) {
  const Lanes<float, __m512> from(numbers);
  return each_lane<uint16_t, __m256bh>([&](int i) { return round_to_half(from.of[i]); });
}

inline __m512bh round_32(const __m512& high, const __m512& low) {
  const Lanes<float, __m512> upper(high), lower(low);
  return each_lane<uint16_t, __m512bh>(
      [&](int i) { return round_to_half(i < 16 ? lower.of[i] : upper.of[i - 16]); });
}

// VDPBF16PS: the second of each pair first
inline __m512 add_products_of_halves(const __m512& sums, const __m512bh& a, const __m512bh& b) {
  const Lanes<float, __m512> so_far(sums);
  const Lanes<uint16_t, __m512bh> left(a), right(b);
  return each_lane<float, __m512>([&](int i) {
    const float sum = so_far.of[i] + widen_half(left.of[2 * i + 1]) * widen_half(right.of[2 * i + 1]);
    return sum + widen_half(left.of[2 * i]) * widen_half(right.of[2 * i]);
  });
}

}  // namespace emulated

#undef _mm512_slli_epi32
#define _mm512_set1_epi32(value) emulated::set1(value)
#define _mm512_setzero_si512() emulated::set1(0)
#define _mm512_store_si512(place, vector) emulated::store(place, vector)
#define _mm512_slli_epi32(words, count) emulated::shift_left(words, count)
#define _mm512_cvtepu8_epi16(bytes) emulated::widen_bytes(bytes)
#define _mm512_cvtepu16_epi32(shorts) emulated::widen_shorts(shorts)
#define _mm512_cvtph_ps(halves) emulated::widen_fp16(halves)
#define _mm512_madd_epi16(a, b) emulated::multiply_shorts(a, b)
#define _mm512_maddubs_epi16(a, b) emulated::multiply_bytes(a, b)
#define _mm512_dpbusd_epi32(sums, a, b) emulated::add_products_of_bytes(sums, a, b)
#define _mm512_unpacklo_epi16(a, b) emulated::unpack(a, b, 0)
#define _mm512_unpackhi_epi16(a, b) emulated::unpack(a, b, 4)
#define _mm512_cvtneps_pbh(numbers) emulated::round_16(numbers)
#define _mm512_cvtne2ps_pbh(high, low) emulated::round_32(high, low)
#define _mm512_dpbf16_ps(sums, a, b) emulated::add_products_of_halves(sums, a, b)
#ifndef __AVX512F__
#define __AVX512F__ 1
#define __AVX512BW__ 1
#endif
#ifdef EMULATED_VNNI
#define __AVX512VNNI__ 1
#endif
#ifdef EMULATED_BF16
#define __AVX512BF16__ 1
#endif
