// quantile and nanquantile. ATen's read memory, and mix plain tensors with their operands. They are composite here too,
// so they can be differentiated again. `q` is a number, or a tensor of numbers: they are read, and a plain one must be
// equal on every rank.

#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/where.h>
#include <fmt/ranges.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "dtensor/ops/read_numbers.h"
#include "dtensor/spec/dtensor_spec.h"

namespace tessera {

namespace {

using Interpolation = std::string_view;

void check_input(const at::Tensor& self, Interpolation interpolation) {
  const auto dtype = self.scalar_type();
  TESSERA_CHECK(ValueError, dtype == at::kFloat || dtype == at::kDouble, "aten::quantile: Float or Double, not {}",
                toString(dtype));
  TESSERA_CHECK(ValueError, self.numel() > 0, "aten::quantile of a tensor without elements");
  constexpr Interpolation kKnown[] = {"linear", "lower", "higher", "midpoint", "nearest"};
  TESSERA_CHECK(ValueError, std::ranges::find(kKnown, interpolation) != std::end(kKnown),
                "aten::quantile: interpolation '{}'; there are {}", interpolation, fmt::join(kKnown, ", "));
}

/// Returns positions among the sorted values of each row, [..., quantiles]. In a row with NaNs, which sort last, it is
/// the last position, or a position among the other values. In 64 bits, like libtorch 2.15 (2.11 rounded them to the
/// input's dtype).
at::Tensor places(const at::Tensor& sorted, const std::vector<double>& quantiles, bool ignores_nan) {
  const auto last = static_cast<double>(sorted.size(-1) - 1);
  const auto nans = sorted.detach().isnan().sum(-1, /*keepdim=*/true).to(at::kDouble);
  const auto largest = ignores_nan ? (last - nans).clamp_min(0) : nans * 0 + last;
  std::vector<at::Tensor> result;
  result.reserve(quantiles.size());
  for (const double quantile : quantiles) {
    const auto place = largest * quantile;
    result.push_back(ignores_nan ? place : place.masked_fill(nans.gt(0), last));
  }
  return at::cat(result, -1);
}

at::Tensor select(const at::Tensor& sorted, at::Tensor places, Interpolation interpolation) {
  if (interpolation == "nearest") {
    places = places.round();
  } else if (interpolation == "lower") {
    places = places.floor();
  } else if (interpolation == "higher") {
    places = places.ceil();
  }
  const auto lower = places.floor(), upper = places.ceil();
  auto values = at::gather(sorted, -1, lower.to(at::kLong));
  if (interpolation != "linear" && interpolation != "midpoint") {
    return values;
  }
  const auto weights = interpolation == "linear" ? places - lower : places * 0 + 0.5;
  return at::lerp(values, at::gather(sorted, -1, upper.to(at::kLong)), weights.to(sorted.scalar_type()));
}

/// Returns [count, 1, 1, ...].
std::vector<int64_t> sizes_of_whole(int64_t count, int64_t ndim) {
  std::vector<int64_t> sizes(static_cast<size_t>(ndim) + 1, 1);
  sizes[0] = count;
  return sizes;
}

/// Returns [quantiles, ...], without dim `dim` or with size 1 there.
at::Tensor compute_quantiles(const at::Tensor& self, const std::vector<double>& quantiles, std::optional<int64_t> dim,
                             bool keepdim, Interpolation interpolation, bool ignores_nan) {
  check_input(self, interpolation);
  for (const double quantile : quantiles) {
    TESSERA_CHECK(ValueError, quantile >= 0 && quantile <= 1, "aten::quantile: q {}; it is from 0 to 1", quantile);
  }
  const bool has_rows = dim && self.dim() > 0;
  const auto row_dim = has_rows ? at::maybe_wrap_dim(*dim, self.dim()) : 0;
  const auto rows = has_rows ? self.transpose(row_dim, -1) : self.flatten();
  // A stable sort, so that no kernel's order determines which of equal elements gets the gradient. (ATen's picks any.)
  const auto sorted = std::get<0>(rows.sort(/*stable=*/true, /*dim=*/-1, /*descending=*/false));
  const auto result = select(sorted, places(sorted, quantiles, ignores_nan), interpolation);
  if (!has_rows) {
    return keepdim ? result.view(sizes_of_whole(result.size(0), self.dim())) : result;
  }
  const auto columns = result.unsqueeze(0).transpose(0, -1);  // the row's dim now has size 1, and is last
  return keepdim ? columns.transpose(row_dim + 1, -1) : columns.squeeze(-1);
}

/// Returns `q` rounded to `self`'s dtype.
double rounded(double q, const at::Tensor& self) {
  return self.scalar_type() == at::kFloat ? static_cast<double>(static_cast<float>(q)) : q;
}

std::vector<double> quantile_numbers(const at::Tensor& q, const at::Tensor& self) {
  TESSERA_CHECK(ValueError, q.dim() <= 1 && q.scalar_type() == self.scalar_type(),
                "aten::quantile: q is a number or vector of the input's dtype {}, not {}", toString(self.scalar_type()),
                to_string(TensorMeta::of(q)));
  TESSERA_CHECK(NotImplementedError, !q.requires_grad(), "aten::quantile: q gets no gradient; give q.detach()");
  return read_numbers<double>(q);
}

template <bool ignores_nan>
at::Tensor of_tensor(const at::Tensor& self, const at::Tensor& q, std::optional<int64_t> dim, bool keepdim,
                     Interpolation interpolation) {
  const auto result = compute_quantiles(self, quantile_numbers(q, self), dim, keepdim, interpolation, ignores_nan);
  return q.dim() == 0 ? result.squeeze(0) : result;
}

template <bool ignores_nan>
at::Tensor of_number(const at::Tensor& self, double q, std::optional<int64_t> dim, bool keepdim,
                     Interpolation interpolation) {
  return compute_quantiles(self, {rounded(q, self)}, dim, keepdim, interpolation, ignores_nan).squeeze(0);
}

void override_quantiles(torch::Library& library) {
  library.impl("quantile", &of_tensor<false>);
  library.impl("quantile.scalar", &of_number<false>);
  library.impl("nanquantile", &of_tensor<true>);
  library.impl("nanquantile.scalar", &of_number<true>);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  override_quantiles(library);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  override_quantiles(library);
}

}  // namespace tessera
