#pragma once
// In which precision a fully_shard unit communicates and computes.

#include <c10/core/ScalarType.h>

#include <optional>

namespace tessera {

/// Sharded parameters, gradients and optimizer states keep their own dtype (usually float32); only what is
/// gathered, computed with and reduced is cast. As torch.distributed.fsdp.MixedPrecisionPolicy.
struct MixedPrecisionPolicy {
  /// Dtype of the unsharded parameters, so of the all-gather and the computation. Default: the parameter's.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// Dtype of the gradient reduction. Default: the dtype of the sharded parameter, so that a float32 model
  /// reduces in float32 also where it computes in bfloat16.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  /// Floating-point outputs of the unit's forward are cast to it. Default: left as they are.
  std::optional<at::ScalarType> output_dtype = std::nullopt;
  /// Floating-point inputs of the unit's forward are cast to param_dtype.
  bool cast_forward_inputs = true;
};

}  // namespace tessera
