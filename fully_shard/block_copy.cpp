#include "fully_shard/block_copy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>

#include <cstring>

namespace tessera {

namespace {

char* bytes_of(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.mutable_data_ptr());
}

bool is_memcpy(const at::Tensor& a, const at::Tensor& b) {
  return a.device().is_cpu() && b.device().is_cpu() && a.dtype() == b.dtype();
}

at::Tensor block_of_flat(const at::Tensor& flat, const BlockCopy& copy) {
  return flat.as_strided({copy.rows, copy.cols}, {copy.flat_stride, 1}, flat.storage_offset() + copy.flat_offset);
}

at::Tensor block_of_param(const at::Tensor& param, const BlockCopy& copy) {
  return param.as_strided({copy.rows, copy.cols}, {copy.param_stride, 1}, param.storage_offset() + copy.param_offset);
}

}  // namespace

void BlockCopier::from_flat(const at::Tensor& param, const at::Tensor& flat, std::span<const BlockCopy> copies) {
  const bool direct = is_memcpy(param, flat);
  const auto item = static_cast<int64_t>(param.element_size());
  for (const auto& copy : copies) {
    if (!direct) {
      targets_.push_back(block_of_param(param, copy));
      sources_.push_back(block_of_flat(flat, copy));
      continue;
    }
    for (int64_t row = 0; row < copy.rows; ++row) {
      std::memcpy(bytes_of(param) + (copy.param_offset + row * copy.param_stride) * item,
                  bytes_of(flat) + (copy.flat_offset + row * copy.flat_stride) * item, copy.cols * item);
    }
  }
}

void BlockCopier::to_flat(const at::Tensor& param, const at::Tensor& flat, std::span<const BlockCopy> copies) {
  const bool direct = is_memcpy(param, flat);
  const auto item = static_cast<int64_t>(param.element_size());
  for (const auto& copy : copies) {
    if (!direct) {
      targets_.push_back(block_of_flat(flat, copy));
      sources_.push_back(block_of_param(param, copy));
      continue;
    }
    for (int64_t row = 0; row < copy.rows; ++row) {
      std::memcpy(bytes_of(flat) + (copy.flat_offset + row * copy.flat_stride) * item,
                  bytes_of(param) + (copy.param_offset + row * copy.param_stride) * item, copy.cols * item);
    }
  }
}

void BlockCopier::run() {
  if (!targets_.empty()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    at::_foreach_copy_(targets_, sources_, /*non_blocking=*/true);
    targets_.clear();
    sources_.clear();
  }
}

void zero_ranges(const at::Tensor& flat, std::span<const FlatRange> ranges) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto item = static_cast<int64_t>(flat.element_size());
  for (const auto& range : ranges) {
    if (flat.device().is_cpu()) {
      std::memset(bytes_of(flat) + range.offset * item, 0, range.numel * item);
    } else {
      flat.narrow(0, range.offset, range.numel).zero_();
    }
  }
}

}  // namespace tessera
