#include "cuda/multi_norm.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <vector>

#include "base/error.h"
#include "cuda/device.h"
#include "cuda/norm_kernels.h"

namespace tessera::cuda {

namespace {

std::optional<NormDtype> find_norm_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return NormDtype::Float32;
    case at::kBFloat16:
      return NormDtype::BFloat16;
    case at::kHalf:
      return NormDtype::Float16;
    case at::kDouble:
      return NormDtype::Float64;
    default:
      return std::nullopt;
  }
}

NormDtype norm_dtype(at::ScalarType dtype) {
  const auto found = find_norm_dtype(dtype);
  TESSERA_CHECK(ValueError, found.has_value(), "multi_tensor_norm: {}; Float, BFloat16, Half and Double are allowed",
                c10::toString(dtype));
  return *found;
}

void check_tensors(at::TensorList tensors) {
  TESSERA_CHECK(ValueError, !tensors.empty(), "multi_tensor_norm: no tensors; at least one is needed");
  for (const at::Tensor& tensor : tensors) {
    TESSERA_CHECK(ValueError, tensor.defined() && tensor.is_cuda() && tensor.is_contiguous(),
                  "multi_tensor_norm: a tensor is undefined, not on a CUDA device, or not contiguous");
    TESSERA_CHECK(ValueError, tensor.device() == tensors[0].device() && tensor.dtype() == tensors[0].dtype(),
                  "multi_tensor_norm: {} on {} among {} on {}; one dtype and one device are needed",
                  c10::toString(tensor.scalar_type()), tensor.device().str(), c10::toString(tensors[0].scalar_type()),
                  tensors[0].device().str());
  }
}

std::vector<NormTable> make_tables(at::TensorList tensors) {
  std::vector<NormTable> tables(1);
  for (const at::Tensor& tensor : tensors) {
    if (tables.back().full()) {
      tables.emplace_back();
    }
    tables.back().add(tensor.const_data_ptr(), tensor.numel());
  }
  return tables;
}

}  // namespace

bool has_norm(at::ScalarType dtype) {
  return find_norm_dtype(dtype).has_value();
}

at::Tensor multi_tensor_norm(at::TensorList tensors, NormKind kind) {
  check_tensors(tensors);
  const NormDtype dtype = norm_dtype(tensors[0].scalar_type());
  const auto options = tensors[0].options().dtype(dtype == NormDtype::Float64 ? at::kDouble : at::kFloat);
  const c10::cuda::CUDAGuard guard(tensors[0].device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const std::vector<NormTable> tables = make_tables(tensors);
  int64_t count = 0;
  for (const NormTable& table : tables) {
    count += norm_blocks(table.tiles());
  }
  const at::Tensor partials = at::empty({count}, options), result = at::empty({}, options);
  char* place = static_cast<char*>(partials.mutable_data_ptr());
  for (const NormTable& table : tables) {
    check_cuda(launch_norm(table, dtype, kind, place, stream), "multi_tensor_norm");
    place += norm_blocks(table.tiles()) * static_cast<int64_t>(partials.element_size());
  }
  check_cuda(launch_norm_result(partials.const_data_ptr(), count, dtype, kind, result.mutable_data_ptr(), stream),
             "multi_tensor_norm");
  return result;
}

}  // namespace tessera::cuda
