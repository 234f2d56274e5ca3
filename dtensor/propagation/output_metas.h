#pragma once
// The global sizes, strides and dtypes of an op's outputs, from those of its operands: what a call on stand-ins for
// them returns, without data where the op has a meta kernel. Internal to this package.

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

/// Sets call.outputs and call.offsets. False if only running the op can tell the metas: their sizes depend on data, or
/// there is no meta kernel.
bool plan_output_metas(const OpRule& rule, OpCall& call);

/// Global metas of the outputs of a call on tensors with `call.operands`' metas: runs it on meta tensors.
/// With `offsets`, appends the storage offsets that they got.
std::vector<TensorMeta> infer_output_metas(const OpCall& call, std::vector<int64_t>* offsets = nullptr);

/// Output metas of a call on small tensors: runs the op itself on ones of `sizes(operand)`, on the mesh's device.
std::vector<TensorMeta> probe_output_metas(const OpCall& call,
                                           const std::function<DimVector(const TensorMeta&)>& sizes);

/// The dtypes of the outputs of an op that has no meta kernel: runs it on tensors of one element.
std::vector<at::ScalarType> infer_output_dtypes(const OpCall& call);

/// A tensor that has no data.
at::Tensor meta_tensor(const TensorMeta& meta);

}  // namespace tessera
