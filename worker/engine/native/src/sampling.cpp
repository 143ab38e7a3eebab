// Chooses tokens and reports log-probabilities, as sampling/filters.py, draw.py and logprobs.py define.
// Threads share the rows, and each takes a row at a time.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "guarded.h"
#include "interface.h"
#include "machine/elements.h"
#include "machine/exponential.h"
#include "machine/team.h"
#include "selection.h"

namespace promptq {

// A token this far below the likeliest is never drawn (filters.py).
constexpr float kLowest = -60.0f;

// The filters of one row, in the order of FILTERS in filters.py. Unused filters have the schema's default.
struct Filters {
  double min_p, top_k, top_p;
};
constexpr int64_t kNumFilters = sizeof(Filters) / sizeof(double);

// Returns the threshold of filters.py for the scaled numbers of a row, whose greatest is 0.
float threshold_of(const Filters& filters, int64_t size, Workspace& space) {
  const float min_p = filters.min_p;
  float threshold = min_p > 0.0f ? std::max(kLowest, std::log(min_p)) : kLowest;
  const float* scaled = space.scaled.data();
  if (const int64_t top_k = filters.top_k; top_k > 0) {
    const int64_t count = gather<false>(scaled, size, reached_by(top_k, space), space);
    std::fill_n(space.weights.begin(), count, 1.0f);
    threshold = std::max(threshold, value_that_reaches(top_k, count, space));
  }
  if (filters.top_p < 1.0) {
    const int64_t count = gather<false>(scaled, size, threshold, space);
    double total = 0.0;
    for_blocks(count, [&](int64_t, int64_t begin, int64_t end) {
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = begin; i < end; ++i)
        sum += space.weights[i] = exponential(space.values[i]);
      total += sum;
    });
    threshold = std::max(threshold, value_that_reaches(filters.top_p * total, count, space));
  }
  return threshold;
}

// Draws a token (see draw.py). A token's weight is exp(scaled), or 0 below the threshold.
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
  // If rounding lifted the target to the total, the loops end at the last token with a weight.
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

// Returns a row's token, and whether there is one to choose.
template <typename T>
std::pair<int64_t, bool> choose_row(
    const T* row, int64_t size, bool is_sampled, float temperature, const Filters& filters,
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
  return {draw(threshold_of(filters, size, space), uniform, size, space), true};
}

// Calls action(index, workspace) for each of `count` rows of `size` numbers, on at most `num_threads`.
template <typename Action>
void for_rows(int64_t count, int64_t size, int64_t num_threads, const Action& action) {
  Team::run(static_cast<int>(std::clamp<int64_t>(count, 1, num_threads)), [&](Team& team) {
    team.share(count, [&](int64_t index) {
      thread_local Workspace space;
      space.prepare(size);
      action(index, space);
    });
  });
}

// The places of a row's report.
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

}  // namespace promptq

const char* choose_tokens(
    int64_t is_bf16, const void* logits, int64_t rows, int64_t vocab_size, const bool* is_sampled,
    const float* temperature, const double* filters, int64_t num_filters, const double* uniforms,
    int64_t num_threads, int64_t* tokens, bool* is_sound) {
  using namespace promptq;
  return guarded([&] {
    if (num_filters != kNumFilters) throw std::invalid_argument("filters are not those of this code");
    for_rows(rows, vocab_size, num_threads, [&](int64_t row, Workspace& space) {
      Filters of_row;
      std::memcpy(&of_row, filters + row * kNumFilters, sizeof of_row);
      std::tie(tokens[row], is_sound[row]) = with_type(is_bf16, logits, [&](const auto* numbers) {
        return choose_row(
            numbers + row * vocab_size, vocab_size, is_sampled[row], temperature[row], of_row,
            uniforms[row], space);
      });
    });
  });
}

const char* report_logprobs(
    int64_t is_bf16, const void* logits, int64_t vocab_size, const int64_t* reported, int64_t count,
    const int64_t* chosen, int64_t num_top, int64_t num_threads, float* logprob, int64_t* rank,
    int64_t* ids, float* logprobs) {
  using namespace promptq;
  return guarded([&] {
    for_rows(count, vocab_size, num_threads, [&](int64_t index, Workspace& space) {
      const int64_t row = reported[index];
      const Report report{
          logprob[index], rank[index], ids + index * num_top, logprobs + index * num_top};
      with_type(is_bf16, logits, [&](const auto* numbers) {
        report_row(numbers + row * vocab_size, vocab_size, chosen[row], num_top, report, space);
      });
    });
  });
}
