#pragma once
// Distributes a module's parameters, buffers, inputs and outputs over a mesh. Parameters keep their identity, so
// optimizers stay valid. All ranks must make the same calls in the same order. Thread safety: one thread per rank.
// Source: torch.distributed.tensor.distribute_module.

#include <torch/nn/module.h>

#include <functional>
#include <string>

#include "dtensor/dtensor.h"
#include "nn/hooks/hook_point.h"
#include "nn/hooks/module_ref.h"

namespace tessera {

/// Makes parameter or buffer `name` of `module` itself (not of a child) a DTensor. Throws KeyError for an unknown name,
/// ValueError if it is already a DTensor or the placements do not fit, StateError if it has a gradient.
void distribute_parameter(torch::nn::Module& module, const std::string& name, const DeviceMesh& mesh,
                          const Placements& placements, DistributeOptions options = {});

struct DistributeModuleOptions {
  /// Distributes parameters as needed. Runs once per module, under its first name ("" for the root).
  std::function<void(const std::string& name, torch::nn::Module& module, const DeviceMesh& mesh)> partition_fn =
      nullptr;
  /// Runs before forward on the tensors among its arguments, which it may replace.
  std::function<void(torch::nn::Module& module, TensorRefs inputs, const DeviceMesh& mesh)> input_fn = nullptr;
  /// Runs after forward on the tensors of its result.
  std::function<void(torch::nn::Module& module, TensorRefs outputs, const DeviceMesh& mesh)> output_fn = nullptr;
};

/// Runs partition_fn, replicates the remaining plain parameters and buffers, and registers input_fn and output_fn.
/// Throws StateError without a hook point for them, or if a plain parameter has a gradient.
void distribute_module(ModuleRef module, const DeviceMesh& mesh, DistributeModuleOptions options = {});

}  // namespace tessera
