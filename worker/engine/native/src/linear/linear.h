// A linear layer, cut into slices of its output so that the threads of a team can share it.
//
// A slice is multiplied on one thread, and the result of a row does not depend on the rows beside it.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <vector>

#include "machine/team.h"
#include "linear/tile_linear.h"
#include "linear/widening.h"

namespace promptq {

using OptionalTensor = c10::optional<at::Tensor>;

// The fewest rows with which every way of multiplying works.
constexpr int64_t kLeastRows = 2;

// How weights are packed, and how rows are multiplied with packed weights: x w' + b for `x` of
// [rows, in], which has at least `least_rows`, and `columns` outputs.
struct Products {
  at::Tensor (*pack)(const at::Tensor& weight);
  at::Tensor (*multiply)(
      const at::Tensor& x, const at::Tensor& packed, const OptionalTensor& bias, int64_t columns);
  int64_t least_rows = 1;
};

// The library's products (oneDNN). They would sum one row alone in another order than among others.
inline at::Tensor pack_for_library(const at::Tensor& weight) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("mkldnn::_reorder_linear_weight", "")
                       .typed<at::Tensor(const at::Tensor&, c10::optional<int64_t>)>();
  constexpr int64_t kTypicalRows = 32;  // measured, one layout serves 1 to 512 rows equally well
  return op.call(weight, kTypicalRows);
}

inline at::Tensor multiply_by_library(
    const at::Tensor& x, const at::Tensor& packed, const OptionalTensor& bias, int64_t) {
  using Scalars = c10::List<c10::optional<at::Scalar>>;
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                       .typed<at::Tensor(
                           const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                           c10::string_view, Scalars, c10::optional<c10::string_view>)>();
  return op.call(x, packed, bias, "none", Scalars(), "");
}

inline bool library_multiplies_bf16() {
  static const bool does = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("mkldnn::_is_mkldnn_bf16_supported", "")
                               .typed<bool()>()
                               .call();
  return does;
}

inline Products products_of(at::ScalarType type) {
  if (type == at::kBFloat16) {
#ifdef __AMX_BF16__
    if (has_tiles()) return {TileWeight::pack, TileWeight::multiply};
#endif
    // The library would multiply bf16 one number at a time.
    if (!library_multiplies_bf16()) return {WideningWeight::pack, WideningWeight::multiply};
  }
  return {pack_for_library, multiply_by_library, kLeastRows};
}

// x w' + b of bf16 in one call: [rows, in], [columns, in] and [columns].
template <typename Weight>
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  return Weight::multiply(x, Weight::pack(weight), bias, weight.size(0));
}

struct Range {
  int64_t first, count;
};

class Linear {
 public:
  // `stacked` are weights [columns, in] of one size. A slice has the same columns of each, in order.
  // `bias` is for a single weight only. Slices end at multiples of `granule` columns. There are at most
  // `num_slices`.
  Linear(
      const std::vector<at::Tensor>& stacked, const OptionalTensor& bias, int64_t granule,
      int64_t num_slices)
      : products_(products_of(stacked[0].scalar_type())) {
    const int64_t columns = stacked[0].size(0), granules = (columns + granule - 1) / granule;
    num_slices = std::min(num_slices, granules);
    for (int64_t slice = 0; slice < num_slices; ++slice) {
      const int64_t first = std::min(columns, granules * slice / num_slices * granule);
      const int64_t last = std::min(columns, granules * (slice + 1) / num_slices * granule);
      std::vector<at::Tensor> parts;
      for (const at::Tensor& weight : stacked) parts.push_back(weight.slice(0, first, last));
      const at::Tensor weight = at::cat(parts);
      slices_.push_back(Slice{
          products_.pack(weight),
          bias ? OptionalTensor(bias->slice(0, first, last).contiguous()) : OptionalTensor(),
          Range{first, last - first}, weight.size(0)});
    }
  }

  // One phase: use(y, rows, columns) is called with y = x w' + b [rows, stacked * columns] for some rows
  // of `x`. `x` has at least kLeastRows; only the first `num_rows` count.
  template <typename Use>
  void multiply(Team& team, const at::Tensor& x, int64_t num_rows, const Use& use) const {
    const int64_t num_slices = slices_.size(), num_parts = (num_rows + kMostRows - 1) / kMostRows;
    team.share(num_parts * num_slices, [&](int64_t item) {
      const Slice& slice = slices_[item % num_slices];
      const int64_t part = item / num_slices, first = num_rows * part / num_parts;
      const Range rows{first, num_rows * (part + 1) / num_parts - first};
      const at::Tensor these = x.narrow(0, first, std::max(rows.count, products_.least_rows));
      use(products_.multiply(these, slice.weight, slice.bias, slice.width), rows, slice.columns);
    });
  }

 private:
  struct Slice {
    at::Tensor weight;
    OptionalTensor bias;
    Range columns;  // of each of the stacked
    int64_t width;  // of all of them
  };

  // The most rows of one item: enough to read weights rarely, few enough to stay in the cache.
  static constexpr int64_t kMostRows = 256;

  Products products_;
  std::vector<Slice> slices_;
};

}  // namespace promptq
