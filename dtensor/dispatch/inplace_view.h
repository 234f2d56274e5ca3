#pragma once
// In-place ops that change a tensor's sizes: t_, squeeze_, resize_ and their kin. Each computes the new tensor and then
// lets the written one take on its sizes and content, so whoever holds the tensor sees the change. Internal to this
// package.

#include <ATen/core/Tensor.h>

namespace tessera {

/// `self` becomes what `other` is, and is returned; detached copies of `self` that share its data keep their own sizes.
const at::Tensor& adopt_data(const at::Tensor& self, const at::Tensor& other);
at::Tensor& adopt_data(at::Tensor& self, const at::Tensor& other);

}  // namespace tessera
