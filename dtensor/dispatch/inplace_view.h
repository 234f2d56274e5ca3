#pragma once
// In-place ops that change a tensor's sizes: t_, squeeze_, resize_ and the like. Each computes a new tensor, whose
// sizes and content the written one adopts, so that all holders of the tensor see the change. Internal to this package.

#include <ATen/core/Tensor.h>

namespace tessera {

/// Makes `self` adopt the data of `other` and returns it. Detached copies of `self` that share its data keep their
/// sizes.
const at::Tensor& adopt_data(const at::Tensor& self, const at::Tensor& other);
at::Tensor& adopt_data(at::Tensor& self, const at::Tensor& other);

}  // namespace tessera
