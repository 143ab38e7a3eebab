// A whole decoder of the Llama kind as one call, without the interpreter and its lock:
//
//   hidden = embed(ids)
//   each layer: hidden += o(attention(qkv(norm(hidden)))); hidden += down(silu(gate) * up)(norm(hidden))
//   logits = head(norm(hidden of the sampling rows))
//
// Python builds it (native/decoder.py) and compares it with the library's own model at load.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <malloc.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "machine/elements.h"
#include "linear/linear.h"
#include "attention/paged_attention.h"
#include "machine/team.h"

namespace promptq {

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
        norm_(std::move(norm)), head_({head}, {}, kGranule, kHeadSlices * num_slices()),
        num_heads_(num_heads), num_kv_heads_(num_kv_heads), head_size_(head_size),
        vocab_size_(head.size(0)), epsilon_(epsilon), scale_(scale) {}

  void add_layer(
      at::Tensor input_norm, at::Tensor qkv, OptionalTensor qkv_bias, OptionalTensor query_norm,
      OptionalTensor key_norm, at::Tensor output, OptionalTensor output_bias,
      at::Tensor inner_norm, at::Tensor gate, at::Tensor up, at::Tensor down, at::Tensor keys,
      at::Tensor values, int64_t visible, int64_t window) {
    inner_size_ = gate.size(0);
    layers_.push_back(Layer{
        std::move(input_norm), Linear({qkv}, qkv_bias, head_size_, num_slices()),
        std::move(query_norm), std::move(key_norm),
        Linear({output}, output_bias, kGranule, num_slices()), std::move(inner_norm),
        Linear({gate, up}, {}, kGranule, num_slices()), Linear({down}, {}, kGranule, num_slices()),
        LayerCache{keys, values, Pattern{static_cast<Visible>(visible), window}}});
  }

  // Logits [rows, vocabulary] of these rows of the packed step, and the final hidden states [kept, size] of the
  // rows `kept`; K and V of all rows are written.
  std::tuple<at::Tensor, at::Tensor> logits_and_states(
      const at::Tensor& ids, const at::Tensor& positions, const at::Tensor& rows,
      const at::Tensor& kept, const at::Tensor& query_starts, const at::Tensor& context_lens,
      const at::Tensor& block_tables, const at::Tensor& write_blocks,
      const at::Tensor& write_offsets) {
    const c10::InferenceMode without_gradients;
    const Layout layout{
        query_starts, context_lens, block_tables.contiguous(), write_blocks, write_offsets};
    at::Tensor hidden = embedding_.index_select(0, ids);
    return hidden.scalar_type() == at::kBFloat16 ? run<Bf16>(hidden, positions, rows, kept, layout)
                                                 : run<float>(hidden, positions, rows, kept, layout);
  }

 private:
  // Slices of weights end at multiples of so many columns.
  static constexpr int64_t kGranule = 64;
  // Slices of the head for each thread. A slice's logits stay in the core's cache until they are copied.
  static constexpr int64_t kHeadSlices = 8;

  static int64_t num_slices() { return at::get_num_threads(); }

  template <typename T>
  std::tuple<at::Tensor, at::Tensor> run(
      at::Tensor& hidden, const at::Tensor& positions, const at::Tensor& rows,
      const at::Tensor& kept, const Layout& layout) {
    const int64_t num_rows = hidden.size(0), size = hidden.size(1), query_size = num_heads_ * head_size_;
    const auto rows_of = [&](int64_t count, int64_t size) {
      return at::empty({std::max(count, kLeastRows), size}, hidden.options());
    };
    at::Tensor normed = rows_of(num_rows, size), query = rows_of(num_rows, query_size);
    at::Tensor attended = rows_of(num_rows, query_size), inner = rows_of(num_rows, inner_size_);
    at::Tensor last = rows_of(rows.size(0), size);
    at::Tensor logits = at::empty({rows.size(0), vocab_size_}, hidden.options());
    at::Tensor states = at::empty({kept.size(0), size}, hidden.options());
    const auto norm_last = [&](const at::Tensor& rows, int64_t i, at::Tensor& normed) {
      const T* row = data<T>(hidden) + data<int64_t>(rows)[i] * size;
      rms_norm_row(row, data<T>(norm_), static_cast<float>(epsilon_), size, data<T>(normed) + i * size);
    };
    const Pieces pieces(
        layout, layers_[0].cache, num_heads_ / num_kv_heads_, at::get_num_threads());
    Team::run(at::get_num_threads(), [&](Team& team) {
      const c10::InferenceMode without_gradients;
      std::vector<float> scratch;
      for (const Layer& layer : layers_) {
        norm_rows<T>(team, hidden, layer.input_norm, normed);
        layer.qkv.multiply(team, normed, num_rows, [&](const at::Tensor& y, Range rows, Range columns) {
          for (int64_t i = 0; i < rows.count; ++i)
            place_heads(
                data<T>(y) + i * columns.count, columns.first / head_size_,
                columns.count / head_size_, rows.first + i, layer, positions, layout,
                data<T>(query));
        });
        team.share(pieces.count(), [&](int64_t index) {
          attend_sized(pieces.at<T>(index, query, attended, layer.cache, scale_), scratch);
        });
        add_product<T>(team, layer.output, attended, hidden);
        norm_rows<T>(team, hidden, layer.inner_norm, normed);
        layer.gate_up.multiply(
            team, normed, num_rows, [&](const at::Tensor& y, Range rows, Range columns) {
              for (int64_t i = 0; i < rows.count; ++i) {
                const T* gate = data<T>(y) + i * 2 * columns.count;
                T* out = data<T>(inner) + (rows.first + i) * inner_size_ + columns.first;
                silu_and_multiply_row(gate, gate + columns.count, columns.count, out);
              }
            });
        add_product<T>(team, layer.down, inner, hidden);
      }
      team.share(rows.size(0), [&](int64_t i) { norm_last(rows, i, last); });
      if (kept.size(0) > 0)
        team.share(kept.size(0), [&](int64_t i) { norm_last(kept, i, states); });
      head_.multiply(team, last, rows.size(0), [&](const at::Tensor& y, Range rows, Range columns) {
        for (int64_t i = 0; i < rows.count; ++i)
          std::memcpy(
              data<T>(logits) + (rows.first + i) * vocab_size_ + columns.first,
              data<T>(y) + i * columns.count, columns.count * sizeof(T));
      });
    });
    return {logits, states};
  }

  // normed = norm of each row
  template <typename T>
  void norm_rows(
      Team& team, const at::Tensor& hidden, const at::Tensor& weight, at::Tensor& normed) const {
    constexpr int64_t kRows = 8;  // of an item
    const int64_t num_rows = hidden.size(0), size = hidden.size(1);
    team.share((num_rows + kRows - 1) / kRows, [&](int64_t item) {
      for (int64_t row = item * kRows; row < std::min((item + 1) * kRows, num_rows); ++row)
        rms_norm_row(
            data<T>(hidden) + row * size, data<T>(weight), static_cast<float>(epsilon_), size,
            data<T>(normed) + row * size);
    });
  }

  // hidden += linear(x)
  template <typename T>
  static void add_product(
      Team& team, const Linear& linear, const at::Tensor& x, at::Tensor& hidden) {
    const int64_t size = hidden.size(1);
    linear.multiply(
        team, x, hidden.size(0), [&](const at::Tensor& y, Range rows, Range columns) {
          for (int64_t i = 0; i < rows.count; ++i)
            add_row(
                data<T>(hidden) + (rows.first + i) * size + columns.first,
                data<T>(y) + i * columns.count, columns.count);
        });
  }

  // Norm and rotate `count` heads of a row, from the model's head `first` on, and store them: queries in
  // `query` [T, num_heads * head_size], K and V in the cache.
  template <typename T>
  void place_heads(
      T* head, int64_t first, int64_t count, int64_t row, const Layer& layer,
      const at::Tensor& positions, const Layout& layout, T* query) const {
    const int64_t size = head_size_, rotary = cosine_.size(1);
    const int64_t position = data<int64_t>(positions)[row];
    const LayerCache& cache = layer.cache;
    const int64_t place = data<int64_t>(layout.write_blocks)[row] * cache.key.stride(0) +
                          data<int64_t>(layout.write_offsets)[row] * size;
    for (int64_t index = first; index < first + count; ++index, head += size) {
      const int64_t kv_head = (index - num_heads_) % num_kv_heads_;
      const bool is_query = index < num_heads_, is_value = index >= num_heads_ + num_kv_heads_;
      if (!is_value) {
        const OptionalTensor& norm = is_query ? layer.query_norm : layer.key_norm;
        if (norm) rms_norm_row(head, data<T>(*norm), static_cast<float>(epsilon_), size, head);
        rotate_row(
            head, data<float>(cosine_) + position * rotary, data<float>(sine_) + position * rotary,
            rotary);
      }
      T* target = is_query ? query + (row * num_heads_ + index) * size
                           : data<T>(is_value ? cache.value : cache.key) + place +
                                 kv_head * cache.key.stride(1);
      std::memcpy(target, head, size * sizeof(T));
    }
  }

  at::Tensor embedding_, cosine_, sine_, norm_;
  Linear head_;
  int64_t num_heads_, num_kv_heads_, head_size_, vocab_size_, inner_size_ = 0;
  double epsilon_, scale_;
  std::vector<Layer> layers_;
};

// Activations of some megabytes come and go in each layer; without this, the C library would ask
// the system for each of them, and the system would clear every page.
void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

// Attention of packed rows [T, num_heads, size] over one layer's cache, which has their K and V already.
at::Tensor attend_packed(
    const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
    const at::Tensor& query_starts, const at::Tensor& context_lens, const at::Tensor& block_tables,
    int64_t visible, int64_t window, double scale) {
  const Layout layout{query_starts, context_lens, block_tables, {}, {}};
  const LayerCache cache{keys, values, Pattern{static_cast<Visible>(visible), window}};
  const at::Tensor rows = query.flatten(1);
  at::Tensor out = at::empty_like(rows);
  const Pieces pieces(layout, cache, query.size(1) / keys.size(1), 1);
  std::vector<float> scratch;
  for (int64_t index = 0; index < pieces.count(); ++index)
    if (query.scalar_type() == at::kBFloat16)
      attend_sized(pieces.at<Bf16>(index, rows, out, cache, static_cast<float>(scale)), scratch);
    else
      attend_sized(pieces.at<float>(index, rows, out, cache, static_cast<float>(scale)), scratch);
  return out.view_as(query);
}

}  // namespace promptq

TORCH_LIBRARY(promptq, library) {
  using promptq::Decoder;
  library.class_<Decoder>("Decoder")
      .def(torch::init<
           at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, int64_t, int64_t, int64_t,
           double, double>())
      .def("add_layer", &Decoder::add_layer)
      .def("logits_and_states", &Decoder::logits_and_states);
  library.def("keep_freed_memory", &promptq::keep_freed_memory);
  // Decoders use the same code. Under these names it can be compared on any processor that can run it.
  library.def("paged_attention", &promptq::attend_packed);
  library.def("widening_linear", &promptq::linear<promptq::WideningWeight>);
#ifdef __AMX_BF16__
  if (promptq::has_tiles()) library.def("tile_linear", &promptq::linear<promptq::TileWeight>);
#endif
}
