#pragma once
// Mixed-precision and offload policies.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <functional>
#include <optional>
#include <string>

namespace tessera {

/// Dtypes for communication and computation. Shards, gradients and optimizer states keep their own (usually float32).
struct MixedPrecisionPolicy {
  /// Dtype of the all-gather and computation. Default, and for parameters that are not floating-point: the parameter's.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// Dtype of the gradient reduction. Default: that of the sharded parameters.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  /// Dtype of forward's floating-point outputs. Default: unchanged.
  std::optional<at::ScalarType> output_dtype = std::nullopt;
  /// Casts forward's floating-point inputs to param_dtype.
  bool cast_forward_inputs = true;
  /// Returns the param_dtype of a parameter by its name in the unit, equal on all ranks; nullopt: the one above.
  std::function<std::optional<at::ScalarType>(const at::Tensor& param, const std::string& name)>
      param_dtype_override_fn = nullptr;
};

/// Keeps shards, gradients and optimizer states in CPU memory, page-locked with `pin_memory`. A unit's shard is copied
/// to the mesh's device for its all-gather, and its gradients are copied back. Like
/// torch.distributed.fsdp.CPUOffloadPolicy.
struct CPUOffloadPolicy {
  bool pin_memory = true;
};

}  // namespace tessera
