// Tile registers in plain C++, for tests on processors without them: each intrinsic of machine/tiles.h
// computes what Intel's manual says of its instruction. It is included before everything else.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace emulated {

struct Tile {
  int64_t rows, row_bytes;
  alignas(64) unsigned char bytes[16][64];
};
inline thread_local Tile tiles[8];

inline float wide(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

inline void load_config(const void* place) {
  const auto* bytes = static_cast<const unsigned char*>(place);
  for (int i = 0; i < 8; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
    tiles[i] = Tile{bytes[48 + i], row_bytes, {}};
  }
}

inline void zero(Tile& tile) { std::memset(tile.bytes, 0, sizeof tile.bytes); }

inline void load(Tile& tile, const void* place, int64_t stride) {
  zero(tile);
  for (int64_t row = 0; row < tile.rows; ++row)
    std::memcpy(tile.bytes[row], static_cast<const char*>(place) + row * stride, tile.row_bytes);
}

inline void store(const Tile& tile, void* place, int64_t stride) {
  for (int64_t row = 0; row < tile.rows; ++row)
    std::memcpy(static_cast<char*>(place) + row * stride, tile.bytes[row], tile.row_bytes);
}

// TDPBF16PS
inline void add_products(Tile& sums, const Tile& a, const Tile& b) {
  for (int64_t row = 0; row < sums.rows; ++row) {
    float* sum = reinterpret_cast<float*>(sums.bytes[row]);
    const auto* left = reinterpret_cast<const uint16_t*>(a.bytes[row]);
    for (int64_t pair = 0; pair < a.row_bytes / 4; ++pair) {
      const auto* right = reinterpret_cast<const uint16_t*>(b.bytes[pair]);
      for (int64_t column = 0; column < sums.row_bytes / 4; ++column)
        for (int64_t half = 0; half < 2; ++half)
          sum[column] += wide(left[2 * pair + half]) * wide(right[2 * column + half]);
    }
  }
}

// TDPBSUD
inline void add_products_of_bytes(Tile& sums, const Tile& a, const Tile& b) {
  for (int64_t row = 0; row < sums.rows; ++row) {
    int32_t* sum = reinterpret_cast<int32_t*>(sums.bytes[row]);
    const auto* left = reinterpret_cast<const int8_t*>(a.bytes[row]);
    for (int64_t four = 0; four < a.row_bytes / 4; ++four)
      for (int64_t column = 0; column < sums.row_bytes / 4; ++column)
        for (int64_t i = 0; i < 4; ++i)
          sum[column] += left[4 * four + i] * b.bytes[four][4 * column + i];
  }
}

// has_tiles() asks the kernel for them.
template <typename... Arguments>
long ask(long number, Arguments... arguments) {
  return number == SYS_arch_prctl ? 0 : syscall(number, arguments...);
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig(place) emulated::load_config(place)
#define _tile_release() ((void)0)
#define _tile_zero(tile) emulated::zero(emulated::tiles[tile])
#define _tile_loadd(tile, place, stride) emulated::load(emulated::tiles[tile], place, stride)
#define _tile_stored(tile, place, stride) emulated::store(emulated::tiles[tile], place, stride)
#define _tile_dpbf16ps(sums, a, b) \
  emulated::add_products(emulated::tiles[sums], emulated::tiles[a], emulated::tiles[b])
#define _tile_dpbsud(sums, a, b) \
  emulated::add_products_of_bytes(emulated::tiles[sums], emulated::tiles[a], emulated::tiles[b])
#define syscall(...) emulated::ask(__VA_ARGS__)
