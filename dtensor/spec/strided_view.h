#pragma once
// Strided views (as_strided) taken apart into slices and permutations of dims.
//
// Example: of a row-major [4, 6], sizes {2, 3}, strides {12, 1}, offset 8 are rows 1 and 3, columns 2 to 4:
// slice(0, 1, 4, 2).slice(1, 2, 5).
//
// Autograd describes every view that is written in place by its strides, and applies them to the gradient. Taken apart,
// they work on a sharded gradient as the view itself worked on the sharded tensor.

#include <ATen/core/Tensor.h>

#include <optional>

#include "dtensor/spec/dtensor_spec.h"

namespace tessera {

/// In elements of the viewed tensor's memory; `offset` counts from its first element.
struct StridedView {
  DimVector sizes;
  DimVector strides;
  int64_t offset = 0;
};

/// What is taken of one dim: `count` indices from `start` on, `step` apart.
struct DimSlice {
  int64_t start = 0;
  int64_t step = 1;
  int64_t count = 1;
  bool operator==(const DimSlice&) const = default;
};

/// A view as slices of all dims of the viewed tensor, and then which of them each dim of the view is.
struct SlicedDims {
  std::vector<DimSlice> slices;  // by dim of the viewed tensor
  std::vector<int64_t> dims;     // by dim of the view: a dim of the viewed tensor, -1 for a new dim of size 1
  bool operator==(const SlicedDims&) const = default;
};

/// `view` of a tensor of `meta`; none if it is no such view: it overlaps itself, merges dims, or leaves the tensor.
std::optional<SlicedDims> take_apart(const TensorMeta& meta, const StridedView& view);

/// Which of a slice's indices into a dim, by number, lie in `range` of it: of 1, 4, 7 in [3, 9) those from number 1 on,
/// two of them.
DimRange indices_within(const DimSlice& slice, const DimRange& range);

/// Copies `view`, a plain tensor that lies at `place` of a tensor of `spec`, to this rank's part of that.
void copy_to_place(const at::Tensor& view, const SlicedDims& place, const at::Tensor& local, const DTensorSpec& spec);

/// `view` of `self` by slice, select, permute and unsqueeze. None as above.
std::optional<at::Tensor> as_view_by_name(const at::Tensor& self, const StridedView& view);

}  // namespace tessera
