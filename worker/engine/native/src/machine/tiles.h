// The tile registers of processors that have them (AMX), and sums of products in them. Each sum adds its
// products in order and does not depend on the rows and columns beside it.
#pragma once

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "machine/elements.h"

namespace promptq {

// Whether Linux lets this process use tile registers. Processes must request them.
inline bool has_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // <asm/prctl.h>
  static const bool is_granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_granted;
}

constexpr int64_t kTileRows = 16;    // most rows of a tile
constexpr int64_t kTileInputs = 32;  // inputs that are multiplied and summed at a time
constexpr int64_t kTileSize = kTileRows * kTileInputs;
constexpr int64_t kLine = 64 / sizeof(Bf16);  // numbers in a cache line

// The place of a tile's rows, `stride` bytes apart.
struct TilePlace {
  const void* first;
  int64_t stride = kTileInputs * sizeof(Bf16);
};

// Starts to read the line at `near` into the first-level cache and the line at `far` into the second, because
// the first level alone allows too few requests at once. (Compilers remove calls of functions that use only
// the intrinsics, so this is in assembler.)
inline void read_ahead(const void* near, const void* far) {
  const auto *first = static_cast<const uint8_t*>(near), *second = static_cast<const uint8_t*>(far);
  asm volatile("prefetcht1 %1\n\tprefetcht0 %0" : : "m"(*first), "m"(*second));
}

// The numbers in tiles. kBf16: rows are [rows, kTileInputs], columns are [kTileInputs / 2, columns, 2], and
// the sums [rows, columns] are in fp32. kBytes: rows are [rows, 2 * kTileInputs] with a sign, columns are
// [kTileInputs / 2, columns, 4] without a sign, and the sums are integers of 32 bits.
enum class TileNumbers { kBf16, kBytes };

// Products of up to two tiles of rows with up to two tiles of columns. Each tile is read once for two
// products, which keeps the processor busiest. A thread has one TileProducts at a time.
class TileProducts {
 public:
  TileProducts() = default;
  ~TileProducts() { _tile_release(); }
  TileProducts(const TileProducts&) = delete;
  TileProducts& operator=(const TileProducts&) = delete;

  // Sets how many rows the first and the second tile of rows have, and how many columns the others.
  void configure(int64_t first_rows, int64_t second_rows, int64_t columns) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const auto set = [&](int tile, int64_t rows, int64_t row_bytes) {
      config.rows[tile] = static_cast<uint8_t>(std::max<int64_t>(1, rows));
      config.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
    };
    const int64_t width = columns * sizeof(float), inputs = kTileInputs * sizeof(Bf16);
    for (int tile : {0, 1}) set(tile, first_rows, width);
    for (int tile : {2, 3}) set(tile, second_rows, width);
    set(4, first_rows, inputs);
    set(5, second_rows, inputs);
    for (int tile : {6, 7}) set(tile, kTileInputs / 2, width);
    written();
    _tile_loadconfig(&config);
  }

  // Adds rows(step, i) times columns(step, j) of all steps to sums(i, j), or with FromZero to zero. The
  // functions return the places of the tiles. The rows of sums are `stride` bytes apart.
  template <
      int Rows, int Columns, bool FromZero, TileNumbers Numbers = TileNumbers::kBf16, typename RowsAt,
      typename ColumnsAt, typename SumsAt>
  [[gnu::always_inline]] static void add(
      int64_t num_steps, const RowsAt& rows, const ColumnsAt& columns, const SumsAt& sums,
      int64_t stride) {
    // The numbers of registers have to be written out.
#define PROMPTQ_MULTIPLY(sums, rows, columns)    \
  if constexpr (Numbers == TileNumbers::kBf16)   \
    _tile_dpbf16ps(sums, rows, columns);         \
  else                                           \
    _tile_dpbsud(sums, rows, columns)
    written();
    if constexpr (FromZero) {
      _tile_zero(0);
      if constexpr (Columns == 2) _tile_zero(1);
      if constexpr (Rows == 2) _tile_zero(2);
      if constexpr (Rows == 2 && Columns == 2) _tile_zero(3);
    } else {
      _tile_loadd(0, sums(0, 0), stride);
      if constexpr (Columns == 2) _tile_loadd(1, sums(0, 1), stride);
      if constexpr (Rows == 2) _tile_loadd(2, sums(1, 0), stride);
      if constexpr (Rows == 2 && Columns == 2) _tile_loadd(3, sums(1, 1), stride);
    }
    for (int64_t step = 0; step < num_steps; ++step) {
      const TilePlace column = columns(step, 0), row = rows(step, 0);
      _tile_loadd(6, column.first, column.stride);
      _tile_loadd(4, row.first, row.stride);
      PROMPTQ_MULTIPLY(0, 4, 6);
      if constexpr (Columns == 2) {
        const TilePlace second = columns(step, 1);
        _tile_loadd(7, second.first, second.stride);
        PROMPTQ_MULTIPLY(1, 4, 7);
      }
      if constexpr (Rows == 2) {
        const TilePlace second = rows(step, 1);
        _tile_loadd(5, second.first, second.stride);
        PROMPTQ_MULTIPLY(2, 5, 6);
        if constexpr (Columns == 2) {
          PROMPTQ_MULTIPLY(3, 5, 7);
        }
      }
    }
#undef PROMPTQ_MULTIPLY
    _tile_stored(0, sums(0, 0), stride);
    if constexpr (Columns == 2) _tile_stored(1, sums(0, 1), stride);
    if constexpr (Rows == 2) _tile_stored(2, sums(1, 0), stride);
    if constexpr (Rows == 2 && Columns == 2) _tile_stored(3, sums(1, 1), stride);
  }

 private:
  // Compilers do not know what the instructions above read, so all writes must be done here.
  static void written() { asm volatile("" ::: "memory"); }
};

}  // namespace promptq
#endif
