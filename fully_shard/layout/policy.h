#pragma once
// In which precision a fully_shard unit communicates and computes, and where its shards are between uses.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <functional>
#include <optional>
#include <string>

namespace tessera {

/// Sharded parameters, gradients and optimizer states keep their own dtype (usually float32); only what is
/// gathered, computed with and reduced is cast. As torch.distributed.fsdp.MixedPrecisionPolicy.
struct MixedPrecisionPolicy {
  /// Dtype of the unsharded parameters, so of the all-gather and the computation. Default: the parameter's; so it is
  /// for parameters that are not floating, such as quantized weights in uint8.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// Dtype of the gradient reduction. Default: the dtype of the sharded parameters that are trained, so that a float32
  /// model reduces in float32 also where it computes in bfloat16.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  /// Floating-point outputs of the unit's forward are cast to it. Default: left as they are.
  std::optional<at::ScalarType> output_dtype = std::nullopt;
  /// Floating-point inputs of the unit's forward are cast to param_dtype. One of another dtype is a copy then: if
  /// forward changes it in place, the caller's tensor stays as it was.
  bool cast_forward_inputs = true;
  /// The param_dtype of single parameters, by their names below the unit's module: none: that above. So norms may
  /// compute in float32 in a unit that computes in bfloat16; the unit still gathers once. It depends only on what all
  /// ranks share.
  std::function<std::optional<at::ScalarType>(const at::Tensor& param, const std::string& name)>
      param_dtype_override_fn = nullptr;
};

/// Sharded parameters, gradients and so the optimizer's states are in the memory of the CPU. A unit's shard goes to the
/// mesh's device for its all-gather, and its reduced gradients come back. As torch.distributed.fsdp.CPUOffloadPolicy.
/// On a mesh of CPUs nothing moves.
struct CPUOffloadPolicy {
  /// Shards in page-locked memory, from which copies to CUDA overlap with computation; only there.
  bool pin_memory = true;
};

}  // namespace tessera
