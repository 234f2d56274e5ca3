#include "dtensor/strided_view.h"

#include <ATen/ops/slice.h>

#include <algorithm>
#include <numeric>

namespace tessera {

namespace {

/// The dims of more than one index, largest stride first; none if two of them could overlap.
std::optional<std::vector<size_t>> dims_by_stride(const TensorMeta& meta) {
  std::vector<size_t> order;
  for (size_t dim = 0; dim < meta.sizes.size(); ++dim) {
    if (meta.sizes[dim] > 1) {
      order.push_back(dim);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return meta.strides[a] > meta.strides[b]; });
  for (size_t i = 0; i + 1 < order.size(); ++i) {
    const size_t inner = order[i + 1];
    if (meta.strides[order[i]] < meta.strides[inner] * meta.sizes[inner]) {
      return std::nullopt;
    }
  }
  const bool valid = order.empty() || meta.strides[order.back()] > 0;
  return valid ? std::optional(order) : std::nullopt;
}

}  // namespace

std::optional<SlicedDims> take_apart(const TensorMeta& meta, const StridedView& view) {
  const auto order = dims_by_stride(meta);
  if (!order || view.offset < 0 || is_empty(meta.sizes) || is_empty(view.sizes)) {
    return std::nullopt;
  }
  SlicedDims result{.slices = std::vector<DimSlice>(meta.sizes.size()),
                    .dims = std::vector<int64_t>(view.sizes.size(), -1)};
  int64_t rest = view.offset;
  for (const size_t dim : *order) {
    result.slices[dim].start = rest / meta.strides[dim];
    rest %= meta.strides[dim];
  }
  for (size_t i = 0; i < view.sizes.size(); ++i) {
    if (view.sizes[i] == 1) {
      continue;
    }
    // The largest stride that the view's own is a multiple of: a smaller one would have to run over into that dim.
    const auto found = std::ranges::find_if(*order, [&](size_t dim) { return meta.strides[dim] <= view.strides[i]; });
    if (found == order->end() || view.strides[i] % meta.strides[*found] != 0 || result.slices[*found].count != 1) {
      return std::nullopt;
    }
    result.slices[*found].step = view.strides[i] / meta.strides[*found];
    result.slices[*found].count = view.sizes[i];
    result.dims[i] = static_cast<int64_t>(*found);
  }
  for (size_t dim = 0; dim < meta.sizes.size(); ++dim) {
    const auto& slice = result.slices[dim];
    if (slice.start + (slice.count - 1) * slice.step >= meta.sizes[dim]) {
      return std::nullopt;
    }
  }
  return rest == 0 ? std::optional(result) : std::nullopt;
}

std::optional<at::Tensor> as_view_by_name(const at::Tensor& self, const StridedView& view) {
  const auto apart = take_apart(TensorMeta::of(self), view);
  if (!apart) {
    return std::nullopt;
  }
  at::Tensor result = self;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    const auto& slice = apart->slices[static_cast<size_t>(dim)];
    result = at::slice(result, dim, slice.start, slice.start + (slice.count - 1) * slice.step + 1, slice.step);
  }
  // Dims that the view has, in its order, then those of which it has one index.
  std::vector<int64_t> order;
  std::ranges::copy_if(apart->dims, std::back_inserter(order), [](int64_t dim) { return dim >= 0; });
  const size_t kept = order.size();
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (std::ranges::find(order, dim) == order.end()) {
      order.push_back(dim);
    }
  }
  result = result.permute(order);
  while (result.dim() > static_cast<int64_t>(kept)) {
    result = result.select(-1, 0);
  }
  for (size_t i = 0; i < apart->dims.size(); ++i) {
    result = apart->dims[i] < 0 ? result.unsqueeze(static_cast<int64_t>(i)) : result;
  }
  return result;
}

}  // namespace tessera
