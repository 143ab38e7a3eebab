// Rotations of heads by their positions (RoFormer).
#pragma once

#include <cstdint>

#include "machine/elements.h"

namespace promptq {

// Pairs of a head's numbers are rotated: `cosine` and `sine` are [positions, num_pairs]. Pairs are
// neighbours, or a number of the first half and its partner in the second half, as in Llama.
struct Rotation {
  const float *cosine, *sine;
  int64_t num_pairs, is_interleaved;  // no pairs: there is no rotation
};

// Rotates a head in place.
template <typename T>
void rotate_head(T* head, const Rotation& rotation, int64_t position) {
  const int64_t half = rotation.num_pairs;
  const float *cosine = rotation.cosine + position * half, *sine = rotation.sine + position * half;
  if (rotation.is_interleaved) {
#pragma omp simd
    for (int64_t d = 0; d < half; ++d) {
      const float first = load(head[2 * d]), second = load(head[2 * d + 1]);
      store(head[2 * d], first * cosine[d] - second * sine[d]);
      store(head[2 * d + 1], second * cosine[d] + first * sine[d]);
    }
    return;
  }
#pragma omp simd
  for (int64_t d = 0; d < half; ++d) {
    const float first = load(head[d]), second = load(head[d + half]);
    store(head[d], first * cosine[d] - second * sine[d]);
    store(head[d + half], second * cosine[d] + first * sine[d]);
  }
}

}  // namespace promptq
