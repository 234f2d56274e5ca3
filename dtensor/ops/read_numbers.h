#pragma once
// Reads the values of small tensors that an op needs as numbers.

#include <ATen/core/Tensor.h>

#include <vector>

#include "dtensor/local/gather_full.h"

namespace tessera {

/// Returns the values of the whole tensor in row-major order. For a DTensor, all ranks must call it.
template <class Number>
std::vector<Number> read_numbers(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  const at::Tensor whole = meta ? gather_full(*meta) : tensor;
  const at::Tensor list = whole.to(at::kCPU, c10::CppTypeToScalarType<Number>::value).contiguous();
  return {list.const_data_ptr<Number>(), list.const_data_ptr<Number>() + list.numel()};
}

}  // namespace tessera
