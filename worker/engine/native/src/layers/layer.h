// A layer of a decoder: which norms, mixers and MLPs it has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "interface.h"
#include "layers/attention.h"
#include "layers/dense_mlp.h"
#include "layers/experts.h"
#include "layers/experts_beside.h"
#include "layers/latent_attention.h"
#include "layers/layer_inputs.h"
#include "layers/norm.h"
#include "layers/recurrence.h"
#include "layers/short_convolution.h"
#include "linear/linear.h"

namespace promptq {

template <typename T>
struct Layer {
  Layer(const LayerWeights& weights, int64_t size, int num_threads, WeightMemory* memory)
      : before_mixer(weights.before_mixer), after_mixer(weights.after_mixer), before_mlp(weights.before_mlp),
        after_mlp(weights.after_mlp), is_parallel(weights.is_parallel != 0),
        mixer_scale(static_cast<float>(weights.mixer_scale)),
        beside_scale(static_cast<float>(weights.beside_scale)),
        mlp_scale(static_cast<float>(weights.mlp_scale)),
        output_scale(static_cast<float>(weights.output_scale)) {
    const auto make = [&]<typename Part, typename Weights>(std::unique_ptr<Part>& part, const Weights* given) {
      if (given) part = std::make_unique<Part>(*given, size, num_threads, memory);
    };
    make(attention, weights.attention);
    make(latent, weights.latent);
    make(convolution, weights.convolution);
    make(recurrence, weights.recurrence);
    make(mlp, weights.mlp);
    make(experts, weights.experts);
    make(experts_beside, weights.experts_beside);
    make(input, weights.input);
  }

  Norm before_mixer, after_mixer, before_mlp, after_mlp;
  bool is_parallel;
  float mixer_scale, beside_scale, mlp_scale, output_scale;
  std::unique_ptr<Attention<T>> attention;  // see LayerWeights
  std::unique_ptr<LatentAttention<T>> latent;
  std::unique_ptr<ShortConvolution<T>> convolution;
  std::unique_ptr<Recurrence<T>> recurrence;
  std::unique_ptr<DenseMlp<T>> mlp;
  std::unique_ptr<Experts<T>> experts;
  std::unique_ptr<ExpertsBeside<T>> experts_beside;
  std::unique_ptr<LayerInput<T>> input;
  size_t pieces = 0;  // the index of the attention's pieces in a step

  // The cache of the layer's attention; null if the layer has none.
  const LayerCache* cache() const {
    return attention ? &attention->cache() : latent ? &latent->cache() : nullptr;
  }
  int64_t group() const { return attention ? attention->group() : latent->group(); }

  // Whether the pieces of a step are the same for both layers, which attend.
  bool has_pieces_of(const Layer& other) const {
    const LayerCache &one = *cache(), &two = *other.cache();
    return group() == other.group() && one.num_kv_heads == two.num_kv_heads &&
           one.block_size == two.block_size && one.pattern.kind == two.pattern.kind &&
           one.pattern.size == two.pattern.size;
  }

  bool has_mixer() const { return attention || latent || convolution || recurrence; }
  bool has_mlp() const { return mlp || experts; }
};

}  // namespace promptq
