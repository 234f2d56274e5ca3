#pragma once
// Combines norms of DTensors that are sharded over the same axes, so that one kernel computes them.

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace tessera {

using LocalNorm = std::function<at::Tensor(at::TensorList locals)>;  // scalar p-norm of contiguous tensors

/// Returns NormPartial scalars with the p-norm of `tensors` (one mesh, not Partial). Throws StateError for stale views.
std::vector<at::Tensor> norms_of_shards(const std::vector<at::Tensor>& tensors, double p, at::ScalarType dtype,
                                        const LocalNorm& local_norm);

}  // namespace tessera
