#pragma once
// Infers the global sizes, strides and dtypes of an op's outputs. Calls the op on tensors without data, if it has a
// meta kernel. Internal to this package.

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

/// Sets call.outputs and call.offsets. Returns false if only running the op determines them: sizes depend on data, or
/// there is no meta kernel.
bool plan_output_metas(const OpRule& rule, OpCall& call);

/// Returns the output metas of a call on meta tensors with `call.operands`' metas. Appends storage offsets to
/// `offsets`.
std::vector<TensorMeta> infer_output_metas(const OpCall& call, std::vector<int64_t>* offsets = nullptr);

/// Returns the output metas of a call on small tensors of `sizes(operand)`, by running the op on the mesh's device.
std::vector<TensorMeta> probe_output_metas(const OpCall& call,
                                           const std::function<DimVector(const TensorMeta&)>& sizes);

/// Returns the output dtypes of an op without a meta kernel, by running it on tensors of one element.
std::vector<at::ScalarType> infer_output_dtypes(const OpCall& call);

/// Returns a tensor without data.
at::Tensor meta_tensor(const TensorMeta& meta);

}  // namespace tessera
