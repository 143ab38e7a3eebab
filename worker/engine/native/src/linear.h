// A linear layer, cut into slices of its output so that the threads of a team can share it.
//
// A slice is multiplied on one thread: by oneDNN, two rows at least, since from there on what comes
// out for a row does not depend on the rows beside it; or by widening.h, in bf16 on processors that
// oneDNN has no fast code for.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <vector>

#include "team.h"
#include "widening.h"

namespace promptq {

using OptionalTensor = c10::optional<at::Tensor>;

using Scalars = c10::List<c10::optional<at::Scalar>>;

inline auto& reorder_weight() {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("mkldnn::_reorder_linear_weight", "")
                       .typed<at::Tensor(const at::Tensor&, c10::optional<int64_t>)>();
  return op;
}

inline auto& packed_linear() {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                       .typed<at::Tensor(
                           const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                           c10::string_view, Scalars, c10::optional<c10::string_view>)>();
  return op;
}

struct Range {
  int64_t first, count;
};

class Linear {
 public:
  // `stacked` are weights [columns, in] of one size; a slice holds the same columns of each, in
  // order. `bias` is for a single one of them. Slices end at multiples of `granule` columns, of
  // which there may be at most `num_slices`.
  Linear(
      const std::vector<at::Tensor>& stacked, const OptionalTensor& bias, int64_t granule,
      int64_t num_slices) {
    const int64_t columns = stacked[0].size(0), granules = (columns + granule - 1) / granule;
    num_slices = std::min(num_slices, granules);
    for (int64_t slice = 0; slice < num_slices; ++slice) {
      const int64_t first = std::min(columns, granules * slice / num_slices * granule);
      const int64_t last = std::min(columns, granules * (slice + 1) / num_slices * granule);
      std::vector<at::Tensor> parts;
      for (const at::Tensor& weight : stacked) parts.push_back(weight.slice(0, first, last));
      const at::Tensor weight = at::cat(parts);
      slices_.push_back(Slice{
          is_widened(weight) ? WideningWeight::pack(weight)
                             : reorder_weight().call(weight, kTypicalRows),
          bias ? OptionalTensor(bias->slice(0, first, last).contiguous()) : OptionalTensor(),
          Range{first, last - first}, weight.size(0)});
    }
  }

  // One phase: use(y, rows, columns) is given y = x w' + b for some rows of `x`, [rows, stacked *
  // columns]. Of `x`, which holds kLeastRows at least, the first `num_rows` count.
  template <typename Use>
  void multiply(Team& team, const at::Tensor& x, int64_t num_rows, const Use& use) const {
    const int64_t num_slices = slices_.size(), num_parts = (num_rows + kMostRows - 1) / kMostRows;
    team.share(num_parts * num_slices, [&](int64_t item) {
      const Slice& slice = slices_[item % num_slices];
      const int64_t part = item / num_slices, first = num_rows * part / num_parts;
      const Range rows{first, num_rows * (part + 1) / num_parts - first};
      const int64_t least = is_widened(slice.weight) ? 1 : kLeastRows;
      use(apply(x.narrow(0, first, std::max(rows.count, least)), slice), rows, slice.columns);
    });
  }

  static constexpr int64_t kLeastRows = 2;

 private:
  struct Slice {
    at::Tensor weight;
    OptionalTensor bias;
    Range columns;  // of each of the stacked
    int64_t width;  // of all of them
  };

  // Rows that weights are laid out for; measured, one layout serves 1 to 512 rows equally well.
  static constexpr int64_t kTypicalRows = 32;
  // Rows of one item, at most: enough to read weights seldom, few enough to stay in the cache.
  static constexpr int64_t kMostRows = 256;

  static at::Tensor apply(const at::Tensor& x, const Slice& slice) {
    if (is_widened(slice.weight))
      return WideningWeight::multiply(x, slice.weight, slice.bias, slice.width);
    return packed_linear().call(x, slice.weight, slice.bias, "none", Scalars(), "");
  }

  // Whether oneDNN would multiply these weights one number at a time.
  static bool is_widened(const at::Tensor& weight) {
    static const bool multiplies_bf16 =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("mkldnn::_is_mkldnn_bf16_supported", "")
            .typed<bool()>()
            .call();
    return weight.scalar_type() == at::kBFloat16 && !multiplies_bf16;
  }

  std::vector<Slice> slices_;
};

}  // namespace promptq
