#pragma once
// Values of a tensor that an op needs as numbers, of which there are few.

#include <ATen/core/Tensor.h>

#include <vector>

#include "dtensor/local/gather_full.h"

namespace tessera {

/// Those of the whole tensor, where that is a DTensor (collective then), in row-major order.
template <class Number>
std::vector<Number> read_numbers(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  const at::Tensor whole = meta ? gather_full(*meta) : tensor;
  const at::Tensor list = whole.to(at::kCPU, c10::CppTypeToScalarType<Number>::value).contiguous();
  return {list.const_data_ptr<Number>(), list.const_data_ptr<Number>() + list.numel()};
}

}  // namespace tessera
