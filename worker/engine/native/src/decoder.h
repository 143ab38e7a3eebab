// A whole decoder as one call, without the interpreter and its lock:
//
//   hidden = embed(ids)
//   each layer: hidden += scale * after(mixer(before(hidden))); hidden += scale * after(mlp(before(hidden)))
//   logits = head(norm(hidden of the sampling rows))
//
// A layer may lack norms, the mixer or the MLP. A recurrence beside attention has the same input, and adds
// its result, too. A layer may scale the hidden states at its end, and have further inputs
// (layers/layer_inputs.h). A head that drafts is one more layer, with another input and another norm:
//
//   hidden = projection(norm(embed(ids)), norm(states of the rows before))
//
// Python builds the decoder from the parts of a model (decoders/layer_parts.py, decoders/native.py), and
// compares it with the library's own model at load.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "interface.h"
#include "layers/attention.h"
#include "layers/experts.h"
#include "layers/layer.h"
#include "layers/layer_inputs.h"
#include "layers/norm.h"
#include "layers/recurrence.h"
#include "layers/short_convolution.h"
#include "linear/linear.h"
#include "machine/buffer.h"
#include "machine/elements.h"
#include "machine/team.h"

namespace promptq {

template <typename T>
class DecoderOf : public Decoder {
 public:
  DecoderOf(const ModelShape& shape, const ModelWeights& weights, int num_threads)
      : shape_(shape), embedding_(matrix(weights.embedding, shape.vocab_size, shape.size)),
        norm_(weights.norm), num_threads_(num_threads), packed_(shape.is_packed ? &memory_ : nullptr),
        head_(
            shape.vocab_size, side_by_side({matrix(weights.head, shape.vocab_size, shape.size)}),
            static_cast<const T*>(weights.head_bias), kGranule, num_threads, packed_, kHeadSlices) {
    if (weights.inputs)
      inputs_ = std::make_unique<LayerInputs<T>>(*weights.inputs, shape_, num_threads, packed_);
  }

  void add_layer(const LayerWeights& weights) override {
    Layer<T>& layer = layers_.emplace_back(weights, shape_.size, num_threads_, packed_);
    if (layer.cache()) {
      const auto is_like = [&](size_t first) { return layers_[first].has_pieces_of(layer); };
      layer.pieces = std::find_if(with_other_pieces_.begin(), with_other_pieces_.end(), is_like) -
                     with_other_pieces_.begin();
      if (layer.pieces == with_other_pieces_.size()) with_other_pieces_.push_back(layers_.size() - 1);
    }
    if (layer.attention) {
      gates_size_ = std::max(gates_size_, layer.attention->gates_size());
      query_size_ = std::max(query_size_, layer.attention->query_size());
      qkv_size_ = std::max(qkv_size_, layer.attention->whole_row_size());
    }
    has_states_ = has_states_ || layer.convolution || layer.recurrence;
    has_experts_beside_ = has_experts_beside_ || layer.experts_beside;
    const auto make_room = [&](const auto& mixer) {
      if (mixer) mixed_size_ = std::max(mixed_size_, mixer->output().inputs());
    };
    make_room(layer.attention);
    make_room(layer.latent);
    make_room(layer.convolution);
    make_room(layer.recurrence);
    if (layer.mlp) inner_size_ = std::max(inner_size_, layer.mlp->inner_size());
    if (layer.input) inner_size_ = std::max(inner_size_, layer.input->size());
  }

  void run(const Step& step) override { compute(step, {0, num_layers()}, norm_, nullptr); }

  void add_head(const HeadWeights& weights) override {
    const int64_t size = shape_.size;
    add_layer(weights.layer);
    head_input_ = std::make_unique<HeadInput>(HeadInput{
        weights.of_embedding, weights.of_state, weights.last,
        Linear<T>(
            size, side_by_side({matrix(weights.projection, size, 2 * size)}), nullptr, kGranule, num_threads_,
            packed_)});
  }

  void draft(const Draft& draft) override {
    if (!head_input_) throw std::logic_error("there is no head");
    const int64_t size = shape_.size, vocab_size = shape_.vocab_size, last_layer = num_layers();
    const Layout& layout = draft.step.layout;
    const int64_t block_size = layers_[last_layer].cache()->block_size;
    const int64_t num_sequences = layout.num_sequences;
    std::vector<int64_t> rows(num_sequences), ids(num_sequences), positions(num_sequences);
    std::vector<int64_t> starts(num_sequences + 1), contexts(num_sequences);
    std::vector<int64_t> blocks(num_sequences), offsets(num_sequences);
    std::vector<uint8_t> is_sound(num_sequences);
    for (int64_t i = 0; i < num_sequences; ++i) {
      rows[i] = layout.query_starts[i + 1] - 1;
      positions[i] = draft.step.positions[rows[i]];
    }
    Step step = draft.step;
    const T* states = static_cast<const T*>(draft.states);
    for (int64_t index = 0; index == 0 || index < draft.most_drafted; ++index) {
      int64_t count = 0;
      while (count < num_sequences && draft.num_drafted[count] > index) ++count;
      if (index > 0) {
        const int64_t* before = draft.tokens + (index - 1) * num_sequences;
        for (int64_t i = 0; i < count; ++i) {
          const int64_t place = layout.context_lens[i] + index - 1;
          rows[i] = starts[i] = i;
          ids[i] = before[i];
          ++positions[i];
          contexts[i] = place + 1;
          blocks[i] = layout.block_tables[i * layout.max_blocks + place / block_size];
          offsets[i] = place % block_size;
        }
        starts[count] = count;
        step.num_rows = count;
        step.ids = ids.data();
        step.positions = positions.data();
        step.layout = Layout{
            count, layout.max_blocks, starts.data(), contexts.data(), layout.block_tables, blocks.data(),
            offsets.data()};
      }
      step.num_outputs = step.num_kept = count;
      step.outputs = step.kept = rows.data();
      step.logits = draft_logits_.reserve(count * vocab_size);
      // Two places, because a pass reads the states of the pass before.
      step.states = draft_states_[index % 2].reserve(count * size);
      compute(step, {last_layer, 1}, head_input_->last, states);
      states = static_cast<const T*>(step.states);
      const Choice& choice = draft.choice;
      const int64_t first = index * num_sequences;
      if (const char* error = choose_tokens(
              shape_.is_bf16, step.logits, count, vocab_size, choice.is_sampled + first,
              choice.temperature + first, choice.filters + first * choice.num_filters, choice.num_filters,
              choice.uniforms + first, num_threads_, draft.tokens + first,
              reinterpret_cast<bool*>(is_sound.data())))
        throw std::runtime_error(error);
    }
  }

 private:
  struct HeadInput {
    Norm of_embedding, of_state, last;
    Linear<T> projection;
  };

  // The number of layers without the head's.
  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()) - (head_input_ ? 1 : 0); }

  // Computes some of the layers, and the norm at their end. `given_states` are null, or inputs of the head.
  void compute(const Step& step, Range some_layers, const Norm& last_norm, const T* given_states) {
    const int64_t num_rows = step.num_rows, size = shape_.size;
    T *hidden = hidden_.reserve(num_rows * size), *normed = normed_.reserve(num_rows * size);
    T* both = given_states || has_experts_beside_ ? both_.reserve(2 * num_rows * size) : nullptr;
    T *update = update_.reserve(num_rows * size), *inner = inner_.reserve(num_rows * inner_size_);
    T* mixed = mixed_.reserve(num_rows * mixed_size_);
    const HeadRows<T> heads{
        qkv_.reserve(num_rows * qkv_size_), query_.reserve(num_rows * query_size_),
        gates_.reserve(num_rows * gates_size_), mixed};
    T *last = last_.reserve(step.num_outputs * size), *states = static_cast<T*>(step.states);
    const int64_t inputs_size = inputs_ ? inputs_->row_size() : 0;
    T* inputs = layer_inputs_.reserve(num_rows * inputs_size);
    for (int64_t row = 0; row < num_rows; ++row) embed(step.ids[row], hidden + row * size);
    const auto first_layer = layers_.begin() + some_layers.first;
    const auto end_of_layers = first_layer + some_layers.count;
    for (auto layer = first_layer; layer != end_of_layers; ++layer) {
      if (layer->experts) layer->experts->reserve(num_rows, experts_memory_);
      if (layer->experts_beside) layer->experts_beside->reserve(num_rows, experts_memory_);
      if (layer->latent) layer->latent->reserve(num_rows, latent_memory_);
      if (layer->convolution) layer->convolution->reserve(num_rows, convolution_memory_);
      if (layer->recurrence) layer->recurrence->reserve(num_rows, recurrence_memory_);
    }
    std::optional<Chunks> chunks;
    if (has_states_ && !given_states) chunks.emplace(step.layout, step.entries);
    std::vector<Pieces> pieces;
    for (const size_t first : with_other_pieces_) {
      pieces.emplace_back(step.layout, *layers_[first].cache(), layers_[first].group(), num_threads_);
    }
    Team::run(num_threads_, [&](Team& team) {
      std::vector<float> scratch;
      const Norm* pending = nullptr;  // the norm of `update`, which is not yet added to `hidden`
      float scale = 1.0f;             // the factor of the result of a part
      float scale_after = 1.0f;       // the factor of the hidden states at the end of a layer
      // Begins a part of a layer: adds what is pending, and returns before(hidden).
      const auto enter = [&](const Norm& before) -> const T* {
        if (pending || before || scale_after != 1.0f) {
          team.share_rows(num_rows, [&](int64_t row) {
            T *sum = hidden + row * size, *part = update + row * size;
            if (pending) {
              norm_row(part, *pending, size, part);
              add_scaled(sum, part, scale, size);
            }
            if (scale_after != 1.0f) scale_row(sum, scale_after, size);
            if (before) norm_row(sum, before, size, normed + row * size);
          });
        }
        pending = nullptr;
        scale_after = 1.0f;
        return before ? normed : hidden;
      };
      // Ends a part of a layer: hidden += after(product), at once or pending.
      const auto leave = [&](const auto& multiply, const Norm& after) {
        multiply([&](T* y, Range rows, Range columns) {
          for (int64_t i = 0; i < rows.count; ++i) {
            T* row = y + i * columns.count;
            const int64_t place = (rows.first + i) * size + columns.first;
            if (after)
              std::copy_n(row, columns.count, update + place);
            else
              add_scaled(hidden + place, row, scale, columns.count);
          }
        });
        if (after) pending = &after;
      };
      if (given_states)
        join(team, given_states, num_rows, both, hidden);
      else if (inputs_)
        inputs_->compute(team, step.ids, hidden, num_rows, inputs);
      for (auto place = first_layer; place != end_of_layers; ++place) {
        const Layer<T>& layer = *place;
        const T* x = nullptr;
        if (layer.has_mixer()) x = enter(layer.before_mixer);
        const auto leave_mixer = [&](const auto& mixer, float its_scale) {
          scale = its_scale;
          leave(
              [&](const auto& use) { mixer->output().multiply(team, mixed, num_rows, use); },
              layer.after_mixer);
        };
        if (layer.attention) {
          layer.attention->attend(team, x, step, pieces[layer.pieces], heads, scratch);
          leave_mixer(layer.attention, layer.mixer_scale);
        }
        if (layer.latent) {
          layer.latent->attend(team, x, step, pieces[layer.pieces], latent_memory_, mixed, scratch);
          leave_mixer(layer.latent, layer.mixer_scale);
        }
        if (layer.convolution) {
          layer.convolution->mix(team, x, num_rows, *chunks, convolution_memory_, mixed);
          leave_mixer(layer.convolution, layer.mixer_scale);
        }
        if (layer.recurrence) {
          layer.recurrence->mix(team, x, num_rows, *chunks, recurrence_memory_, mixed);
          leave_mixer(layer.recurrence, layer.attention ? layer.beside_scale : layer.mixer_scale);
        }
        if (!layer.has_mlp()) continue;
        if (!layer.is_parallel) x = enter(layer.before_mlp);
        scale = layer.mlp_scale;
        const auto mlp = [&](const auto& use) {
          if (layer.experts) return layer.experts->multiply(team, x, x, num_rows, experts_memory_, use);
          layer.mlp->activate(team, x, num_rows, inner);
          layer.mlp->down().multiply(team, inner, num_rows, use);
        };
        leave(mlp, layer.after_mlp);
        if (layer.experts_beside)
          layer.experts_beside->add(team, hidden, num_rows, experts_memory_, both, update);
        if (const LayerInput<T>* input = layer.input.get()) {
          const T* given = inputs + (place - layers_.begin()) * input->size();
          input->activate(team, enter(Norm{}), num_rows, given, inputs_size, inner);
          scale = 1.0f;
          const auto output = [&](const auto& use) { input->output().multiply(team, inner, num_rows, use); };
          leave(output, input->after());
        }
        scale_after = layer.output_scale;
      }
      enter(Norm{});
      const auto norm_rows = [&](const int64_t* rows, int64_t count, T* out) {
        team.share(count, [&](int64_t i) {
          norm_row(hidden + rows[i] * size, last_norm, size, out + i * size);
        });
      };
      norm_rows(step.outputs, step.num_outputs, last);
      if (step.num_kept > 0) norm_rows(step.kept, step.num_kept, states);
      head_.multiply(team, last, step.num_outputs, [&](const T* y, Range rows, Range columns) {
        for (int64_t i = 0; i < rows.count; ++i)
          place_logits(
              y + i * columns.count, columns.count,
              static_cast<T*>(step.logits) + (rows.first + i) * shape_.vocab_size + columns.first);
      });
    });
  }

  // Slices of the head for each thread. A slice's logits stay in the core's cache until they are copied.
  static constexpr int64_t kHeadSlices = 8;

  void embed(int64_t id, T* row) const {
    copy_row(embedding_, id, row);
    if (shape_.embedding_scale != 1.0)
      scale_row(row, static_cast<float>(shape_.embedding_scale), shape_.size);
  }

  // Two phases: replaces embeddings by the head's projection of two norms, kept in `both`: theirs and
  // `states`'.
  void join(Team& team, const T* states, int64_t num_rows, T* both, T* hidden) const {
    const int64_t size = shape_.size;
    team.share(num_rows, [&](int64_t row) {
      T* to = both + 2 * row * size;
      norm_row(hidden + row * size, head_input_->of_embedding, size, to);
      norm_row(states + row * size, head_input_->of_state, size, to + size);
    });
    head_input_->projection.multiply_into(team, both, num_rows, hidden);
  }

  // sum += scale * part, rounded after each operation. Scales `part` in place.
  static void add_scaled(T* sum, T* part, float scale, int64_t size) {
    if (scale != 1.0f) scale_row(part, scale, size);
    add_row(sum, part, size);
  }

  // Scales and caps logits, rounded after each operation.
  void place_logits(const T* y, int64_t count, T* logits) const {
    std::copy_n(y, count, logits);
    if (shape_.logit_scale != 1.0) scale_row(logits, static_cast<float>(shape_.logit_scale), count);
    if (shape_.logit_softcap == 0.0) return;
    const float cap = static_cast<float>(shape_.logit_softcap);
    scale_row(logits, 1.0f / cap, count);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) store(logits[i], hyperbolic_tangent(load(logits[i])));
    scale_row(logits, cap, count);
  }

  const ModelShape shape_;
  const Matrix embedding_;
  const Norm norm_;
  const int num_threads_;
  WeightMemory memory_;
  WeightMemory* const packed_;  // null: weights are read where they are
  Linear<T> head_;
  std::unique_ptr<LayerInputs<T>> inputs_;
  std::vector<Layer<T>> layers_;
  std::vector<size_t> with_other_pieces_;  // than the layers before
  bool has_states_ = false, has_experts_beside_ = false;
  // The largest of all layers.
  int64_t query_size_ = 0, gates_size_ = 0, qkv_size_ = 0, mixed_size_ = 0, inner_size_ = 0;
  std::unique_ptr<HeadInput> head_input_;
  Buffer<T> hidden_, normed_, update_, qkv_, query_, gates_, mixed_, inner_, last_, layer_inputs_;
  Buffer<T> both_, draft_logits_, draft_states_[2];
  ExpertsMemory<T> experts_memory_;
  LatentMemory<T> latent_memory_;
  ShortConvolutionMemory<T> convolution_memory_;
  RecurrenceMemory<T> recurrence_memory_;
};

}  // namespace promptq
