#pragma once
// Decomposes strided views (as_strided) into slices and permutations of dims.
//
// For a row-major [4, 6], sizes {2, 3}, strides {12, 1} and offset 8 are rows 1 and 3 of columns 2 to 4: slice(0, 1, 4,
// 2).slice(1, 2, 5).
//
// Autograd describes views that are written in place by strides, and applies them to the gradient. After decomposition,
// they act on a sharded gradient like the view on the sharded tensor.

#include <ATen/core/Tensor.h>

#include <optional>

#include "dtensor/spec/dtensor_spec.h"

namespace tessera {

/// View in elements of the viewed tensor's memory; `offset` is relative to its first element.
struct StridedView {
  DimVector sizes;
  DimVector strides;
  int64_t offset = 0;
};

/// Slice of one dim: `count` indices from `start`, `step` apart.
struct DimSlice {
  int64_t start = 0;
  int64_t step = 1;
  int64_t count = 1;
  bool operator==(const DimSlice&) const = default;
};

/// Slices of all dims of the viewed tensor, and the slice that each dim of the view is.
struct SlicedDims {
  std::vector<DimSlice> slices;  // by dim of the viewed tensor
  std::vector<int64_t> dims;     // by dim of the view: dim of the viewed tensor, or -1 for a new dim of size 1
  bool operator==(const SlicedDims&) const = default;
};

/// Decomposes a view of a tensor with `meta`. Returns nothing if it overlaps itself, merges dims or exceeds the tensor.
std::optional<SlicedDims> take_apart(const TensorMeta& meta, const StridedView& view);

/// Returns which of a slice's indices, by number, are in `range`. For 1, 4, 7 and [3, 9), these are two from number 1.
DimRange indices_within(const DimSlice& slice, const DimRange& range);

/// Copies plain `view`, at `place` of a tensor of `spec`, to this rank's shard of that tensor.
void copy_to_place(const at::Tensor& view, const SlicedDims& place, const at::Tensor& local, const DTensorSpec& spec);

/// Returns `view` of `self` by slice, select, permute and unsqueeze, or nothing as above.
std::optional<at::Tensor> as_view_by_name(const at::Tensor& self, const StridedView& view);

}  // namespace tessera
