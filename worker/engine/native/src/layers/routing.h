// Chooses a row's experts, and their shares in its result.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "interface.h"
#include "machine/exponential.h"

namespace promptq {

class ExpertChoice {
 public:
  explicit ExpertChoice(const Routing& routing)
      : routing_(routing),
        bias_(routing.choice_bias, routing.choice_bias + (routing.choice_bias ? routing.num_experts : 0)),
        expert_scales_(
            routing.expert_scales, routing.expert_scales + (routing.expert_scales ? routing.num_experts : 0)) {}

  // Writes `top_k` different experts, the likeliest first, and their shares. `logits` are [num_experts].
  void choose(const float* logits, int64_t* experts, float* shares) const {
    thread_local std::vector<float> scores, ranks;
    const int64_t num_experts = routing_.num_experts, top_k = routing_.top_k;
    if (routing_.scores == kSparsemixer) return mix(logits, experts, shares);
    scores.assign(logits, logits + num_experts);
    if (routing_.scores == kSigmoid)
      for (float& score : scores) score = 1.0f / (1.0f + exponential(-score));
    else
      softmax_of(scores);
    ranks = scores;
    for (size_t i = 0; i < bias_.size(); ++i) ranks[i] += bias_[i];
    if (routing_.top_groups < routing_.num_groups) leave_groups(ranks);
    pick(ranks, top_k, experts);
    float sum = 0.0f;
    for (int64_t slot = 0; slot < top_k; ++slot) sum += shares[slot] = scores[experts[slot]];
    const float divisor = routing_.normalizes ? sum + static_cast<float>(routing_.added_sum) : 1.0f;
    for (int64_t slot = 0; slot < top_k; ++slot)
      shares[slot] = shares[slot] / divisor * static_cast<float>(routing_.scale);
    if (!expert_scales_.empty())
      for (int64_t slot = 0; slot < top_k; ++slot) shares[slot] *= expert_scales_[experts[slot]];
  }

 private:
  static constexpr float kNever = -std::numeric_limits<float>::infinity();

  static void softmax_of(std::vector<float>& scores) {
    const float most = *std::max_element(scores.begin(), scores.end());
    float sum = 0.0f;
    for (float& score : scores) sum += score = exponential(score - most);
    for (float& score : scores) score /= sum;
  }

  // Writes the indices of the `count` largest numbers, the largest first: different ones, even with NaN.
  static void pick(const std::vector<float>& numbers, int64_t count, int64_t* indices) {
    const int64_t size = numbers.size();
    thread_local std::vector<bool> is_left;
    is_left.assign(size, true);
    for (int64_t slot = 0; slot < count; ++slot) {
      int64_t best = -1;
      for (int64_t i = 0; i < size; ++i)
        if (is_left[i] && (best < 0 || numbers[i] > numbers[best])) best = i;
      is_left[best] = false;
      indices[slot] = best;
    }
  }

  // Leaves the groups of experts whose two best ranks have the largest sums.
  void leave_groups(std::vector<float>& ranks) const {
    const int64_t num_groups = routing_.num_groups, size = routing_.num_experts / num_groups;
    std::vector<float> sums;
    for (int64_t first = 0; first < routing_.num_experts; first += size) {
      float best = kNever, second = kNever;
      for (int64_t i = first; i < first + size; ++i) {
        second = std::max(second, std::min(best, ranks[i]));
        best = std::max(best, ranks[i]);
      }
      sums.push_back(best + second);
    }
    std::vector<int64_t> kept(routing_.top_groups);
    pick(sums, routing_.top_groups, kept.data());
    for (int64_t group = 0; group < num_groups; ++group)
      if (std::find(kept.begin(), kept.end(), group) == kept.end())
        std::fill_n(ranks.begin() + group * size, size, kNever);
  }

  // The sparsemixer of Phi 3.5: an expert's share is its softmax among the experts that are left and near it.
  void mix(const float* logits, int64_t* experts, float* shares) const {
    const int64_t num_experts = routing_.num_experts;
    const float most = 2.0f * static_cast<float>(routing_.jitter);
    pick({logits, logits + num_experts}, routing_.top_k, experts);
    for (int64_t slot = 0; slot < routing_.top_k; ++slot) {
      const float best = logits[experts[slot]];
      float sum = 0.0f;
      for (int64_t i = 0; i < num_experts; ++i) {
        const bool is_taken = std::find(experts, experts + slot, i) != experts + slot;
        if (is_taken || (best - logits[i]) / std::max(std::fabs(logits[i]), best) > most) continue;
        sum += exponential(logits[i] - best);
      }
      shares[slot] = 1.0f / sum;
    }
  }

  const Routing routing_;
  const std::vector<float> bias_, expert_scales_;
};

}  // namespace promptq
