// The functions that Python calls for a decoder, and for its parts alone.
#include "interface.h"

#include <malloc.h>

#include <memory>
#include <vector>

#include "attention/paged_attention.h"
#include "decoder.h"
#include "guarded.h"
#include "layers/experts.h"
#include "linear/linear.h"
#include "machine/elements.h"
#include "machine/team.h"

const char* decoder_new(
    const promptq::ModelShape* shape, const promptq::ModelWeights* weights, int64_t num_threads,
    promptq::Decoder** decoder) {
  return promptq::guarded([&] {
    const int threads = static_cast<int>(num_threads);
    if (shape->is_bf16)
      *decoder = new promptq::DecoderOf<promptq::Bf16>(*shape, *weights, threads);
    else
      *decoder = new promptq::DecoderOf<float>(*shape, *weights, threads);
  });
}

void decoder_free(promptq::Decoder* decoder) { delete decoder; }

const char* decoder_add_layer(promptq::Decoder* decoder, const promptq::LayerWeights* weights) {
  return promptq::guarded([&] { decoder->add_layer(*weights); });
}

const char* decoder_run(promptq::Decoder* decoder, const promptq::Step* step) {
  return promptq::guarded([&] { decoder->run(*step); });
}

const char* decoder_add_head(promptq::Decoder* decoder, const promptq::HeadWeights* weights) {
  return promptq::guarded([&] { decoder->add_head(*weights); });
}

const char* decoder_draft(promptq::Decoder* decoder, const promptq::Draft* draft) {
  return promptq::guarded([&] { decoder->draft(*draft); });
}

void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

const char* paged_attention(
    int64_t is_bf16, const void* query, int64_t num_heads, const promptq::LayerCache* cache,
    const promptq::Layout* layout, const promptq::Scoring* scoring, void* out) {
  using namespace promptq;
  return guarded([&] {
    const Pieces pieces(*layout, *cache, num_heads / cache->num_kv_heads, 1);
    std::vector<float> scratch;
    with_type(is_bf16, query, [&]<typename T>(const T* rows) {
      for (int64_t index = 0; index < pieces.count(); ++index)
        attend_sized(pieces.at(index, rows, static_cast<T*>(out), *cache, *scoring), scratch);
    });
  });
}

const char* linear(
    int64_t is_bf16, int64_t in_tiles, const void* x, int64_t rows, const promptq::Weight* weight,
    int64_t outputs, int64_t inputs, const void* bias, void* y) {
  using namespace promptq;
  return guarded([&] {
    const Matrix numbers = matrix(*weight, outputs, inputs);
    WeightMemory memory;
    const auto multiply = [&]<typename T>(std::unique_ptr<Packed<T>> packed) {
      packed->multiply(
          static_cast<const T*>(x), rows, static_cast<const T*>(bias), static_cast<T*>(y), outputs);
    };
    if (!is_bf16)
      multiply(pack<float>(numbers, memory));
    else if (in_tiles || weight->scales)
      multiply(pack<Bf16>(numbers, memory));
    else
      multiply(std::unique_ptr<Packed<Bf16>>(new VectorLinear<Bf16>(numbers, memory)));
  });
}

const char* experts(
    int64_t is_bf16, int64_t is_packed, const void* x, int64_t rows, int64_t size,
    const promptq::ExpertWeights* weights, int64_t num_threads, void* y) {
  using namespace promptq;
  return guarded([&] {
    with_type(is_bf16, x, [&]<typename T>(const T* from) {
      WeightMemory packed;
      const Experts<T> mixture(*weights, size, num_threads, is_packed ? &packed : nullptr);
      ExpertsMemory<T> memory;
      mixture.reserve(rows, memory);
      Team::run(num_threads, [&](Team& team) {
        mixture.multiply(team, from, from, rows, memory, [&](const T* result, Range range, Range columns) {
          place_results(result, range, columns, static_cast<T*>(y), size);
        });
      });
    });
  });
}
