// Chooses tokens and reports log-probabilities. Threads share the rows, and each takes a row at a time.
//
// sampling/filters.py, draw.py and logprobs.py define what is computed.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>

#include "machine/elements.h"
#include "machine/exponential.h"
#include "selection.h"

namespace promptq {

// A token this far below the likeliest is never drawn (filters.py).
constexpr float kLowest = -60.0f;

// The filters of one row: FILTERS of filters.py in their order. A filter that the row does not use has the
// schema's default.
struct Asked {
  double min_p, top_k, top_p;
};
constexpr int64_t kNumFilters = sizeof(Asked) / sizeof(double);

// The threshold of filters.py on the scaled numbers of a row, whose greatest is 0.
float threshold_of(const Asked& asked, int64_t size, Workspace& space) {
  const float min_p = asked.min_p;
  float threshold = min_p > 0.0f ? std::max(kLowest, std::log(min_p)) : kLowest;
  const float* scaled = space.scaled.data();
  if (const int64_t top_k = asked.top_k; top_k > 0) {
    const int64_t count = gather<false>(scaled, size, reached_by(top_k, space), space);
    std::fill_n(space.weights.begin(), count, 1.0f);
    threshold = std::max(threshold, value_that_reaches(top_k, count, space));
  }
  if (asked.top_p < 1.0) {
    const int64_t count = gather<false>(scaled, size, threshold, space);
    double total = 0.0;
    for_blocks(count, [&](int64_t, int64_t begin, int64_t end) {
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = begin; i < end; ++i)
        sum += space.weights[i] = exponential(space.values[i]);
      total += sum;
    });
    threshold = std::max(threshold, value_that_reaches(asked.top_p * total, count, space));
  }
  return threshold;
}

// See draw.py; a token's weight is exp(scaled), or 0 below the threshold.
int64_t draw(float threshold, double uniform, int64_t size, Workspace& space) {
  float* scaled = space.scaled.data();
  double total = 0.0;
  for_blocks(size, [&](int64_t block, int64_t begin, int64_t end) {
    space.sums[block] = 0.0;
    if (space.highest[block] < threshold) return;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) {
      const float weight = exponential(scaled[i]);
      sum += scaled[i] = scaled[i] >= threshold ? weight : 0.0f;
    }
    total += space.sums[block] = sum;
  });
  const double target = uniform * total;
  // If rounding has lifted the target to the total, the last token that adds anything is taken.
  double cumulative = 0.0, before = 0.0;
  int64_t block = 0, token = 0;
  for (int64_t i = 0; i < num_blocks(size) && cumulative <= target; ++i) {
    if (space.sums[i] == 0.0) continue;
    block = i;
    before = cumulative;
    cumulative += space.sums[i];
  }
  const int64_t end = std::min((block + 1) * kBlock, size);
  cumulative = before;
  for (int64_t i = block * kBlock; i < end && cumulative <= target; ++i) {
    if (scaled[i] == 0.0f) continue;
    token = i;
    cumulative += scaled[i];
  }
  return token;
}

// A row's token, and whether there is one to choose.
template <typename T>
std::pair<int64_t, bool> choose_row(
    const T* row, int64_t size, bool is_sampled, float temperature, const Asked& asked,
    double uniform, Workspace& space) {
  const float best = scan(row, size, space.highest);
  if (!std::isfinite(best)) return {0, false};
  if (!is_sampled) return {first_of(row, size, best, space.highest), true};
  float* scaled = space.scaled.data();
  const float scale = 1.0f / temperature;
  for_blocks(size, [&](int64_t block, int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) scaled[i] = (load(row[i]) - best) * scale;
    space.highest[block] = block_maximum(scaled, begin, end);
  });
  return {draw(threshold_of(asked, size, space), uniform, size, space), true};
}

// Calls action(index, workspace) for each of `count` rows of `size` numbers, on all threads.
template <typename Action>
void for_rows(int64_t count, int64_t size, Action action) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    thread_local Workspace space;
    space.prepare(size);
    for (int64_t index = next++; index < count; index = next++) action(index, space);
  });
}

// Tokens [R] chosen by `logits` [R, vocabulary], and whether each is sound. `filters` are
// [R, kNumFilters], the others [R] or [R, 1].
std::tuple<at::Tensor, at::Tensor> choose(
    const at::Tensor& logits, const at::Tensor& is_sampled, const at::Tensor& temperature,
    const at::Tensor& filters, const at::Tensor& uniforms) {
  TORCH_CHECK(filters.size(1) == kNumFilters, "filters are not those of this code");
  const int64_t num_rows = logits.size(0), size = logits.size(1);
  at::Tensor tokens = at::empty({num_rows}, at::kLong), is_sound = at::empty({num_rows}, at::kBool);
  for_rows(num_rows, size, [&](int64_t row, Workspace& space) {
    Asked asked;
    std::memcpy(&asked, data<double>(filters) + row * kNumFilters, sizeof asked);
    const auto choose = [&](const auto* numbers) {
      return choose_row(
          numbers + row * size, size, data<bool>(is_sampled)[row], data<float>(temperature)[row],
          asked, data<double>(uniforms)[row], space);
    };
    const auto [token, sound] = logits.scalar_type() == at::kBFloat16 ? choose(data<Bf16>(logits))
                                                                      : choose(data<float>(logits));
    data<int64_t>(tokens)[row] = token;
    data<bool>(is_sound)[row] = sound;
  });
  return {tokens, is_sound};
}

// Where a row's report goes.
struct Report {
  float& logprob;
  int64_t& rank;
  int64_t* ids;
  float* logprobs;
};

template <typename T>
void report_row(
    const T* row, int64_t size, int64_t chosen, int64_t num_top, Report report, Workspace& space) {
  const float best = scan(row, size, space.highest), score = load(row[chosen]);
  if (!std::isfinite(best)) {
    report.logprob = std::numeric_limits<float>::quiet_NaN();
    report.rank = 1;
    std::iota(report.ids, report.ids + num_top, 0);
    std::fill_n(report.logprobs, num_top, report.logprob);
    return;
  }
  double total = 0.0;
  int64_t above = 0;
  for_blocks(size, [&](int64_t, int64_t begin, int64_t end) {
    float sum = 0.0f;
    int32_t count = 0;
#pragma omp simd reduction(+ : sum, count)
    for (int64_t i = begin; i < end; ++i) {
      sum += exponential(load(row[i]) - best);
      count += load(row[i]) > score;
    }
    total += sum;
    above += count;
  });
  const float log_total = best + static_cast<float>(std::log(total));
  report.logprob = score - log_total;
  report.rank = above + 1;
  const int64_t candidates = gather<true>(row, size, reached_by(num_top, space), space);
  const auto order = space.tokens.begin();
  std::partial_sort(order, order + num_top, order + candidates, [&](int64_t a, int64_t b) {
    const float left = load(row[a]), right = load(row[b]);
    return left > right || (left == right && a < b);
  });
  for (int64_t place = 0; place < num_top; ++place) {
    report.ids[place] = order[place];
    report.logprobs[place] = load(row[order[place]]) - log_total;
  }
}

// For `rows` [L] of `logits` [R, vocabulary]: log-probability and rank [L] of the tokens `chosen` [R],
// and ids and log-probabilities [L, num_top] of the likeliest tokens, in descending order.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> report_logprobs(
    const at::Tensor& logits, const at::Tensor& rows, const at::Tensor& chosen, int64_t num_top) {
  const int64_t count = rows.size(0), size = logits.size(1);
  at::Tensor logprob = at::empty({count}, at::kFloat), rank = at::empty({count}, at::kLong);
  at::Tensor ids = at::empty({count, num_top}, at::kLong);
  at::Tensor logprobs = at::empty({count, num_top}, at::kFloat);
  for_rows(count, size, [&](int64_t index, Workspace& space) {
    const int64_t row = data<int64_t>(rows)[index], token = data<int64_t>(chosen)[row];
    const Report report{data<float>(logprob)[index], data<int64_t>(rank)[index],
                        data<int64_t>(ids) + index * num_top,
                        data<float>(logprobs) + index * num_top};
    if (logits.scalar_type() == at::kBFloat16)
      report_row(data<Bf16>(logits) + row * size, size, token, num_top, report, space);
    else
      report_row(data<float>(logits) + row * size, size, token, num_top, report, space);
  });
  return {logprob, rank, ids, logprobs};
}

}  // namespace promptq

TORCH_LIBRARY_FRAGMENT(promptq, library) {
  library.def("choose", &promptq::choose);
  library.def("report_logprobs", &promptq::report_logprobs);
}
