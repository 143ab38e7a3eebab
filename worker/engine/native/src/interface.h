// Functions that Python calls (native/library.py has the same structures). This code includes no header of
// Python or torch, so that one library serves all their versions.
//
// Numbers are one after the other in memory of the caller, which keeps it as long as stated here. Matrices
// are [rows, columns]. Weights, K and V, activations and logits are all fp32 or all bf16, but weights of
// linear layers may have 8 or 4 bits. Functions that can fail return null or an error message, valid until
// the thread's next call.
#pragma once

#include <cstdint>

#include "attention/work_pieces.h"
#include "layers/convolution.h"
#include "layers/norm.h"
#include "layers/rotation.h"
#include "linear/packed.h"

namespace promptq {

struct ModelShape {
  int64_t is_bf16;
  int64_t is_packed;  // 0, only in fp32: weights, also those of bf16, are read where they are, which is slow
  int64_t size, vocab_size;  // of hidden states
  double embedding_scale;
  double logit_scale, logit_softcap;  // softcap 0: none
};

// The weight of a linear layer [outputs, inputs]; see Matrix.
struct Weight {
  const void* numbers;
  const float *scales, *offsets;
  int64_t bits, group;
  int64_t row_stride, column_stride;
};

inline Matrix matrix(const Weight& weight, int64_t outputs, int64_t inputs) {
  return {weight.numbers, weight.scales, weight.offsets, weight.bits, weight.group, outputs, inputs,
          weight.row_stride, weight.column_stride};
}

// The inputs that layers have beside the hidden states (layers/layer_inputs.h).
struct LayerInputsWeights {
  int64_t num_layers, size;         // numbers of a layer's inputs
  Weight table;                     // [vocab_size, num_layers size]
  double table_scale;
  Weight projection;                // [num_layers size, size of hidden states]
  double projection_scale;
  Norm norm;                        // [size]
  double scale;
};

// The part of a layer that reads its inputs.
struct LayerInputWeights {
  int64_t size, activation;
  Weight gate;                      // [size, size of hidden states]
  Weight output;                    // [size of hidden states, size]
  Norm after;                       // [size of hidden states]
};

// The caller keeps these as long as the decoder. It may drop the head and the inputs' projection if weights
// are packed.
struct ModelWeights {
  Weight embedding;       // [vocab_size, size]
  Norm norm;              // [size]
  Weight head;            // [vocab_size, size]
  const void* head_bias;  // [vocab_size], may be null
  const LayerInputsWeights* inputs;  // null: layers have no such inputs
};

// `cache` has the head size and the number of KV heads.
struct AttentionWeights {
  int64_t num_heads;
  int64_t shares_kv;                // K and V of `cache` are those of an earlier layer; there are only queries
  int64_t is_gated;                 // a row of a query head is followed by one of its gate, in `query`
  Weight query, key, value;         // [num_heads head_size, size] and [num_kv_heads head_size, size]; without
                                    // numbers in `key`, `query` has the rows of all three
  const void* qkv_bias;             // of all three, one after the other, then of the gates
  Norm query_norm, key_norm;        // of each head; `norms_whole_rows`: of all heads of a row together
  Norm value_norm;                  // of each head
  int64_t norms_whole_rows, norms_rotated;  // `norms_rotated`: they follow the rotation
  Rotation rotation;
  Scoring scoring;
  Weight output;                    // [size, num_heads head_size]
  const void* output_bias;
  LayerCache cache;
};

// `cache` has the latents: K is the latent [value_size of `cache`] and the rotated key, V the latent alone. Its KV
// heads are groups of heads, which all read the same rows.
struct LatentAttentionWeights {
  int64_t num_heads, key_size, value_size;  // of a head: the numbers of a key that come from the latent, values
  int64_t query_rank;               // the size of the inputs of `query`; 0: the hidden states, without a norm
  Weight query_down, down;          // [query_rank, size], [row of the cache, size]
  const void* input_bias;           // of both, one after the other
  Norm query_norm;                  // [query_rank]
  Weight query;                     // [num_heads (key_size + rotated size), inputs]
  const void* query_bias;
  Norm norm;                        // of the latent
  Rotation rotation;
  Scoring scoring;
  Weight up;                        // [num_heads (key_size + value_size), latent], a head's keys before its values
  Weight output;                    // [size, num_heads value_size]
  const void* output_bias;
  LayerCache cache;
};

struct MlpWeights {
  int64_t inner_size, activation, is_gated;
  double gate_scale;                // the factor of the inputs of the activation
  double numbers[4];                // of the activation (layers/activation.h)
  Weight gate, up;                  // [inner_size, size]; without numbers in `up`, `gate` has the rows of both
  const void* input_bias;           // of both, one after the other
  Weight down;                      // [size, inner_size]
  const void* down_bias;
};

enum Scores : int64_t { kSoftmax, kSigmoid, kSparsemixer };

// How experts and their shares follow from the logits of a router.
struct Routing {
  int64_t num_experts, top_k;
  int64_t scores;                   // one of Scores
  const float* choice_bias;         // [num_experts], added to the scores for the choice alone; may be null
  int64_t num_groups, top_groups;   // experts are chosen from the best groups, of equal size
  int64_t normalizes;               // whether shares are divided by their sum plus `added_sum`
  double added_sum, scale, jitter;
  const float* expert_scales;       // [num_experts], factors of the shares; may be null
};

struct ExpertWeights {
  Routing routing;
  Weight router;                    // fp32 [num_experts + has_shared_gate, size]
  const float* router_bias;         // of the same outputs, may be null
  int64_t has_shared_gate;          // whether the last output of the router scales the shared experts
  int64_t num_mlps;
  const MlpWeights* mlps;           // of the experts, then of the shared ones
};

// Experts of a layer that also has a dense MLP (layers/experts_beside.h).
struct ExpertsBesideWeights {
  ExpertWeights experts;
  Norm before_router, before, after, after_mlp;  // [size]
};

struct ShortConvolutionWeights {
  Weight input;                     // [3 channels, size]: of b, c and x
  const void* input_bias;
  Convolution convolution;
  Weight output;                    // [size, channels]
  const void* output_bias;
};

// Some rows of a weight.
struct RowsOfWeight {
  Weight weight;
  int64_t first, count;
};

// Groups of value heads that follow each other share a key head.
struct RecurrenceWeights {
  int64_t is_delta;                 // see layers/scan.h
  int64_t num_key_heads, num_value_heads, key_size, value_size;
  int64_t num_inputs;
  const RowsOfWeight* inputs;       // one after the other: the channels, inputs of gates, in the delta rule a rate
                                    // for each value head, and inputs of time steps
  const void* input_bias;
  const float* input_scale;         // factors of these outputs, or null
  int64_t gate_inputs, time_inputs;
  Weight gates, times;              // compute a gate for each value, and time steps; without numbers, the inputs
  const void *gates_bias, *times_bias;  // are these
  int64_t has_key_decays;           // whether each number of a value head's keys has a time step, or the head has one
  Convolution convolution;          // followed by SiLU
  int64_t query_first, key_first, value_first;  // the channels with which these begin
  double query_scale;
  const float *time_bias, *decay;   // of each time step, [num_value_heads]: a token decays the state by
                                    // e^(decay time)
  double least_time, most_time;
  double most_rate;                 // of the delta rule; otherwise the rate is the time step
  const float* skip;                // [num_value_heads], or null
  Norm norm;                        // [values] in groups of norm_size, or none
  int64_t norm_size, gates_first;   // `gates_first`: before the norm
  int64_t has_sigmoid;              // the sigmoid of a gate is the factor, not its SiLU
  Weight output;                    // [size, num_value_heads value_size]
  const void* output_bias;
  float* states;                    // [entries, num_value_heads, key_size value_size]
};

// The caller keeps norms, rotations, sinks, convolutions, rates, K and V, states, and weights that are not
// packed as long as the decoder, which copies the rest. Biases may be null. A layer has a mixer, an MLP, or
// both. Pointers to missing parts are null.
struct LayerWeights {
  Norm before_mixer, after_mixer, before_mlp, after_mlp;  // [size]
  int64_t is_parallel;              // the MLP has the input of the mixer
  double mixer_scale, beside_scale, mlp_scale;  // factors of the results of the parts
  double output_scale;              // the factor of the hidden states at the end of the layer
  const AttentionWeights* attention;            // the mixer is one of these four
  const LatentAttentionWeights* latent;
  const ShortConvolutionWeights* convolution;
  const RecurrenceWeights* recurrence;          // or it is beside attention, and has the same input
  const MlpWeights* mlp;                        // one of these two
  const ExpertWeights* experts;
  const ExpertsBesideWeights* experts_beside;   // beside `mlp`
  const LayerInputWeights* input;               // follows the MLP
};

// A head that drafts tokens: a layer whose input is made of a token's embedding and of the final hidden state
// of the row before. It uses the model's embedding and output layer. The caller keeps norms as above.
struct HeadWeights {
  Norm of_embedding, of_state;      // [size]
  Weight projection;                // [size, 2 size], of the normed embedding and then the normed state
  LayerWeights layer;
  Norm last;                        // [size], of the head's final hidden states
};

// The caller keeps these as long as the call. A step has T rows.
struct Step {
  int64_t num_rows;
  const int64_t *ids, *positions;  // [T]
  int64_t num_outputs;
  const int64_t* outputs;          // [num_outputs], the rows of `logits`
  int64_t num_kept;
  const int64_t* kept;             // [num_kept], the rows of `states`
  Layout layout;
  StateEntries entries;            // null without recurrent layers
  void* logits;                    // [num_outputs, vocab_size]
  void* states;                    // [num_kept, size], the final hidden states
};

// How tokens are chosen from logits: `filters` are [rows, num_filters], the others [rows].
struct Choice {
  const bool* is_sampled;
  const float* temperature;
  const double* filters;
  int64_t num_filters;
  const double* uniforms;
};

// Sequences with more drafted tokens come first. Blocks have room for K and V of the drafted tokens.
struct Draft {
  Step step;                       // without outputs; `ids` are the tokens after the rows of `states`
  const void* states;              // [T, size], final hidden states of the model
  const int64_t* num_drafted;      // [num_sequences]
  int64_t most_drafted;
  Choice choice;                   // of [most_drafted, num_sequences] rows
  int64_t* tokens;                 // [most_drafted, num_sequences]; undefined beyond a sequence's number
};

class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual void add_layer(const LayerWeights& weights) = 0;
  // Adds the head, after all layers.
  virtual void add_head(const HeadWeights& weights) = 0;
  // Computes the head on the rows of a step, then again and again on its own results.
  virtual void draft(const Draft& draft) = 0;
  // Computes the logits and states of a step, and writes K and V of all its rows.
  virtual void run(const Step& step) = 0;
};

}  // namespace promptq

extern "C" {

const char* decoder_new(
    const promptq::ModelShape* shape, const promptq::ModelWeights* weights, int64_t num_threads,
    promptq::Decoder** decoder);
void decoder_free(promptq::Decoder* decoder);
const char* decoder_add_layer(promptq::Decoder* decoder, const promptq::LayerWeights* weights);
const char* decoder_run(promptq::Decoder* decoder, const promptq::Step* step);
const char* decoder_add_head(promptq::Decoder* decoder, const promptq::HeadWeights* weights);
const char* decoder_draft(promptq::Decoder* decoder, const promptq::Draft* draft);

// Chooses tokens [rows] by logits [rows, vocab_size]. `is_sound`: whether a row's largest logit is finite.
// `filters` are [rows, num_filters]; the other inputs are [rows].
const char* choose_tokens(
    int64_t is_bf16, const void* logits, int64_t rows, int64_t vocab_size, const bool* is_sampled,
    const float* temperature, const double* filters, int64_t num_filters, const double* uniforms,
    int64_t num_threads, int64_t* tokens, bool* is_sound);

// For the rows `reported` [count] of `logits`: log-probability and rank [count] of the tokens `chosen`
// [rows], and ids and log-probabilities [count, num_top] of the likeliest tokens, in descending order.
const char* report_logprobs(
    int64_t is_bf16, const void* logits, int64_t vocab_size, const int64_t* reported, int64_t count,
    const int64_t* chosen, int64_t num_top, int64_t num_threads, float* logprob, int64_t* rank,
    int64_t* ids, float* logprobs);

// Rounds `weight` [rows, columns] as in Matrix: `numbers` [rows, row_bytes], `scales` [rows, groups].
const char* quantize(
    int64_t is_bf16, const void* weight, int64_t rows, int64_t columns, int64_t bits, int64_t group,
    int64_t num_threads, uint8_t* numbers, float* scales);

// Makes the C library keep freed memory. Otherwise the system would clear some megabytes in each step.
void keep_freed_memory();

// Parts of decoders, for tests.

// Computes attention of rows [T, num_heads * head_size] over a cache that already has their K and V.
const char* paged_attention(
    int64_t is_bf16, const void* query, int64_t num_heads, const promptq::LayerCache* cache,
    const promptq::Layout* layout, const promptq::Scoring* scoring, void* out);
// y [rows, outputs] = x w' + b of `x` [rows, inputs] and `weight` [outputs, inputs]. `in_tiles`: in tile
// registers, only if has_tile_registers().
const char* linear(
    int64_t is_bf16, int64_t in_tiles, const void* x, int64_t rows, const promptq::Weight* weight,
    int64_t outputs, int64_t inputs, const void* bias, void* y);
// y [rows, size] = a mixture of experts of `x` [rows, size]. Weights are read in place unless `is_packed`.
const char* experts(
    int64_t is_bf16, int64_t is_packed, const void* x, int64_t rows, int64_t size,
    const promptq::ExpertWeights* weights, int64_t num_threads, void* y);
bool has_tile_registers();
}
