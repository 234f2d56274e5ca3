#include "dtensor/spec/strided_view.h"

#include <ATen/ops/slice.h>

#include <algorithm>

namespace tessera {

namespace {

/// Returns the dims of size above 1, largest stride first; none if two of them could overlap.
std::optional<std::vector<size_t>> dims_by_stride(const TensorMeta& meta) {
  std::vector<size_t> order;
  for (size_t dim = 0; dim < meta.sizes.size(); ++dim) {
    if (meta.sizes[dim] > 1) {
      order.push_back(dim);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return meta.strides[a] > meta.strides[b]; });
  int64_t span = 0;  // distance to the last element of the inner dims
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    if (meta.strides[*dim] <= span) {
      return std::nullopt;
    }
    span += meta.strides[*dim] * (meta.sizes[*dim] - 1);
  }
  return order;
}

/// Sliced tensor, with its dims as in the view.
at::Tensor arranged(at::Tensor sliced, const std::vector<int64_t>& dims) {
  // Dims that the view has, in its order, then those with a single selected index.
  std::vector<int64_t> order;
  std::ranges::copy_if(dims, std::back_inserter(order), [](int64_t dim) { return dim >= 0; });
  const size_t kept = order.size();
  for (int64_t dim = 0; dim < sliced.dim(); ++dim) {
    if (std::ranges::find(order, dim) == order.end()) {
      order.push_back(dim);
    }
  }
  at::Tensor result = sliced.permute(order);
  while (result.dim() > static_cast<int64_t>(kept)) {
    result = result.select(-1, 0);
  }
  for (size_t i = 0; i < dims.size(); ++i) {
    result = dims[i] < 0 ? result.unsqueeze(static_cast<int64_t>(i)) : result;
  }
  return result;
}

/// Returns the number of a slice's first index that is at least `bound`.
int64_t first_from(const DimSlice& slice, int64_t bound) {
  const int64_t number = (bound - slice.start + slice.step - 1) / slice.step;
  return bound <= slice.start ? 0 : std::min(number, slice.count);
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
    // The largest stride that divides the view's: a smaller one would have to extend into that dim.
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

DimRange indices_within(const DimSlice& slice, const DimRange& range) {
  const int64_t first = first_from(slice, range.offset);
  return {.offset = first, .length = first_from(slice, range.offset + range.length) - first};
}

void copy_to_place(const at::Tensor& view, const SlicedDims& place, const at::Tensor& local, const DTensorSpec& spec) {
  std::vector<DimRange> indices;
  at::Tensor target = local;
  for (int64_t dim = 0; dim < spec.ndim(); ++dim) {
    const auto& slice = place.slices[static_cast<size_t>(dim)];
    const auto range = local_range(spec.sizes()[static_cast<size_t>(dim)], dim, spec.placements(), spec.position());
    const auto mine = indices_within(slice, range);
    if (mine.length == 0) {
      return;
    }
    const int64_t start = slice.start + mine.offset * slice.step - range.offset;
    target = at::slice(target, dim, start, start + (mine.length - 1) * slice.step + 1, slice.step);
    indices.push_back(mine);
  }
  at::Tensor source = view;
  for (size_t i = 0; i < place.dims.size(); ++i) {
    if (place.dims[i] >= 0) {
      const auto& mine = indices[static_cast<size_t>(place.dims[i])];
      source = source.narrow(static_cast<int64_t>(i), mine.offset, mine.length);
    }
  }
  arranged(std::move(target), place.dims).copy_(source);
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
  return arranged(std::move(result), apart->dims);
}

}  // namespace tessera
