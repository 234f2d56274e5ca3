#pragma once
// Mixed-precision and offload policies.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <functional>
#include <optional>
#include <string>

namespace tessera {

/// Dtypes of communication and computation; shards, gradients and optimizer states keep their own (usually float32).
struct MixedPrecisionPolicy {
  /// Dtype of the all-gather and the computation. Default, and for parameters that are not floating: the parameter's.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// Dtype of the gradient reduction. Default: that of the sharded parameters.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  /// Dtype of forward's floating-point outputs. Default: left as they are.
  std::optional<at::ScalarType> output_dtype = std::nullopt;
  /// Casts forward's floating-point inputs to param_dtype.
  bool cast_forward_inputs = true;
  /// Gives the param_dtype of single parameters by their names in the unit, the same on all ranks; none: that above.
  std::function<std::optional<at::ScalarType>(const at::Tensor& param, const std::string& name)>
      param_dtype_override_fn = nullptr;
};

/// Keeps shards, gradients and optimizer states in the CPU's memory, page-locked with `pin_memory`. A unit's shard goes
/// to the mesh's device for its all-gather, and its gradients come back. As torch.distributed.fsdp.CPUOffloadPolicy.
struct CPUOffloadPolicy {
  bool pin_memory = true;
};

}  // namespace tessera
