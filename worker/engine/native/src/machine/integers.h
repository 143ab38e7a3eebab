// Sums of products of small integers: weights of 8 or 4 bits without a sign, and inputs of 8 bits with one.
// Each lane of a register is one column. An operation takes two, four or eight inputs of a column. Sums are
// exact, so their order does not matter.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BW__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "machine/vectors.h"

namespace promptq {

typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));

inline Vector as_floats(const Integers& integers) { return __builtin_convertvector(integers, Vector); }

#if defined(__AVX512BW__)
using Register = __m512i;
inline Register spread(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
inline Register widen_bytes(const uint8_t* place) { return _mm512_cvtepu8_epi16(load_as<__m256i>(place)); }
inline Register multiply_shorts(Register a, Register b) { return _mm512_madd_epi16(a, b); }
inline Register multiply_bytes(Register a, Register b) { return _mm512_maddubs_epi16(a, b); }
#elif defined(__AVX2__)
using Register = __m256i;
inline Register spread(uint32_t word) { return _mm256_set1_epi32(static_cast<int>(word)); }
inline Register widen_bytes(const uint8_t* place) { return _mm256_cvtepu8_epi16(load_as<__m128i>(place)); }
inline Register multiply_shorts(Register a, Register b) { return _mm256_madd_epi16(a, b); }
inline Register multiply_bytes(Register a, Register b) { return _mm256_maddubs_epi16(a, b); }
#endif

// `kInputs` weights of each of kLanes columns, `kBytes` in all. A column's bytes follow each other. pack()
// converts a column's bytes from the order of Matrix. lay_out() converts a row's inputs to `kWords` words.
template <int Bits>
struct IntegerWeights;

#if defined(__AVX512VNNI__)
template <>
struct IntegerWeights<8> {
  static constexpr int64_t kInputs = 4, kBytes = 4 * kLanes, kWords = 1;

  static void pack(const uint8_t* weights, uint8_t* to) { std::memcpy(to, weights, 4); }

  static void lay_out(const int8_t* inputs, uint32_t* words) { std::memcpy(words, inputs, 4); }

  explicit IntegerWeights(const uint8_t* place) : bytes(load_as<Register>(place)) {}

  [[gnu::always_inline]] void add_to(Integers& sum, const uint32_t* words) const {
    sum = reinterpret_cast<Integers>(
        _mm512_dpbusd_epi32(reinterpret_cast<Register>(sum), bytes, spread(words[0])));
  }

  static Integers total(const Integers& sum) { return sum; }

  Register bytes;
};
#else
template <>
struct IntegerWeights<8> {
  static constexpr int64_t kInputs = 2, kBytes = 2 * kLanes, kWords = 1;

  static void pack(const uint8_t* weights, uint8_t* to) { std::memcpy(to, weights, 2); }

  static void lay_out(const int8_t* inputs, uint32_t* words) {
    words[0] = static_cast<uint16_t>(inputs[0]) | static_cast<uint32_t>(inputs[1]) << 16;
  }

#if defined(__AVX512BW__) || defined(__AVX2__)
  explicit IntegerWeights(const uint8_t* place) : shorts(widen_bytes(place)) {}

  [[gnu::always_inline]] void add_to(Integers& sum, const uint32_t* words) const {
    sum += reinterpret_cast<Integers>(multiply_shorts(shorts, spread(words[0])));
  }

  Register shorts;
#else
  explicit IntegerWeights(const uint8_t* place) {
    typedef uint16_t Pairs __attribute__((vector_size(2 * kLanes)));
    pairs = __builtin_convertvector(load_as<Pairs>(place), Integers);
  }

  [[gnu::always_inline]] void add_to(Integers& sum, const uint32_t* words) const {
    sum += (pairs & 255) * static_cast<int16_t>(words[0]) + (pairs >> 8) * static_cast<int16_t>(words[0] >> 16);
  }

  Integers pairs;
#endif

  static Integers total(const Integers& sum) { return sum; }
};
#endif

// The lower half of a byte has an input, the upper half the one four inputs later (in Matrix: the next one).
template <>
struct IntegerWeights<4> {
  static constexpr int64_t kInputs = 8, kBytes = 4 * kLanes, kWords = 2;

  static void pack(const uint8_t* weights, uint8_t* to) {
    const auto spread_halves = [](uint32_t four) {  // each into a separate byte
      four = (four | four << 8) & 0x00ff00ff;
      return (four | four << 4) & 0x0f0f0f0f;
    };
    const uint32_t all = load_as<uint32_t>(weights);
    const uint32_t word = spread_halves(all & 0xffff) | spread_halves(all >> 16) << 4;
    std::memcpy(to, &word, 4);
  }

  static void lay_out(const int8_t* inputs, uint32_t* words) { std::memcpy(words, inputs, 8); }

#if defined(__AVX512BW__) || defined(__AVX2__)
  explicit IntegerWeights(const uint8_t* place) {
    const Integers both = load_as<Integers>(place);
    low = reinterpret_cast<Register>(both & 0x0f0f0f0f);
    high = reinterpret_cast<Register>((both >> 4) & 0x0f0f0f0f);
  }

  Register low, high;
#else
  explicit IntegerWeights(const uint8_t* place) : both(load_as<Integers>(place)) {}

  Integers both;
#endif

#if defined(__AVX512VNNI__)
  [[gnu::always_inline]] void add_to(Integers& sum, const uint32_t* words) const {
    Register so_far = reinterpret_cast<Register>(sum);
    so_far = _mm512_dpbusd_epi32(so_far, low, spread(words[0]));
    sum = reinterpret_cast<Integers>(_mm512_dpbusd_epi32(so_far, high, spread(words[1])));
  }

  static Integers total(const Integers& sum) { return sum; }
#elif defined(__AVX512BW__) || defined(__AVX2__)
  // Two sums of 16 bits for each column hold the products of 32 inputs: 8 * 2 * 15 * 127 is below 2^15.
  [[gnu::always_inline]] void add_to(Integers& sum, const uint32_t* words) const {
    Shorts so_far = reinterpret_cast<Shorts>(sum);
    so_far += reinterpret_cast<Shorts>(multiply_bytes(low, spread(words[0])));
    so_far += reinterpret_cast<Shorts>(multiply_bytes(high, spread(words[1])));
    sum = reinterpret_cast<Integers>(so_far);
  }

  static Integers total(const Integers& sum) {
    return reinterpret_cast<Integers>(multiply_shorts(reinterpret_cast<Register>(sum), spread(0x00010001)));
  }
#else
  [[gnu::always_inline]] void add_to(Integers& sum, const uint32_t* words) const {
    for (int i = 0; i < 4; ++i) {
      sum += ((both >> 8 * i) & 15) * static_cast<int8_t>(words[0] >> 8 * i);
      sum += ((both >> (8 * i + 4)) & 15) * static_cast<int8_t>(words[1] >> 8 * i);
    }
  }

  static Integers total(const Integers& sum) { return sum; }
#endif
};

}  // namespace promptq
