// Products and attention in tile registers, apart from code that most kinds of processors share.
#include <memory>
#include <vector>

#include "attention/paged_attention.h"
#include "attention/tile_attention.h"
#include "interface.h"
#include "linear/linear.h"
#include "linear/tile_linear.h"
#include "machine/tiles.h"

bool has_tile_registers() {
#ifdef __AMX_BF16__
  return promptq::has_tiles();
#else
  return false;
#endif
}

namespace promptq {

#ifdef __AMX_BF16__
std::unique_ptr<Packed<Bf16>> pack_for_tiles(const Matrix& weight, WeightMemory& memory) {
  return has_tiles() ? std::make_unique<TileLinear>(weight, memory) : nullptr;
}

bool attend_in_tiles(const Piece<Bf16>& piece, std::vector<float>& scratch) {
  if (has_tiles()) TileAttention(piece, scratch).run();
  return has_tiles();
}
#else
std::unique_ptr<Packed<Bf16>> pack_for_tiles(const Matrix&, WeightMemory&) { return nullptr; }

bool attend_in_tiles(const Piece<Bf16>&, std::vector<float>&) { return false; }
#endif

}  // namespace promptq
