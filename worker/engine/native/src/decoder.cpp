// A whole decoder of the Llama kind as one call, without the interpreter and its lock:
//
//   hidden = embed(ids)
//   each layer: hidden += o(attention(qkv(norm(hidden)))); hidden += down(silu(gate) * up)(norm(hidden))
//   logits = head(norm(hidden of the sampling rows))
//
// Python builds it (decoders/native.py) and compares it with the library's own model at load.
#include <malloc.h>

#include <algorithm>
#include <vector>

#include "attention/paged_attention.h"
#include "guarded.h"
#include "interface.h"
#include "linear/linear.h"
#include "machine/buffer.h"
#include "machine/elements.h"
#include "machine/team.h"

namespace promptq {

inline Matrix matrix(const Weight& weight, int64_t outputs, int64_t inputs) {
  return {weight.numbers, weight.scales, weight.offsets, weight.bits, weight.group, outputs, inputs};
}

template <typename T>
class DecoderOf : public Decoder {
 public:
  DecoderOf(const ModelShape& shape, const ModelWeights& weights, int num_threads)
      : shape_(shape), embedding_(matrix(weights.embedding, shape.vocab_size, shape.size)),
        cosine_(weights.cosine), sine_(weights.sine), norm_(numbers(weights.norm)),
        num_threads_(num_threads), packed_(shape.is_packed ? &memory_ : nullptr),
        head_(
            shape.vocab_size, side_by_side({matrix(weights.head, shape.vocab_size, shape.size)}), nullptr,
            kGranule, num_threads, packed_, kHeadSlices) {}

  void add_layer(const LayerWeights& weights) override {
    const int64_t size = shape_.size, inner_size = shape_.inner_size;
    const int64_t query_size = shape_.num_heads * shape_.head_size;
    const int64_t kv_size = shape_.num_kv_heads * shape_.head_size;
    const auto linear = [&](int64_t outputs, const auto& weights_of, const void* bias, int64_t granule) {
      return Linear<T>(outputs, weights_of, numbers(bias), granule, num_threads_, packed_);
    };
    const Matrix query = matrix(weights.query, query_size, size);
    const Matrix key = matrix(weights.key, kv_size, size), value = matrix(weights.value, kv_size, size);
    const Matrix gate = matrix(weights.gate, inner_size, size), up = matrix(weights.up, inner_size, size);
    layers_.push_back(Layer{
        numbers(weights.input_norm),
        linear(
            query_size + 2 * kv_size, one_after_another({query, key, value}), weights.qkv_bias,
            shape_.head_size),
        numbers(weights.query_norm), numbers(weights.key_norm),
        linear(
            size, side_by_side({matrix(weights.output, size, query_size)}), weights.output_bias, kGranule),
        numbers(weights.inner_norm), linear(inner_size, side_by_side({gate, up}), nullptr, kGranule),
        linear(size, side_by_side({matrix(weights.down, size, inner_size)}), nullptr, kGranule),
        weights.cache});
  }

  void run(const Step& step) override {
    const int64_t num_rows = step.num_rows, size = shape_.size, inner_size = shape_.inner_size;
    const int64_t query_size = shape_.num_heads * shape_.head_size, vocab_size = shape_.vocab_size;
    T *hidden = hidden_.reserve(num_rows * size), *normed = normed_.reserve(num_rows * size);
    T *query = query_.reserve(num_rows * query_size), *inner = inner_.reserve(num_rows * inner_size);
    T* attended = attended_.reserve(num_rows * query_size);
    T* last = last_.reserve(step.num_outputs * size);
    T *logits = static_cast<T*>(step.logits), *states = static_cast<T*>(step.states);
    for (int64_t row = 0; row < num_rows; ++row)
      copy_row(embedding_, step.ids[row], hidden + row * size);
    const auto norm_row = [&](int64_t row, const T* weight, T* out) {
      rms_norm_row(hidden + row * size, weight, static_cast<float>(shape_.epsilon), size, out);
    };
    const auto norm_rows = [&](Team& team, const T* weight) {
      constexpr int64_t kRows = 8;  // of an item
      team.share(ceil_div(num_rows, kRows), [&](int64_t item) {
        for (int64_t row = item * kRows; row < std::min((item + 1) * kRows, num_rows); ++row)
          norm_row(row, weight, normed + row * size);
      });
    };
    // hidden += linear(x)
    const auto add_product = [&](Team& team, const Linear<T>& linear, const T* x) {
      linear.multiply(team, x, num_rows, [&](const T* y, Range rows, Range columns) {
        for (int64_t i = 0; i < rows.count; ++i)
          add_row(
              hidden + (rows.first + i) * size + columns.first, y + i * columns.count,
              columns.count);
      });
    };
    const Pieces pieces(
        step.layout, layers_[0].cache, shape_.num_heads / shape_.num_kv_heads, num_threads_);
    Team::run(num_threads_, [&](Team& team) {
      std::vector<float> scratch;
      for (const Layer& layer : layers_) {
        norm_rows(team, layer.input_norm);
        layer.qkv.multiply(team, normed, num_rows, [&](T* y, Range rows, Range columns) {
          for (int64_t i = 0; i < rows.count; ++i)
            place_heads(
                y + i * columns.count, columns.first / shape_.head_size,
                columns.count / shape_.head_size, rows.first + i, layer, step, query);
        });
        team.share(pieces.count(), [&](int64_t index) {
          attend_sized(
              pieces.at<T>(
                  index, query, attended, layer.cache, static_cast<float>(shape_.scale)),
              scratch);
        });
        add_product(team, layer.output, attended);
        norm_rows(team, layer.inner_norm);
        layer.gate_up.multiply(team, normed, num_rows, [&](const T* y, Range rows, Range columns) {
          for (int64_t i = 0; i < rows.count; ++i) {
            const T* gate = y + i * 2 * columns.count;
            T* out = inner + (rows.first + i) * inner_size + columns.first;
            silu_and_multiply_row(gate, gate + columns.count, columns.count, out);
          }
        });
        add_product(team, layer.down, inner);
      }
      team.share(step.num_outputs, [&](int64_t i) {
        norm_row(step.outputs[i], norm_, last + i * size);
      });
      if (step.num_kept > 0)
        team.share(step.num_kept, [&](int64_t i) {
          norm_row(step.kept[i], norm_, states + i * size);
        });
      head_.multiply(team, last, step.num_outputs, [&](const T* y, Range rows, Range columns) {
        for (int64_t i = 0; i < rows.count; ++i)
          std::copy_n(
              y + i * columns.count, columns.count,
              logits + (rows.first + i) * vocab_size + columns.first);
      });
    });
  }

 private:
  struct Layer {
    const T* input_norm;
    Linear<T> qkv;
    const T *query_norm, *key_norm;
    Linear<T> output;
    const T* inner_norm;
    Linear<T> gate_up, down;
    LayerCache cache;
  };

  // Slices of weights end at multiples of this number of columns.
  static constexpr int64_t kGranule = 64;
  // Slices of the head for each thread. A slice's logits stay in the core's cache until they are copied.
  static constexpr int64_t kHeadSlices = 8;

  static const T* numbers(const void* weight) { return static_cast<const T*>(weight); }

  // Norms and rotates `count` heads of a row, from the model's head `first` on. Stores queries in `query`
  // [T, num_heads * head_size], and K and V in the cache.
  void place_heads(
      T* head, int64_t first, int64_t count, int64_t row, const Layer& layer, const Step& step,
      T* query) const {
    const int64_t size = shape_.head_size, rotary = shape_.rotary, num_heads = shape_.num_heads;
    const int64_t num_kv_heads = shape_.num_kv_heads, position = step.positions[row];
    const LayerCache& cache = layer.cache;
    const int64_t place = step.layout.write_blocks[row] * cache.block_stride +
                          step.layout.write_offsets[row] * cache.position_stride;
    for (int64_t index = first; index < first + count; ++index, head += size) {
      const int64_t kv_head = (index - num_heads) % num_kv_heads;
      const bool is_query = index < num_heads, is_value = index >= num_heads + num_kv_heads;
      if (!is_value) {
        const T* norm = is_query ? layer.query_norm : layer.key_norm;
        if (norm) rms_norm_row(head, norm, static_cast<float>(shape_.epsilon), size, head);
        rotate_row(head, cosine_ + position * rotary, sine_ + position * rotary, rotary);
      }
      if (is_query) {
        std::copy_n(head, size, query + (row * num_heads + index) * size);
        continue;
      }
      auto* rows = static_cast<uint8_t*>(is_value ? cache.values : cache.keys);
      uint8_t* target = rows + place + kv_head * cache.head_stride;
      if (cache.is_int8)
        store_int8_row(head, size, target);
      else
        std::copy_n(head, size, reinterpret_cast<T*>(target));
    }
  }

  const ModelShape shape_;
  const Matrix embedding_;
  const float *cosine_, *sine_;
  const T* norm_;
  const int num_threads_;
  WeightMemory memory_;
  WeightMemory* const packed_;  // null: weights are read where they are
  Linear<T> head_;
  std::vector<Layer> layers_;
  Buffer<T> hidden_, normed_, query_, attended_, inner_, last_;
};

}  // namespace promptq

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

void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

const char* paged_attention(
    int64_t is_bf16, const void* query, int64_t num_heads, const promptq::LayerCache* cache,
    const promptq::Layout* layout, double scale, void* out) {
  using namespace promptq;
  return guarded([&] {
    const Pieces pieces(*layout, *cache, num_heads / cache->num_kv_heads, 1);
    std::vector<float> scratch;
    with_type(is_bf16, query, [&]<typename T>(const T* rows) {
      for (int64_t index = 0; index < pieces.count(); ++index)
        attend_sized(
            pieces.at(index, rows, static_cast<T*>(out), *cache, static_cast<float>(scale)), scratch);
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

bool has_tile_registers() {
#ifdef __AMX_BF16__
  return promptq::has_tiles();
#else
  return false;
#endif
}
