#include "fully_shard/layout/block_copy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>

#include <cstring>

namespace tessera {

namespace {

char* address(const at::Tensor& tensor, int64_t offset) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + offset * static_cast<int64_t>(tensor.element_size());
}

bool is_memcpy(const at::Tensor& to, const at::Tensor& from) {
  return to.device().is_cpu() && from.device().is_cpu() && to.dtype() == from.dtype();
}

void copy_bytes(const at::Tensor& to, const at::Tensor& from, const CopyShape& shape) {
  const size_t bytes = static_cast<size_t>(shape.cols) * to.element_size();
  for (int64_t row = 0; row < shape.rows; ++row) {
    std::memcpy(address(to, shape.to_offset + row * shape.to_stride),
                address(from, shape.from_offset + row * shape.from_stride), bytes);
  }
}

at::Tensor view_block(const at::Tensor& tensor, int64_t offset, int64_t stride, const CopyShape& shape) {
  return tensor.as_strided({shape.rows, shape.cols}, {stride, 1}, tensor.storage_offset() + offset);
}

void copy_by_ops(std::span<const TensorCopy> copies) {
  std::vector<at::Tensor> targets, sources;
  for (const auto& [to, from, shape] : copies) {
    const auto target = view_block(to, shape.to_offset, shape.to_stride, shape);
    if (from.defined()) {
      targets.push_back(target);
      sources.push_back(view_block(from, shape.from_offset, shape.from_stride, shape));
    } else {
      target.zero_();
    }
  }
  if (!targets.empty()) {
    at::_foreach_copy_(targets, sources, /*non_blocking=*/true);
  }
}

}  // namespace

void BlockCopier::from_flat(const at::Tensor& param, const at::Tensor& flat, std::span<const BlockCopy> copies) {
  for (const auto& copy : copies) {
    add(param, flat,
        {.to_offset = copy.param_offset,
         .to_stride = copy.param_stride,
         .from_offset = copy.flat_offset,
         .from_stride = copy.flat_stride,
         .rows = copy.rows,
         .cols = copy.cols});
  }
}

void BlockCopier::to_flat(const at::Tensor& param, const at::Tensor& flat, std::span<const BlockCopy> copies) {
  for (const auto& copy : copies) {
    add(flat, param,
        {.to_offset = copy.flat_offset,
         .to_stride = copy.flat_stride,
         .from_offset = copy.param_offset,
         .from_stride = copy.param_stride,
         .rows = copy.rows,
         .cols = copy.cols});
  }
}

void BlockCopier::add(const at::Tensor& to, const at::Tensor& from, const CopyShape& shape) {
  if (is_memcpy(to, from)) {
    copy_bytes(to, from, shape);
  } else {
    copies_.push_back({to, from, shape});
  }
}

void BlockCopier::zero(const at::Tensor& flat, std::span<const FlatRange> ranges) {
  for (const auto& range : ranges) {
    if (flat.device().is_cpu()) {
      std::memset(address(flat, range.offset), 0, static_cast<size_t>(range.numel) * flat.element_size());
    } else {
      copies_.push_back({flat, at::Tensor(), {.to_offset = range.offset, .rows = 1, .cols = range.numel}});
    }
  }
}

void BlockCopier::run() {
  if (copies_.empty()) {
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!copy_by_kernels(copies_)) {
    copy_by_ops(copies_);
  }
  copies_.clear();
}

}  // namespace tessera
