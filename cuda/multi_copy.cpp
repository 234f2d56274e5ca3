#include "cuda/multi_copy.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>

#include "base/error.h"
#include "cuda/copy_kernels.h"
#include "cuda/device.h"

namespace tessera::cuda {

namespace {

std::optional<CopyDtype> floating(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return CopyDtype::Float32;
    case at::kBFloat16:
      return CopyDtype::BFloat16;
    case at::kHalf:
      return CopyDtype::Float16;
    default:
      return std::nullopt;
  }
}

CopyDtype bits(size_t size) {
  return size == 1   ? CopyDtype::Bits8
         : size == 2 ? CopyDtype::Bits16
         : size == 4 ? CopyDtype::Bits32
                     : CopyDtype::Bits64;
}

/// What a kernel counts as one: an element, or half of one of 16 bytes.
int64_t units_per_element(at::ScalarType dtype) {
  return c10::elementSize(dtype) > 8 ? static_cast<int64_t>(c10::elementSize(dtype)) / 8 : 1;
}

int unit_size(at::ScalarType dtype) {
  return static_cast<int>(static_cast<int64_t>(c10::elementSize(dtype)) / units_per_element(dtype));
}

/// Whether the last element of a copy is in the tensor, and the first.
bool fits(const at::Tensor& tensor, int64_t offset, int64_t stride, int64_t rows, int64_t cols) {
  const bool empty = rows == 0 || cols == 0;
  return offset >= 0 && stride >= 0 && rows >= 0 && cols >= 0 &&
         (empty || offset + (rows - 1) * stride + cols <= tensor.numel());
}

void* address(const at::Tensor& tensor, int64_t offset) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + offset * static_cast<int64_t>(tensor.element_size());
}

}  // namespace

bool can_copy(at::ScalarType to, at::ScalarType from) {
  return to == from || (floating(to) && floating(from));
}

MultiCopy::MultiCopy(at::ScalarType to, at::ScalarType from) : to_(to), from_(from) {
  TESSERA_CHECK(NotImplementedError, can_copy(to, from),
                "MultiCopy: {} to {}; equal dtypes are allowed, or two of Float, BFloat16 and Half",
                c10::toString(from), c10::toString(to));
}

void MultiCopy::check(const at::Tensor& tensor, at::ScalarType dtype, const char* role) {
  TESSERA_CHECK(ValueError, tensor.defined() && tensor.is_cuda() && tensor.is_contiguous(),
                "MultiCopy: the {} is {}; a contiguous CUDA tensor is needed", role,
                tensor.defined()
                    ? fmt::format("on {}{}", tensor.device().str(), tensor.is_contiguous() ? "" : " and not contiguous")
                    : "undefined");
  TESSERA_CHECK(ValueError, tensor.scalar_type() == dtype, "MultiCopy: the {} is {}; this one takes {}", role,
                c10::toString(tensor.scalar_type()), c10::toString(dtype));
  TESSERA_CHECK(ValueError, device_.is_cpu() || device_ == tensor.device(),
                "MultiCopy: the {} is on {}, others on {}; one device is needed", role, tensor.device().str(),
                device_.str());
  device_ = tensor.device();
}

void MultiCopy::add(const at::Tensor& to, const at::Tensor& from, const CopyShape& shape) {
  check(to, to_, "target");
  check(from, from_, "source");
  const auto& [to_offset, to_stride, from_offset, from_stride, rows, cols] = shape;
  TESSERA_CHECK(
      ValueError, fits(to, to_offset, to_stride, rows, cols) && fits(from, from_offset, from_stride, rows, cols),
      "MultiCopy: {} rows of {} from {} (stride {}) of {} elements to {} (stride {}) of {}; they leave a tensor", rows,
      cols, from_offset, from_stride, from.numel(), to_offset, to_stride, to.numel());
  const int64_t units = units_per_element(to_);
  push({.to = address(to, to_offset),
        .from = address(from, from_offset),
        .to_stride = to_stride * units,
        .from_stride = from_stride * units,
        .rows = rows,
        .cols = cols * units});
}

void MultiCopy::add_zeros(const at::Tensor& to, int64_t offset, int64_t numel) {
  check(to, to_, "target");
  TESSERA_CHECK(ValueError, fits(to, offset, 0, 1, numel), "MultiCopy: zeros in [{}, {}) of {} elements", offset,
                offset + numel, to.numel());
  push({.to = address(to, offset), .rows = 1, .cols = numel * units_per_element(to_)});
}

void MultiCopy::push(const StridedCopy& copy) {
  if (num_tiles(copy) == 0) {
    return;
  }
  if (tables_.empty() || tables_.back().full()) {
    tables_.emplace_back();
  }
  tables_.back().add(copy, unit_size(to_), unit_size(from_));
}

void MultiCopy::run() {
  if (tables_.empty()) {
    return;
  }
  const c10::cuda::CUDAGuard guard(device_);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_.index());
  const bool casts = to_ != from_;
  const CopyDtype to = casts ? *floating(to_) : bits(unit_size(to_));
  const CopyDtype from = casts ? *floating(from_) : to;
  for (const CopyTable& table : tables_) {
    check_cuda(launch_copies(table, to, from, stream), "MultiCopy");
  }
  tables_.clear();
}

}  // namespace tessera::cuda
