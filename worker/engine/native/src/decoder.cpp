// A whole decoder of the Llama kind as one call, without the interpreter and its lock:
//
//   hidden = embed(ids)
//   each layer: hidden += o(attention(qkv(norm(hidden)))); hidden += down(silu(gate) * up)(norm(hidden))
//   logits = head(norm(hidden of the sampling rows))
//
// Python builds it (native/decoder.py) and holds it against the library's own model at load.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <malloc.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "elements.h"
#include "paged_attention.h"

namespace promptq {

using OptionalTensor = c10::optional<at::Tensor>;

// Rows that weights are laid out for; measured, one layout serves 1 to 512 rows equally well.
constexpr int64_t kTypicalRows = 32;

auto& reorder_weight() {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("mkldnn::_reorder_linear_weight", "")
                       .typed<at::Tensor(const at::Tensor&, c10::optional<int64_t>)>();
  return op;
}

using Scalars = c10::List<c10::optional<at::Scalar>>;

auto& multiply() {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                       .typed<at::Tensor(
                           const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                           c10::string_view, Scalars, c10::optional<c10::string_view>)>();
  return op;
}

bool can_multiply_packed() {
  static const bool can = c10::Dispatcher::singleton()
                              .findSchemaOrThrow("mkldnn::_is_mkldnn_bf16_supported", "")
                              .typed<bool()>()
                              .call();
  return can;
}

// A linear layer; bf16 weights lie in the blocks that oneDNN multiplies fastest.
class Linear {
 public:
  Linear(const at::Tensor& weight, OptionalTensor bias) : bias_(std::move(bias)) {
    is_packed_ = weight.scalar_type() == at::kBFloat16 && can_multiply_packed();
    weight_ = is_packed_ ? reorder_weight().call(weight, kTypicalRows) : weight;
  }

  at::Tensor operator()(const at::Tensor& x) const {
    if (!is_packed_) return at::linear(x, weight_, bias_);
    return multiply().call(x, weight_, bias_, "none", Scalars(), "");
  }

 private:
  at::Tensor weight_;
  OptionalTensor bias_;
  bool is_packed_;
};

struct Layer {
  at::Tensor input_norm;
  Linear qkv;
  OptionalTensor query_norm, key_norm;
  Linear output;
  at::Tensor inner_norm;
  Linear gate_up, down;
  LayerCache cache;
};

class Decoder : public torch::CustomClassHolder {
 public:
  // `cosine` and `sine` are [positions, rotary] in fp32; the others have the weights' type.
  Decoder(
      at::Tensor embedding, at::Tensor cosine, at::Tensor sine, at::Tensor norm, at::Tensor head,
      int64_t num_heads, int64_t num_kv_heads, int64_t head_size, double epsilon, double scale)
      : embedding_(std::move(embedding)), cosine_(std::move(cosine)), sine_(std::move(sine)),
        norm_(std::move(norm)), head_(head, {}), num_heads_(num_heads),
        num_kv_heads_(num_kv_heads), head_size_(head_size), epsilon_(epsilon), scale_(scale) {}

  void add_layer(
      at::Tensor input_norm, at::Tensor qkv, OptionalTensor qkv_bias, OptionalTensor query_norm,
      OptionalTensor key_norm, at::Tensor output, OptionalTensor output_bias,
      at::Tensor inner_norm, at::Tensor gate_up, at::Tensor down, at::Tensor keys,
      at::Tensor values, int64_t visible, int64_t window) {
    layers_.push_back(Layer{
        std::move(input_norm), Linear(qkv, std::move(qkv_bias)), std::move(query_norm),
        std::move(key_norm), Linear(output, std::move(output_bias)), std::move(inner_norm),
        Linear(gate_up, {}), Linear(down, {}),
        LayerCache{keys, values, Pattern{static_cast<Visible>(visible), window}}});
  }

  // Logits [rows, vocabulary] of these rows of the packed step; K and V of all rows are written.
  at::Tensor logits(
      const at::Tensor& ids, const at::Tensor& positions, const at::Tensor& rows,
      int64_t num_decodes, const at::Tensor& query_starts, const at::Tensor& context_lens,
      const at::Tensor& block_tables, const at::Tensor& write_blocks,
      const at::Tensor& write_offsets) {
    const c10::InferenceMode without_gradients;
    const Layout layout{num_decodes, query_starts, context_lens, block_tables.contiguous(),
                        write_blocks, write_offsets};
    at::Tensor hidden = embedding_.index_select(0, ids);
    return hidden.scalar_type() == at::kBFloat16 ? run<Bf16>(hidden, positions, rows, layout)
                                                 : run<float>(hidden, positions, rows, layout);
  }

 private:
  template <typename T>
  at::Tensor run(
      at::Tensor& hidden, const at::Tensor& positions, const at::Tensor& rows,
      const Layout& layout) {
    at::Tensor delta;
    for (const Layer& layer : layers_) {
      at::Tensor qkv = layer.qkv(add_rms_norm<T>(hidden, delta, layer.input_norm, epsilon_));
      delta = layer.output(attend<T>(qkv, layer, positions, layout));
      const at::Tensor gate_up =
          layer.gate_up(add_rms_norm<T>(hidden, delta, layer.inner_norm, epsilon_));
      delta = layer.down(silu_and_multiply<T>(gate_up));
    }
    at::Tensor last = hidden.index_select(0, rows);
    return head_(add_rms_norm<T>(last, delta.index_select(0, rows), norm_, epsilon_));
  }

  // [T, num_heads * head_size] of `qkv` [T, (num_heads + 2 * num_kv_heads) * head_size], whose
  // queries and keys are normed and rotated in place.
  template <typename T>
  at::Tensor attend(
      at::Tensor& qkv, const Layer& layer, const at::Tensor& positions, const Layout& layout) {
    const int64_t num_rows = qkv.size(0), stride = qkv.size(1);
    T* query = data<T>(qkv);
    T* key = query + num_heads_ * head_size_;
    const Packed<T> packed{query, key, key + num_kv_heads_ * head_size_, stride,
                           num_heads_, num_kv_heads_, head_size_};
    at::parallel_for(0, num_rows, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) prepare_row(packed, layer, positions, layout, row);
    });
    at::Tensor out = at::empty({num_rows, num_heads_ * head_size_}, qkv.options());
    if (layout.num_decodes) attend_decodes(packed, layer.cache, layout, scale_, out);
    if (layout.num_decodes < layout.context_lens.size(0)) {
      const at::Tensor queries = qkv.narrow(1, 0, num_heads_ * head_size_)
                                     .view({num_rows, num_heads_, head_size_});
      attend_chunks<T>(queries, layer.cache, layout, scale_, out);
    }
    return out;
  }

  // Norm and rotate a row's queries and keys, and write its K and V into the cache.
  template <typename T>
  void prepare_row(
      const Packed<T>& packed, const Layer& layer, const at::Tensor& positions,
      const Layout& layout, int64_t row) const {
    const int64_t size = head_size_, rotary = cosine_.size(1);
    const int64_t position = data<int64_t>(positions)[row];
    const float* cosine = data<float>(cosine_) + position * rotary;
    const float* sine = data<float>(sine_) + position * rotary;
    const auto norm_and_rotate = [&](T* head, const OptionalTensor& norm) {
      if (norm) rms_norm_row(head, data<T>(*norm), static_cast<float>(epsilon_), size, head);
      rotate_row(head, cosine, sine, rotary);
    };
    for (int64_t head = 0; head < num_heads_; ++head)
      norm_and_rotate(packed.query + row * packed.stride + head * size, layer.query_norm);
    const LayerCache& cache = layer.cache;
    const int64_t block_size = cache.key.size(2);
    int64_t place = data<int64_t>(layout.write_blocks)[row] * cache.key.stride(0) +
                    data<int64_t>(layout.write_offsets)[row] * size;
    for (int64_t head = 0; head < num_kv_heads_; ++head, place += block_size * size) {
      T* key = packed.key + row * packed.stride + head * size;
      norm_and_rotate(key, layer.key_norm);
      std::memcpy(data<T>(cache.key) + place, key, size * sizeof(T));
      std::memcpy(
          data<T>(cache.value) + place, packed.value + row * packed.stride + head * size,
          size * sizeof(T));
    }
  }

  at::Tensor embedding_, cosine_, sine_, norm_;
  Linear head_;
  int64_t num_heads_, num_kv_heads_, head_size_;
  double epsilon_, scale_;
  std::vector<Layer> layers_;
};

// Activations of some megabytes come and go in each layer; without this, the C library would ask
// the system for each of them, and the system would clear every page.
void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

}  // namespace promptq

TORCH_LIBRARY(promptq, library) {
  using promptq::Decoder;
  library.class_<Decoder>("Decoder")
      .def(torch::init<
           at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, int64_t, int64_t, int64_t,
           double, double>())
      .def("add_layer", &Decoder::add_layer)
      .def("logits", &Decoder::logits);
  library.def("keep_freed_memory", &promptq::keep_freed_memory);
}
