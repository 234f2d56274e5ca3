#include "fully_shard/layout/kernel_copies.h"

#include <algorithm>

#include "cuda/multi_copy.h"

namespace tessera {

namespace {

at::ScalarType source_dtype(const TensorCopy& copy) {
  return copy.from.defined() ? copy.from.scalar_type() : copy.to.scalar_type();
}

bool has_kernel(const TensorCopy& copy) {
  return copy.to.is_cuda() && (!copy.from.defined() || copy.from.device() == copy.to.device()) &&
         cuda::can_copy(copy.to.scalar_type(), source_dtype(copy));
}

/// Returns whether one MultiCopy can handle both.
bool go_together(const TensorCopy& a, const TensorCopy& b) {
  return a.to.device() == b.to.device() && a.to.scalar_type() == b.to.scalar_type() &&
         (!b.from.defined() || source_dtype(a) == source_dtype(b));
}

void add(cuda::MultiCopy& together, const TensorCopy& copy) {
  if (copy.from.defined()) {
    together.add(copy.to, copy.from, copy.shape);
    return;
  }
  const CopyShape& shape = copy.shape;
  for (int64_t row = 0; row < shape.rows; ++row) {
    together.add_zeros(copy.to, shape.to_offset + row * shape.to_stride, shape.cols);
  }
}

}  // namespace

bool copy_by_kernels(std::span<const TensorCopy> copies) {
  if (!std::ranges::all_of(copies, has_kernel)) {
    return false;
  }
  for (size_t i = 0; i < copies.size();) {
    const TensorCopy& first = copies[i];
    cuda::MultiCopy together(first.to.scalar_type(), source_dtype(first));
    for (; i < copies.size() && go_together(first, copies[i]); ++i) {
      add(together, copies[i]);
    }
    together.run();
  }
  return true;
}

}  // namespace tessera
